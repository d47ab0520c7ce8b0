"""Processes that start at once compile each Triton kernel once between them. No test here needs a GPU."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.kernels import needs

needs.triton()
from triton import knobs  # noqa: E402
from triton.runtime.cache import get_cache_manager  # noqa: E402

from adafactor.kernels import cache  # noqa: E402
from adafactor.kernels.triton import turns  # noqa: E402

# A rank whose card is a stand-in: it steps rows that `auto`'s check does not have. Of all kernels the first pass alone
# is compiled, and nothing is run. It says where Triton has each kernel from, and begins when all ranks are there.
RANK = """
import sys, time
from pathlib import Path
import torch
from triton import knobs
from adafactor import Adafactor
from adafactor.cli import warm
from adafactor.kernels.triton import executor
from adafactor.kernels.triton.first_pass import first_pass

def listen(*, metadata, cache_hit, **_):
    print("found" if cache_hit else "compiled", metadata["hash"])

knobs.compilation.listener = listen
here, ranks = Path(sys.argv[1]), int(sys.argv[2])
params = [torch.ones(shape, requires_grad=True) for shape in ((64, 4096), (64, 11008))]
for p in params:
    p.grad = torch.ones_like(p)
with warm._compiling_for("sm_90"):
    compile_only = executor.launch
    executor.launch = lambda kernel, *args: compile_only(kernel, *args) if kernel is first_pass else None
    (here / sys.argv[3]).touch()
    while len(list(here.iterdir())) < ranks:
        time.sleep(0.01)
    Adafactor(params, backend="triton").step()
"""


def start_together(script: str, folder: Path, ranks: int, places: dict[str, str]) -> list[str]:
    """What processes print that wait for each other in a folder and then start; `places` are for their environment."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | places
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder), str(ranks), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, outputs
    return [out for out, _ in outputs]


def run_ranks(tmp_path: Path, ranks: int) -> list[tuple[str, str]]:
    """What all ranks say: where each has a kernel from, and its hash."""
    outputs = start_together(RANK, tmp_path / "here", ranks, {"TRITON_CACHE_DIR": str(tmp_path / "triton")})
    lines = [line.split() for out in outputs for line in out.splitlines()]
    return [(source, kernel) for source, kernel in lines]


def test_ranks_that_start_at_once_compile_each_kernel_once_between_them(tmp_path: Path) -> None:
    said = Counter(run_ranks(tmp_path, ranks := 3))
    kernels = {kernel for _, kernel in said}
    assert len(kernels) == 2
    assert said == {(source, kernel): n for kernel in kernels for source, n in (("compiled", 1), ("found", ranks - 1))}


def test_where_others_can_write_there_is_no_lock_and_a_kernel_is_compiled_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton").chmod(0o777)
    assert [source for source, _ in run_ranks(tmp_path, 1)] == ["compiled", "compiled"]
    assert not list(tmp_path.rglob("*.lock"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    cache.warned().clear()
    return tmp_path


def is_free(folder: Path) -> bool:
    """Whether another process could take the lock of the only kernel."""
    with open(next(folder.glob("*/adafactor.lock"))) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_process_has_its_turn_from_the_miss_until_the_kernel_is_there(folder: Path) -> None:
    with turns.compile_in_turns():
        place = get_cache_manager("0" * 64)
        assert place.get_group("kernel.json") is None and not is_free(folder)
        place.put_group("kernel.json", {"kernel.json": place.put("{}", "kernel.json")})
        assert is_free(folder)
        (lock,) = folder.glob("*/adafactor.lock")
        lock.unlink()
        assert place.get_group("kernel.json") and not lock.exists(), "what is there needs no lock"
    assert not isinstance(get_cache_manager("0" * 64), turns.Place)


def test_a_kernel_that_cannot_be_compiled_ends_the_turn(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), turns.compile_in_turns():
        assert get_cache_manager("0" * 64).get_group("kernel.json") is None and not is_free(folder)
        raise ZeroDivisionError
    assert is_free(folder)


def test_a_process_goes_on_alone_where_another_does_not_get_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.2)
    with turns.compile_in_turns():
        get_cache_manager("0" * 64).get_group("kernel.json")
    with open(next(folder.glob("*/adafactor.lock"))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with turns.compile_in_turns(), pytest.warns(RuntimeWarning, match="goes on alone"):
            assert get_cache_manager("0" * 64).get_group("kernel.json") is None


def test_threads_of_one_process_take_turns_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would else put a place before the other's, and leave its own behind."""
    monkeypatch.setattr(turns, "PATIENCE", 0.2)
    inside = threading.Event()

    def compile_one(key: str, seconds: float) -> None:
        with turns.compile_in_turns():
            assert get_cache_manager(key).get_group("kernel.json") is None
            inside.set()
            time.sleep(seconds)

    first = threading.Thread(target=compile_one, args=("0" * 64, 0.5))
    first.start()
    assert inside.wait(30)
    compile_one("1" * 64, 0.0)  # a warning that it was waited for in vain would be an error
    first.join()
    assert not isinstance(get_cache_manager("2" * 64), turns.Place)
