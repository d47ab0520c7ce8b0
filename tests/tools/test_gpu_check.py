"""`adafactor check`, with a stand-in for the card: there is none here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adafactor.check import selftest, selftest_cache, timing
from adafactor.check.selftest import Finding, Variant
from adafactor.check.timing import OURS, Times
from adafactor.cli import check as command
from adafactor.cli import main
from adafactor.optimizer import Adafactor
from tests.kernels import needs

needs.triton()
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "--device", "nonsense"], "not a device that torch knows"),
        (["check"], "there is no GPU here that torch"),
        (["check", "--device", "cuda:3"], "there is no cuda device here"),
        (["check", "--device", "cpu"], "for the CPU with TRITON_INTERPRET=1"),
    ],
)
def test_without_a_gpu_one_sentence_says_so(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]


@pytest.fixture
def a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Pretend that there is a card, and note what is tested on it."""
    tested: list[Any] = []
    device = torch.device("cuda", 0)

    def examine(make: Any, where: torch.device, variant: Variant, tensors: Any, cases: Any, tell: Any) -> Any:
        assert make is Adafactor and where == device
        assert set(tensors) <= set(selftest.TENSORS) and set(cases) <= set(selftest.CASES)
        tested.append(variant)
        wrong = Finding(variant, "default", "X is off", "129×77", "X[1, 2] is 3, not 4; computed in the last pass")
        return [wrong] if variant.rounding == "kahan" else []

    monkeypatch.setattr(selftest, "examine", examine)
    monkeypatch.setattr(command, "_device", lambda name: device)
    card = {"name": "Abacus", "capability": "8.9", "driver": "12", "torch": "2", "triton": "3", "adafactor": "0"}
    monkeypatch.setattr(selftest_cache, "describe", lambda device: card)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tested


KAHAN = "bfloat16, kahan rounding, momentum of the update"


def test_the_command_says_how_each_went_and_keeps_the_answers(
    a_card: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--only", "bfloat16"]) == 1
    out = capsys.readouterr().out
    marks = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "]
    assert marks == ["OFF" if variant.rounding == "kahan" else "ok" for variant in a_card]
    assert out.startswith("adafactor 0, torch 2, triton 3; Abacus (cuda:0, 8.9, driver 12)")
    assert f"1 things are off, in [{KAHAN}]" in out
    answers = selftest_cache.read(selftest_cache.describe(CPU))
    assert {name for name, answer in answers.items() if answer} == {KAHAN}
    assert len(answers) == len(a_card) == 7


def test_what_is_off_comes_with_what_it_takes_to_mend_it_and_the_line_that_shows_it_again(
    a_card: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", "--only", "kahan"])
    out = capsys.readouterr().out
    again = f"adafactor check --device cuda:0 --only '{KAHAN}' --setting default"
    lines = ["default: 129×77: X is off", "  X[1, 2] is 3, not 4; computed in the last pass", f"  again: {again}"]
    assert "\n".join(f"      {line}" for line in lines) in out
    a_card.clear()
    assert main(shlex.split(again)[1:]) == 1 and [str(variant) for variant in a_card] == [KAHAN]


def test_one_variant_setting_or_tensor_can_be_looked_at_and_then_no_answer_is_kept(
    a_card: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def examine(make: Any, device: Any, variant: Any, tensors: Any, cases: Any, tell: Any) -> list[Finding]:
        asked.append((variant, tensors, cases))
        return []

    monkeypatch.setattr(selftest, "examine", examine)
    assert main(["check", "--only", "float64", "--setting", "maximize", "--tensor", "77×33"]) == 0
    [(variant, tensors, cases)] = asked
    assert str(variant) == "float64"
    assert tensors == [selftest.TensorSpec((77, 33), "transposed")] and list(cases) == ["maximize"]
    assert not selftest_cache.read(selftest_cache.describe(CPU))
    assert main(["check", "--tensor", "1×1"]) == 2
    assert "--tensor 1×1: there are 256×512; 129×77" in capsys.readouterr().err


def test_all_is_right(a_card: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--only", "float64"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("All is right")
    assert main(["check", "--only", "float7"]) == 2
    assert "there are float32; float32, momentum" in capsys.readouterr().err


def test_an_exception_is_shown_and_not_kept(
    a_card: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Finding(Variant(), "GradScaler", "OSError: No space left on device", details="Traceback", is_exception=True)
    monkeypatch.setattr(selftest, "examine", lambda *_: [full])
    assert main(["check", "--only", "float64"]) == 1
    out = capsys.readouterr().out
    assert "GradScaler: OSError: No space left on device\n        Traceback\n        again: adafactor check" in out
    assert not selftest_cache.read(selftest_cache.describe(CPU))


def test_json_has_what_was_checked_and_what_is_off(
    a_card: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    assert main(["check", "--only", "bfloat16", "--json", "--output", str(file)]) == 1
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["name"] == "Abacus" and answer["device"] == "cuda:0" and answer["times"] == []
    assert answer["checked"] == [str(variant) for variant in a_card]
    assert answer["off"] == [
        {
            "variant": KAHAN,
            "setting": "default",
            "what": "X is off",
            "tensor": "129×77",
            "details": "X[1, 2] is 3, not 4; computed in the last pass",
            "is_exception": False,
        }
    ]
    assert "1 things are off" in err and json.loads(file.read_text(encoding="utf-8")) == answer


def test_a_missing_gpu_is_said_before_a_missing_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["check"]) == 2
    assert "there is no GPU here" in capsys.readouterr().err


def test_bench_adds_a_block_and_its_numbers_to_the_file(
    a_card: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def stand_in(make: Any, device: torch.device, rounds: int, tick: Any) -> list[Times]:
        asked.append((make, device, rounds))
        return [Times("float32", 8, 4, 1e9, {OURS: 1e-3}, {"fold": 1e-5})]

    monkeypatch.setattr(timing, "measure", stand_in)
    monkeypatch.setattr(timing, "nominal_bandwidth", lambda device: 1e9)
    file = tmp_path / "result.json"
    assert main(["check", "--only", "float64", "--bench", "--rounds", "4", "--output", str(file)]) == 0
    assert asked == [(Adafactor, torch.device("cuda", 0), 4)]
    block = capsys.readouterr().out.split("```")[1]
    assert "Abacus (cuda:0" in block and "All is right" in block and "share of the nominal 1 GB/s" in block
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["nominal_bandwidth"] == 1e9
    assert written["times"][0]["passes"] == {"fold": 1e-5} and written["times"][0]["steps"] == {OURS: 1e-3}


@pytest.mark.slow
def test_the_interpreter_is_called_by_its_name() -> None:
    code = (
        "from adafactor.check import selftest\nfrom adafactor.cli import check, main\n"
        "check.SMALL_TENSORS = (selftest.TensorSpec((3,)),); selftest.CASES = {'default': selftest.CASES['default']}\n"
        "raise SystemExit(main(['check', '--only', 'float64']))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert child.returncode == 0, child.stderr
    assert "in Triton's interpreter" in child.stdout and "ok  float64" in child.stdout
    assert child.stdout.splitlines()[-1] == "All is right, in the interpreter."
