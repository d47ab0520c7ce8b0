"""What the trial on the user's card found is kept, and `auto` listens to it. No test here needs a GPU."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adafactor import Adafactor, kernels
from adafactor.kernels import cache
from tests.kernels import needs

needs.triton()
from adafactor.check.trial import BF16, FP64, Sort  # noqa: E402

from adafactor.check import trial, verdict  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    verdict.answer.cache_clear()
    cache.warned().clear()
    return tmp_path / "adafactor"


def files(folder: Path) -> list[Path]:
    """The files with answers, one for each card and version."""
    return list(folder.glob("*.json"))


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
    assert tried == [Sort(), Sort(FP64, FP64)] and len(files(folder)) == 1
    kept = json.loads(files(folder)[0].read_text())
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
    assert len(tried) == 2 and len(files(folder)) == 2


@pytest.mark.parametrize("text", ["", "[]", '{"card": 1}', '{"card": {}, "answers": {}}', "\x00"])
def test_a_damaged_file_is_no_answer(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = count(monkeypatch)
    verdict.reason(CPU, Sort())
    files(folder)[0].write_text(text)
    verdict.answer.cache_clear()
    verdict.reason(CPU, Sort())
    assert len(tried) == 2


def test_where_nothing_can_be_written_the_answer_lasts_as_long_as_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file where the folder would be")
    tried = count(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"every process tries the kernels again.*{folder}: Not a directory"):
        assert verdict.reason(CPU, Sort()) is None and verdict.reason(CPU, Sort()) is None and len(tried) == 1


def test_an_answer_that_others_could_have_written_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = count(monkeypatch)
    assert verdict.reason(CPU, Sort()) is None
    folder.chmod(0o777)
    verdict.answer.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"every process tries the kernels again.*others can write to {folder}"):
        assert verdict.reason(CPU, Sort()) is None and len(tried) == 2


def test_no_answer_is_read_from_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried = count(monkeypatch)
    assert verdict.reason(CPU, Sort()) is None
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", tmp_path.name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    verdict.answer.cache_clear()
    assert verdict.reason(CPU, Sort()) is None and len(tried) == 2


class Failing(trial.Training):
    """Plain torch in the place of Triton; its first step finds the disk full."""

    failures = 0

    def __init__(self, data: trial.Data, backend: str, **keywords: Any):
        """Make an optimizer that needs no compiler."""
        super().__init__(data, "eager", **keywords)

    def step(self, grads: Any, scale: float = 1.0) -> None:
        """Fail, or step."""
        if Failing.failures:
            Failing.failures -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().step(grads, scale)


def test_a_trial_that_failed_is_repeated_by_the_next_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full, there was no compiler yet, another program had the memory: that says nothing of the card."""
    monkeypatch.setattr(trial.examine, "__defaults__", ((trial.Form((9, 7)),), trial.CASES[:2], lambda text: None))
    monkeypatch.setattr(trial, "Training", Failing)
    monkeypatch.setattr(Failing, "failures", 1)
    for _ in range(2):
        said = verdict.reason(CPU, Sort()) or ""
        assert "No space left on device" in said and "the next process tries again" in said
    assert not files(folder)
    verdict.answer.cache_clear()
    assert verdict.reason(CPU, Sort()) is None
    assert json.loads(files(folder)[0].read_text())["answers"] == {"float32": None}


def test_of_an_exception_and_a_difference_the_difference_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = trial.Finding(Sort(), "default", "OSError: No space left on device", is_exception=True)
    tried = count(monkeypatch, broken, trial.Finding(Sort(), "maximize", "9×7: X is off"))
    for _ in range(2):
        assert "(float32, maximize: 9×7: X is off)" in (verdict.reason(CPU, Sort()) or "")
        verdict.answer.cache_clear()
    assert len(tried) == 1


def test_processes_that_start_at_once_try_a_card_once_between_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks of a machine with eight cards do; a lock is as good between threads, each of which asks anew."""
    tried, answers = [], []

    def examine(device: torch.device, sort: Sort, tell: Any) -> list[trial.Finding]:
        tried.append(sort)
        time.sleep(0.3)
        return []

    monkeypatch.setattr(trial, "examine", examine)
    ranks = [threading.Thread(target=lambda: answers.append(verdict.reason(CPU, Sort()))) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert answers == [None] * 8 and len(tried) == 1


def test_a_card_is_tried_alone_where_another_process_does_not_get_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = count(monkeypatch)
    assert verdict.reason(CPU, Sort()) is None
    monkeypatch.setattr(verdict, "PATIENCE", 0.2)
    with open(next(folder.glob("*.lock"))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert verdict.reason(CPU, Sort()) is None, "an answer that is there needs no lock"
        with pytest.warns(RuntimeWarning, match="goes on alone") as said:
            assert verdict.reason(CPU, Sort(FP64, FP64)) is None
        assert said[0].filename == __file__, "at the line that asked"
        monkeypatch.setattr(verdict, "PATIENCE", 1000.0)
        assert verdict.reason(CPU, Sort(BF16, BF16)) is None, "it is not waited for again"
    assert len(tried) == 3


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
    assert list(folder.iterdir()) == files(folder), "and nothing is left over"


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
from adafactor.check import trial, verdict  # noqa: E402
few = trial.examine.__defaults__
trial.examine.__defaults__ = ((trial.Form((9, 7)), trial.Form((4,))), trial.CASES[-1:], few[2])
kernels.AUTO["cpu"] = "triton"
p = torch.nn.Parameter(torch.ones(4, 3))
p.grad = torch.ones(4, 3)
optimizer = Adafactor([p])
optimizer.step()
print(type(optimizer._buckets[None].executors[0]).__module__)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(tmp_path)}
    strict = ["-W", "error", "-W", "ignore::DeprecationWarning"]  # Triton 3.6's interpreter has one
    child = subprocess.run(
        [sys.executable, *strict, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["adafactor.kernels.triton.executor"]
    assert json.loads(files(tmp_path / "adafactor")[0].read_text())["answers"] == {"float32": None}
