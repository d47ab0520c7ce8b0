"""Every recipe under `examples/` runs as a user would run it, and its loss falls."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch import ROOT, python, torchrun

EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")}


def output(name: str, *words: str) -> str:
    """What the example printed."""
    run = python(f"examples/{name}", *words)
    assert run.returncode == 0, run.stderr[-6000:]
    return run.stdout


def numbers(said: str) -> list[float]:
    """The losses in order, a Trainer's as well as the example's own."""
    return [float(number) for number in re.findall(r"\bloss'?:? '?(\d+\.\d+)", said)]


def need(*modules: str) -> None:
    """Skip where the extra `integrations` is not installed."""
    if missing := [module for module in modules if find_spec(module) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")


def test_every_example_is_listed_and_run_here_or_beside_its_subject() -> None:
    listed = set(re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "docs" / "recipes.md").read_text(), flags=re.M))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert listed == EXAMPLES
    assert all(f'"{name}"' in tests or f"examples/{name}" in tests for name in EXAMPLES)


def test_a_model_learns_inside_backward_with_a_fraction_of_the_gradients() -> None:
    said = output("step_in_backward.py", "--steps", "10")
    ((weights, gradients),) = re.findall(r"weights ([\d.]+) MiB, gradients at a time ([\d.]+) MiB", said)
    first, last = numbers(said)
    assert last < first - 1 and 0 < float(gradients) < float(weights) / 10


# an example, its words, the packages that it needs, how many losses it prints, and between what they fall
FALLS: list[tuple[str, str, str, int, float, float]] = [
    ("transformers_finetune.py", "--output {}", "transformers accelerate", 10, 4.5, 3.2),
    ("transformers_finetune.py", "--output {} --trainer-builds", "transformers accelerate", 10, 4.5, 3.2),
    ("one_card.py", "--limit-mib 1200 --steps 8", "transformers", 8, 9.0, 5.5),
    ("peft_lora.py", "", "peft transformers", 6, 5.2, 4.6),
    ("trl_sft.py", "--output {}", "trl transformers accelerate", 10, 2.2, 1.4),
    ("lightning_module.py", "--precision 32-true", "lightning", 8, 0.9, 0.4),
    ("lightning_module.py", "--precision bf16-true", "lightning", 8, 0.9, 0.4),
    ("accelerate_loop.py", "--accumulate 3", "accelerate", 7, 5.0, 3.2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words", "packages", "count", "above", "below"), FALLS)
def test_the_loss_falls(
    name: str, words: str, packages: str, count: int, above: float, below: float, tmp_path: Path
) -> None:
    need(*packages.split())
    fell = numbers(output(name, *words.format(tmp_path).split()))
    assert len(fell) == count and fell[-1] < below < above < fell[0]


@pytest.mark.slow
def test_adamw_does_not_survive_the_limit_under_which_a_whole_model_trains() -> None:
    need("transformers")
    with pytest.raises(AssertionError, match="can't allocate memory"):
        output("one_card.py", "--limit-mib", "1200", "--steps", "8", "--optimizer", "adamw")


@pytest.mark.slow
def test_the_diagnostics_of_a_run_that_goes_wrong_say_so(tmp_path: Path) -> None:
    assert output("diagnostics.py", "--steps", "50", "--output", str(tmp_path)).count("loss") >= 3
    assert {path.name for path in tmp_path.glob("*.png")} >= {"default.png", "unstable.png"}


@pytest.mark.slow
def test_two_processes_of_the_accelerate_loop_train_one_model() -> None:
    need("accelerate")
    status, said = torchrun(["examples/accelerate_loop.py", "--steps", "20"], ranks=2)
    assert status == 0, said[-6000:]
    fell = numbers(said)
    assert len(fell) == 3, said  # printed by one of them
    assert fell[-1] < 4.5 < 5.0 < fell[0]
