"""What the trial on the user's card found is kept, and `auto` listens to it. No test here needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adafactor import Adafactor, kernels
from tests.kernels import needs

needs.triton()
from adafactor.kernels.triton import trial, verdict  # noqa: E402
from adafactor.kernels.triton.trial import FP64, Sort  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    verdict.answer.cache_clear()
    return tmp_path / "adafactor"


def count(monkeypatch: pytest.MonkeyPatch, *found: trial.Finding) -> list[Sort]:
    """The sorts that are tried from here on, with these findings."""
    tried: list[Sort] = []

    def examine(device: torch.device, sort: Sort, tell: Any) -> list[trial.Finding]:
        tried.append(sort)
        return list(found)

    monkeypatch.setattr(trial, "examine", examine)
    return tried


def test_a_card_is_tried_once_for_each_sort_and_the_answer_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = count(monkeypatch)
    for _ in range(2):
        assert verdict.reason(CPU, Sort()) is None
        verdict.answer.cache_clear()  # as in another process
    assert verdict.reason(CPU, Sort(FP64, FP64)) is None
    assert tried == [Sort(), Sort(FP64, FP64)] and len(list(folder.iterdir())) == 1
    kept = json.loads(next(folder.iterdir()).read_text())
    assert kept["answers"] == {"float32": None, "float64": None} and kept["card"]["triton"]


def test_what_is_off_is_said_with_the_command_that_shows_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = trial.Finding(Sort(), "default", "9×7: X is off")
    tried = count(monkeypatch, off, off)
    for _ in range(2):
        said = verdict.reason(CPU, Sort()) or ""
        assert "(float32, default: 9×7: X is off, and 1 more)" in said and "`adafactor check`" in said
        verdict.answer.cache_clear()
    assert len(tried) == 1


@pytest.mark.parametrize("key", ["name", "capability", "driver", "torch", "triton", "adafactor", "source"])
def test_another_card_or_version_is_tried_anew(key: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = count(monkeypatch)
    verdict.reason(CPU, Sort())
    card = verdict.describe(CPU)
    assert key in card
    monkeypatch.setattr(verdict, "describe", lambda device: {**card, key: "another"})
    verdict.answer.cache_clear()
    verdict.reason(CPU, Sort())
    assert len(tried) == 2 and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "[]", '{"card": 1}', '{"card": {}, "answers": {}}', "\x00"])
def test_a_damaged_file_is_no_answer(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = count(monkeypatch)
    verdict.reason(CPU, Sort())
    next(folder.iterdir()).write_text(text)
    verdict.answer.cache_clear()
    verdict.reason(CPU, Sort())
    assert len(tried) == 2


def test_where_nothing_can_be_written_the_answer_lasts_as_long_as_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file where the folder would be")
    tried = count(monkeypatch)
    assert verdict.reason(CPU, Sort()) is None and verdict.reason(CPU, Sort()) is None and len(tried) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    verdict.answer.cache_clear()
    assert verdict.reason(CPU, Sort()) is None and len(tried) == 2


def test_no_trial_is_held_while_a_graph_is_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = count(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(verdict, "describe", lambda device: {"name": "card"})
    card = torch.device("cuda", 0)
    assert "take a step before that" in (verdict.reason(card, Sort()) or "") and not tried
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert verdict.reason(card, Sort()) is None and len(tried) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert verdict.reason(card, Sort()) is None, "what is known is known"


def test_no_memory_is_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(*_: Any, **__: Any) -> list[trial.Finding]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial, "examine", examine)
    assert "out of memory" in (verdict.reason(CPU, Sort()) or "")
    tried = count(monkeypatch)
    assert verdict.reason(CPU, Sort()) is None and tried


def test_several_may_write_at_once_and_nobody_reads_half_a_file(folder: Path) -> None:
    card, long = {"name": "card"}, "x" * 100_000

    def write(name: str) -> None:
        for _ in range(40):
            verdict.write(card, {name: long})

    verdict.write(card, {"a": long})
    writers = [threading.Thread(target=write, args=[name]) for name in "abc"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert set(verdict.read(card).values()) == {long}
    assert len(list(folder.iterdir())) == 1, "and nothing is left over"


def pretend(monkeypatch: pytest.MonkeyPatch, answer: str | None) -> list[str]:
    """A backend for tensors on a CPU that has a path for everything, and this answer; returns who was asked about."""
    from adafactor.kernels import eager

    asked: list[str] = []

    def why_not_here(parameter: Any) -> str | None:
        asked.append(parameter.name)
        return answer

    module = SimpleNamespace(why_not=lambda parameter: None, why_not_here=why_not_here, prepare=eager.prepare)
    monkeypatch.setattr(kernels, "AUTO", {"cpu": "triton"})
    monkeypatch.setattr(kernels, "_compiled", lambda name: module)
    return asked


def one_step(backend: str) -> None:
    p = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = Adafactor([("weight", p)], backend=backend)
    for _ in range(2):
        p.grad = torch.ones(3, 2)
        optimizer.step()


def test_auto_asks_and_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, "off by much; `adafactor check` shows all")
    with pytest.warns(RuntimeWarning) as warned:
        one_step("auto")
    assert [str(w.message) for w in warned] == [
        "weight (shape (3, 2)) is stepped by plain torch, more slowly: off by much; `adafactor check` shows all. "
        "(Shown once)"
    ]
    assert asked == ["weight"]


def test_auto_says_nothing_where_all_is_well_and_a_named_backend_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, None)
    one_step("auto")
    assert asked == ["weight"]
    one_step("triton")
    assert asked == ["weight"]


def test_the_interpreter_passes_the_trial_and_auto_relies_on_it(tmp_path: Path) -> None:
    """The real kernels, with fewer tensors: in a process of its own, and the answer is in the folder afterwards."""
    code = """
import torch
from adafactor import Adafactor, kernels
from adafactor.kernels.triton import trial
few = trial.examine.__defaults__
trial.examine.__defaults__ = ((trial.Form((9, 7)), trial.Form((4,))), trial.CASES[-1:], few[2])
kernels.AUTO["cpu"] = "triton"
p = torch.nn.Parameter(torch.ones(4, 3))
p.grad = torch.ones(4, 3)
optimizer = Adafactor([p])
optimizer.step()
print(type(optimizer._buckets[None].works[0]).__module__)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(tmp_path)}
    strict = ["-W", "error", "-W", "ignore::DeprecationWarning"]  # Triton 3.6's interpreter has one
    child = subprocess.run(
        [sys.executable, *strict, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["adafactor.kernels.triton.work"]
    assert json.loads(next((tmp_path / "adafactor").iterdir()).read_text())["answers"] == {"float32": None}
