"""What the self-test on the user's card found is kept, and `auto` listens to it. No test here needs a GPU."""

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
from adafactor.check import selftest, selftest_cache  # noqa: E402
from adafactor.check.selftest import BF16, FP64, Variant  # noqa: E402
from tests.kernels.test_triton_turns import start_together  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    selftest_cache.answer.cache_clear()
    cache.warned().clear()
    return tmp_path / "adafactor"


def files(folder: Path) -> list[Path]:
    """The files with answers, one for each card and version."""
    return list(folder.glob("*.json"))


def count(monkeypatch: pytest.MonkeyPatch, *found: selftest.Finding) -> list[Variant]:
    """The variants that are tried from here on, with these findings."""
    tried: list[Variant] = []

    def examine(make: Any, device: torch.device, variant: Variant, tell: Any) -> list[selftest.Finding]:
        tried.append(variant)
        return list(found)

    monkeypatch.setattr(selftest, "examine", examine)
    return tried


def test_a_card_is_tested_once_for_each_sort_and_the_answer_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = count(monkeypatch)
    for _ in range(2):
        assert selftest_cache.reason(Adafactor, CPU, Variant()) is None
        selftest_cache.answer.cache_clear()  # as in another process
    assert selftest_cache.reason(Adafactor, CPU, Variant(FP64, FP64)) is None
    assert tried == [Variant(), Variant(FP64, FP64)] and len(files(folder)) == 1
    kept = json.loads(files(folder)[0].read_text())
    assert kept["answers"] == {"float32": None, "float64": None} and kept["card"]["triton"]


def test_what_is_off_is_said_with_the_command_that_shows_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = selftest.Finding(Variant(), "default", "9×7: X is off")
    tried = count(monkeypatch, off, off)
    for _ in range(2):
        said = selftest_cache.reason(Adafactor, CPU, Variant()) or ""
        assert "(float32, default: 9×7: X is off, and 1 more)" in said and "`adafactor check`" in said
        selftest_cache.answer.cache_clear()
    assert len(tried) == 1


@pytest.mark.parametrize("key", ["name", "capability", "driver", "torch", "triton", "adafactor", "source"])
def test_another_card_or_version_is_tried_anew(key: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = count(monkeypatch)
    selftest_cache.reason(Adafactor, CPU, Variant())
    card = selftest_cache.describe(CPU)
    assert key in card
    monkeypatch.setattr(selftest_cache, "describe", lambda device: {**card, key: "another"})
    selftest_cache.answer.cache_clear()
    selftest_cache.reason(Adafactor, CPU, Variant())
    assert len(tried) == 2 and len(files(folder)) == 2


@pytest.mark.parametrize("text", ["", "[]", '{"card": 1}', '{"card": {}, "answers": {}}', "\x00"])
def test_a_damaged_file_is_no_answer(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = count(monkeypatch)
    selftest_cache.reason(Adafactor, CPU, Variant())
    files(folder)[0].write_text(text)
    selftest_cache.answer.cache_clear()
    selftest_cache.reason(Adafactor, CPU, Variant())
    assert len(tried) == 2


def test_where_nothing_can_be_written_the_answer_lasts_as_long_as_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file where the folder would be")
    tried = count(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"every process tests the kernels again.*{folder}: Not a directory"):
        assert (
            selftest_cache.reason(Adafactor, CPU, Variant()) is None
            and selftest_cache.reason(Adafactor, CPU, Variant()) is None
            and len(tried) == 1
        )


def test_an_answer_that_others_could_have_written_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = count(monkeypatch)
    assert selftest_cache.reason(Adafactor, CPU, Variant()) is None
    folder.chmod(0o777)
    selftest_cache.answer.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"every process tests the kernels again.*others can write to {folder}"):
        assert selftest_cache.reason(Adafactor, CPU, Variant()) is None and len(tried) == 2


def test_no_answer_is_read_from_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried = count(monkeypatch)
    assert selftest_cache.reason(Adafactor, CPU, Variant()) is None
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", tmp_path.name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    selftest_cache.answer.cache_clear()
    assert selftest_cache.reason(Adafactor, CPU, Variant()) is None and len(tried) == 2


class Failing(selftest.Training):
    """Eager PyTorch in the place of Triton; its first step finds the disk full."""

    failures = 0

    def __init__(self, data: selftest.Data, backend: str, **keywords: Any):
        """Make an optimizer that needs no compiler."""
        super().__init__(data, "eager", **keywords)

    def step(self, grads: Any, scale: float = 1.0) -> None:
        """Fail, or step."""
        if Failing.failures:
            Failing.failures -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().step(grads, scale)


def test_a_self_test_that_failed_is_repeated_by_the_next_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full, there was no compiler yet, another program had the memory: that says nothing of the card."""
    cases = dict(list(selftest.CASES.items())[:2])
    monkeypatch.setattr(selftest.examine, "__defaults__", ((selftest.TensorSpec((9, 7)),), cases, lambda text: None))
    monkeypatch.setattr(selftest, "Training", Failing)
    monkeypatch.setattr(Failing, "failures", 1)
    for _ in range(2):
        said = selftest_cache.reason(Adafactor, CPU, Variant()) or ""
        assert "No space left on device" in said and "the next process tests again" in said
    assert not files(folder)
    selftest_cache.answer.cache_clear()
    assert selftest_cache.reason(Adafactor, CPU, Variant()) is None
    assert json.loads(files(folder)[0].read_text())["answers"] == {"float32": None}


def test_of_an_exception_and_a_difference_the_difference_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = selftest.Finding(Variant(), "default", "OSError: No space left on device", is_exception=True)
    tried = count(monkeypatch, broken, selftest.Finding(Variant(), "maximize", "9×7: X is off"))
    for _ in range(2):
        assert "(float32, maximize: 9×7: X is off)" in (selftest_cache.reason(Adafactor, CPU, Variant()) or "")
        selftest_cache.answer.cache_clear()
    assert len(tried) == 1


def test_processes_that_start_at_once_try_a_card_once_between_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks of a machine with eight cards do; a lock is as good between threads, each of which asks anew."""
    tried, answers = [], []

    def examine(make: Any, device: torch.device, variant: Variant, tell: Any) -> list[selftest.Finding]:
        tried.append(variant)
        time.sleep(0.3)
        return []

    monkeypatch.setattr(selftest, "examine", examine)
    ranks = [
        threading.Thread(target=lambda: answers.append(selftest_cache.reason(Adafactor, CPU, Variant())))
        for _ in range(8)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert answers == [None] * 8 and len(tried) == 1


# A rank whose card is a stand-in: `auto` asks for the self-test, and a step is taken. Of all kernels `fold` alone is
# compiled, and nothing is run. It says where Triton has the kernel from, and begins when all ranks are there.
RANK = """
import sys, time
from pathlib import Path
import torch
from triton import knobs
from adafactor import Adafactor
from adafactor.check import selftest, selftest_cache
from adafactor.cli import warm
from adafactor.kernels.triton import executor
from adafactor.kernels.triton.between import fold

found = []
knobs.compilation.listener = lambda *, cache_hit, **_: found.append("found" if cache_hit else "compiled")
selftest.CASES = {"default": selftest.CASES["default"]}
selftest.examine.__defaults__ = (selftest.TENSORS[:1], None, selftest.examine.__defaults__[-1])
here, ranks = Path(sys.argv[1]), int(sys.argv[2])
with warm._compiling_for("sm_90"):
    compile_only = executor.launch
    executor.launch = lambda kernel, *args: compile_only(kernel, *args) if kernel is fold else None
    (here / sys.argv[3]).touch()
    while len(list(here.iterdir())) < ranks:
        time.sleep(0.01)
    asked = selftest_cache.reason(Adafactor, torch.device("cpu"), selftest.Variant())
    p = torch.ones(64, 512, requires_grad=True)
    p.grad = torch.ones_like(p)
    Adafactor([p], backend="triton").step()
print(*found, "not that of eager" in str(asked))
"""


def test_ranks_that_start_at_once_compile_a_kernel_once_between_them(tmp_path: Path) -> None:
    """The one that tests the card compiles; the others wait for its answer, and find the kernel in Triton's cache."""
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    outputs = start_together(RANK, tmp_path / "here", ranks := 3, places)
    # nothing has run: the self-test says so, and every rank was told
    assert sorted(out.split() for out in outputs) == [["compiled", "True"]] + [["found", "True"]] * (ranks - 1)


def test_a_card_is_tried_alone_where_another_process_does_not_get_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = count(monkeypatch)
    assert selftest_cache.reason(Adafactor, CPU, Variant()) is None
    monkeypatch.setattr(selftest_cache, "PATIENCE", 0.2)
    with open(next(folder.glob("*.lock"))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert selftest_cache.reason(Adafactor, CPU, Variant()) is None, "an answer that is there needs no lock"
        with pytest.warns(RuntimeWarning, match="goes on alone") as said:
            assert selftest_cache.reason(Adafactor, CPU, Variant(FP64, FP64)) is None
        assert said[0].filename == __file__, "at the line that asked"
        monkeypatch.setattr(selftest_cache, "PATIENCE", 1000.0)
        assert selftest_cache.reason(Adafactor, CPU, Variant(BF16, BF16)) is None, "it is not waited for again"
    assert len(tried) == 3


def test_nothing_is_tested_while_a_graph_is_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = count(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(selftest_cache, "describe", lambda device: {"name": "card"})
    card = torch.device("cuda", 0)
    assert "take a step before that" in (selftest_cache.reason(Adafactor, card, Variant()) or "") and not tried
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert selftest_cache.reason(Adafactor, card, Variant()) is None and len(tried) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert selftest_cache.reason(Adafactor, card, Variant()) is None, "what is known is known"


def test_no_memory_is_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(*_: Any, **__: Any) -> list[selftest.Finding]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(selftest, "examine", examine)
    assert "out of memory" in (selftest_cache.reason(Adafactor, CPU, Variant()) or "")
    tried = count(monkeypatch)
    assert selftest_cache.reason(Adafactor, CPU, Variant()) is None and tried


def test_several_may_write_at_once_and_nobody_reads_half_a_file(folder: Path) -> None:
    card, long = {"name": "card"}, "x" * 100_000

    def write(name: str) -> None:
        for _ in range(40):
            selftest_cache.write(card, {name: long})

    selftest_cache.write(card, {"a": long})
    writers = [threading.Thread(target=write, args=[name]) for name in "abc"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert set(selftest_cache.read(card).values()) == {long}
    assert list(folder.iterdir()) == files(folder), "and nothing is left over"


def pretend(monkeypatch: pytest.MonkeyPatch, answer: str | None) -> list[str]:
    """A backend for tensors on a CPU that has a path for everything, and this answer; returns who was asked about."""
    from adafactor.kernels import eager

    asked: list[str] = []

    def why_not_here(make: Any, parameter: Any) -> str | None:
        assert make is Adafactor
        asked.append(parameter.name)
        return answer

    monkeypatch.setattr(selftest_cache, "why_not_here", why_not_here)
    monkeypatch.setattr(kernels, "AUTO", {"cpu": "triton"})
    module = SimpleNamespace(why_not=lambda parameter: None, prepare=eager.prepare)
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
        "weight (shape (3, 2)) is stepped by eager PyTorch, more slowly: off by much; `adafactor check` shows all. "
        "(Shown once)"
    ]
    assert asked == ["weight"]


def test_auto_says_nothing_where_all_is_well_and_a_named_backend_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, None)
    one_step("auto")
    assert asked == ["weight"]
    one_step("triton")
    assert asked == ["weight"]


def test_the_interpreter_passes_the_self_test_and_auto_relies_on_it(tmp_path: Path) -> None:
    """The real kernels, with fewer tensors: in a process of its own, and the answer is in the folder afterwards."""
    code = """
import torch
from adafactor import Adafactor, kernels
from adafactor.check import selftest
from adafactor.check.selftest import TensorSpec
all_of_it = selftest.examine.__defaults__
case = "gradients with NaN and infinity"
selftest.examine.__defaults__ = ((TensorSpec((9, 7)), TensorSpec((4,))), {case: selftest.CASES[case]}, all_of_it[2])
kernels.AUTO["cpu"] = "triton"
p = torch.nn.Parameter(torch.ones(4, 3))
p.grad = torch.ones(4, 3)
optimizer = Adafactor([p])
optimizer.step()
print(type(optimizer._buckets.of[None].executors[0]).__module__)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(tmp_path)}
    strict = ["-W", "error", "-W", "ignore::DeprecationWarning"]  # Triton 3.6's interpreter has one
    child = subprocess.run(
        [sys.executable, *strict, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["adafactor.kernels.triton.executor"]
    assert json.loads(files(tmp_path / "adafactor")[0].read_text())["answers"] == {"float32": None}
