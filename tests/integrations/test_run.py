"""`adafactor run`: a script that asks transformers for its Adafactor gets ours, and runs as it would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from adafactor.cli import main
from tests.launch import python, torchrun

pytest.importorskip("transformers")

# Prints what it got, in the three ways that scripts and trainers have to get it, and where it runs.
SCRIPT = """
import sys
import torch
from transformers import Adafactor, Trainer, TrainingArguments, optimization
args = TrainingArguments(output_dir="unused", optim="adafactor", learning_rate=1e-3, use_cpu=True, report_to=[])
kind, keywords = Trainer.get_optimizer_cls_and_kwargs(args)
assert kind is Adafactor is optimization.Adafactor, kind
optimizer = kind([torch.nn.Parameter(torch.ones(3, 2))], **keywords)
group = optimizer.param_groups[0]
assert __name__ == "__main__"
got = type(optimizer).__mro__[1].__module__, group["rounding"], group["clip"], group["lr"], sys.argv[1:]
print(" ".join(map(str, got)))  # at once: two processes may write to the same place
if "--fail" in sys.argv:
    raise ValueError("the script's own")
if "--leave" in sys.argv:
    sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_the_script_gets_ours_with_the_keywords_of_the_flag_before_those_of_the_variable(folder: Path) -> None:
    flags = ("--set", "rounding=stochastic", "--set", "clip_threshold=0.5")
    done = python(
        "-m",
        "adafactor",
        "run",
        *flags,
        "train.py",
        "--set",
        "x",
        cwd=folder,
        environment={"ADAFACTOR_ARGS": "rounding=kahan seed=1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "adafactor.hf stochastic 0.5 0.001 ['--set', 'x']\n"
    line = "transformers' Adafactor is adafactor.hf.Adafactor(rounding=stochastic, seed=1, clip_threshold=0.5)\n"
    assert f"adafactor run: {line}" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"], "nothing is on disk that was not"


def test_a_module_runs_with_its_own_exit_status_and_traceback(folder: Path) -> None:
    done = python(
        "-m", "adafactor", "run", "-m", "train", "--leave", cwd=folder, environment={"PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert (done.returncode, done.stdout) == (7, "adafactor.hf nearest 1.0 0.001 ['--leave']\n")
    done = python("-m", "adafactor", "run", "train.py", "--fail", cwd=folder)
    assert done.returncode == 1 and 'train.py", line' in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: the script's own")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "nowhere.py is not a file"),
        (["accelerate", "launch"], "write `accelerate ... -m adafactor run train.py`"),
        (["--set", "rounding", "train.py"], "rounding is not NAME=VALUE"),
        (["--set", "speed=2", "train.py"], "has no keyword speed"),
        (["--set", "relative=false", "train.py"], "transformers' word for relative is scale_parameter"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("adafactor run: ") and said in err and err.count("\n") == 1 and not out


def test_keywords_that_need_others_are_taken_where_the_script_gives_those(folder: Path) -> None:
    """None of these is right alone: `lr` needs relative_step=False, a dtype needs beta1, rules need names."""
    script = SCRIPT.replace("**keywords)", "**keywords, beta1=0.9)").replace('group["lr"]', 'group["momentum_dtype"]')
    script = script.replace('group["clip"]', 'group["seed"]')
    (folder / "train.py").write_text(
        script.replace("[torch.nn", "[('w', torch.nn").replace("ones(3, 2))]", "ones(3, 2)))]")
    )
    flags = ("--set", "lr=3e-4", "--set", "momentum_dtype=int8", "--set", "rules={'w': {'seed': 3}}")
    done = python("-m", "adafactor", "run", *flags, "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "adafactor.hf nearest 3 int8 []\n"), done.stderr
    refused = python("-m", "adafactor", "run", "--set", "rounding=up", "train.py", cwd=folder)
    assert refused.returncode == 1 and "rounding='up' must be one of 'nearest'" in refused.stderr


@pytest.mark.slow
def test_torchrun_launches_it_and_one_process_says_so(folder: Path) -> None:
    status, output = torchrun(["-m", "adafactor", "run", str(folder / "train.py")], ranks=2)
    assert status == 0, output
    assert output.count("adafactor.hf nearest 1.0 0.001 []") == 2
    assert output.count("transformers' Adafactor is adafactor.hf.Adafactor()") == 1
