"""The cache of compiled code: cut off, damaged, full, not writable, and two processes at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import adafactor
from tests.faults.launch import finish, found, kill, start

CLOSE = 1e-6  # between the compiled step and eager PyTorch's


@pytest.fixture(scope="session")
def warm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the loops for float32, kept from one run of pytest to the next."""
    cache = getattr(request.config, "cache", None)
    folder = Path(cache.mkdir("numba")) if cache is not None else tmp_path_factory.mktemp("numba")
    right(found("one_step", "cpu", NUMBA_CACHE_DIR=str(folder))["cpu"])
    return folder


@pytest.fixture
def copy(warm: Path, tmp_path: Path) -> Path:
    """One of its own, to be damaged."""
    return Path(shutil.copytree(warm, tmp_path / "numba"))


def right(result: dict[str, Any], words: tuple[str, ...] | None = None) -> None:
    """The step was taken; with one warning that has one of these words, or with none."""
    assert "error" not in result, result
    assert result["difference"] < CLOSE, result
    assert len(result["warnings"]) == (words is not None), result
    assert words is None or any(word in result["warnings"][0] for word in words), result


def right_or_fell_back(result: dict[str, Any]) -> None:
    """The compiled step, or eager PyTorch's with a warning that names the cache."""
    right(result, ("cache", "NUMBA_CACHE_DIR") if result.get("warnings") else None)


def files(folder: Path, cheap: bool) -> list[Path]:
    """The files of the cache; the cheap ones are those of functions that are compiled in half a second."""
    every = list(folder.rglob("*.o"))
    chosen = [path for path in every if not cheap or path.stat().st_size < 6000]
    assert len(chosen) > 3, f"{every} does not look like the cache"
    return chosen


def cut(keep: float) -> Callable[[Path], None]:
    """Leave that part of a file."""

    def damage(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])

    return damage


def blank(path: Path) -> None:
    """Put zeros in place of what was there."""
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES = {"empty files": cut(0.0), "half of every file": cut(0.5), "zeros": blank}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "damage",
    ["half of every file", pytest.param("empty files", marks=SLOW), pytest.param("zeros", marks=SLOW)],
)
def test_what_is_damaged_is_compiled_again(copy: Path, damage: str) -> None:
    """As a power cut leaves it."""
    for path in files(copy, cheap=True):
        DAMAGES[damage](path)
    results = found("one_step", "cpu,auto", NUMBA_CACHE_DIR=str(copy))
    right(results["cpu"], (str(copy),))  # said once, for all the files
    right(results["auto"])


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_cache_with_no_file_left_whole_is_made_anew(copy: Path, damage: Callable[[Path], None]) -> None:
    for path in files(copy, cheap=False):
        damage(path)
    for words in (("cache",), None):
        results = found("one_step", "auto,cpu", NUMBA_CACHE_DIR=str(copy))
        right(results["auto"], words)
        right(results["cpu"])


@pytest.mark.slow
def test_a_damaged_cache_is_whole_again_after_one_run(copy: Path) -> None:
    """What was compiled again has been kept, so that the next process does not compile."""
    for path in files(copy, cheap=True):
        cut(0.5)(path)
    found("one_step", "cpu", NUMBA_CACHE_DIR=str(copy))
    before = {path: path.stat().st_mtime_ns for path in files(copy, cheap=False)}
    right(found("one_step", "cpu", NUMBA_CACHE_DIR=str(copy))["cpu"])
    assert {path: path.stat().st_mtime_ns for path in files(copy, cheap=False)} == before


@pytest.mark.parametrize("room", [pytest.param(0, marks=SLOW), 4096], ids=["no byte", "4 kB"])
def test_on_a_full_disk_the_step_is_taken(copy: Path, room: int) -> None:
    """The code is compiled; that it cannot be kept is no reason to stop."""
    for path in files(copy, cheap=True):
        path.unlink()
    results = found("one_step", "auto,cpu", room, NUMBA_CACHE_DIR=str(copy))
    right_or_fell_back(results["auto"])
    right_or_fell_back(results["cpu"])


@pytest.mark.parametrize("place", ["a file", pytest.param("under /proc", marks=SLOW)])
def test_without_a_folder_to_write_to_auto_says_so_and_takes_the_step(tmp_path: Path, place: str) -> None:
    """Neither the named folder, nor the one beside the source, nor that of the user can be had."""
    nowhere = "/proc/none" if place == "under /proc" else str(tmp_path / "file" / "below")
    (tmp_path / "file").write_text("")
    source = Path(adafactor.__file__).parent
    package = tmp_path / "path" / "adafactor"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").write_text("")
    homes = dict.fromkeys(("NUMBA_CACHE_DIR", "HOME", "XDG_CACHE_HOME", "IPYTHONDIR"), nowhere)
    results = found("one_step", "auto,cpu", path=str(package.parent), **homes, PYTHONDONTWRITEBYTECODE="1")
    right_or_fell_back(results["auto"])
    assert results["auto"]["warnings"] or "difference" in results["cpu"], results
    if "error" in results["cpu"]:
        assert results["cpu"]["error"] in ("ImportError", "RuntimeError")
        assert "NUMBA_CACHE_DIR" in results["cpu"]["message"]


def test_without_its_compiler_auto_says_so_and_cpu_refuses() -> None:
    """`NUMBA_DISABLE_JIT=1`, which people set to debug their own code."""
    results = found("one_step", "auto,cpu", NUMBA_DISABLE_JIT="1")
    right(results["auto"], ("NUMBA_DISABLE_JIT",))
    assert results["cpu"].get("error") in ("ImportError", "RuntimeError"), results
    assert "NUMBA_DISABLE_JIT" in results["cpu"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["after some seconds", "with the first file"])
def test_a_process_killed_while_it_compiles_leaves_a_cache_that_works(tmp_path: Path, moment: str) -> None:
    process = start("one_step", "cpu", NUMBA_CACHE_DIR=str(tmp_path))
    time.sleep(3)
    while moment == "with the first file" and process.poll() is None and not list(tmp_path.rglob("*.o")):
        time.sleep(0.001)
    assert process.poll() is None, "it was done before it was killed"
    kill(process)
    right(found("one_step", "cpu", NUMBA_CACHE_DIR=str(tmp_path))["cpu"])


# ---- several processes; they compile something small


def compiling(folder: Path, seconds: float = 0.0, *patience: float) -> subprocess.Popen[str]:
    """A process that needs a function which takes so long to compile."""
    return start("compile_one", seconds, *patience, NUMBA_CACHE_DIR=str(folder))


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_processes_that_start_at_once_compile_once_between_them(tmp_path: Path) -> None:
    """As torchrun and pytest-xdist start them."""
    results = [finish(process) for process in [compiling(tmp_path, seconds=2) for _ in range(3)]]
    assert [result["answer"] for result in results] == [42] * 3
    assert sum(result["compiled"] for result in results) == 1
    said = "".join(result["said"] for result in results)
    assert said.count("1 of 1 (answer)") == 1 and "waiting for another process" in said


def test_one_killed_while_it_compiles_is_waited_for_no_longer_and_leaves_nothing_broken(tmp_path: Path) -> None:
    dying = compiling(tmp_path, seconds=300)
    until(lambda: bool(list(tmp_path.rglob("*.begun"))))
    waiting = compiling(tmp_path)
    time.sleep(1)
    assert waiting.poll() is None, "it did not wait"
    kill(dying)
    result = finish(waiting)
    assert result["answer"] == 42 and result["compiled"] and not result["warnings"]
    again = finish(compiling(tmp_path))
    assert again["answer"] == 42 and not again["compiled"] and not again["warnings"] and not again["said"]


def test_one_that_was_stopped_while_it_compiles_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    stopped = compiling(tmp_path, seconds=300)
    try:
        until(lambda: bool(list(tmp_path.rglob("*.begun"))))
        os.kill(stopped.pid, signal.SIGSTOP)
        result = finish(compiling(tmp_path, 0.0, 1.0))
    finally:
        kill(stopped)
    assert result["answer"] == 42 and result["compiled"] and "waiting for another process" in result["said"]
    [warning] = result["warnings"]
    assert ".lock" in warning and "goes on alone" in warning
    again = finish(compiling(tmp_path))
    assert not again["compiled"] and not again["warnings"] and not again["said"], "what it has compiled was kept"


def test_in_a_folder_that_others_can_write_to_code_is_compiled_for_this_process(tmp_path: Path) -> None:
    finish(compiling(tmp_path))
    tmp_path.chmod(0o777)
    for _ in range(2):
        result = finish(compiling(tmp_path))
        assert result["answer"] == 42 and result["compiled"] and "in memory only" in result["said"]
        assert len(result["warnings"]) == 1 and f"others can write to {tmp_path}" in result["warnings"][0]


@pytest.mark.parametrize("place", ["/proc/none", "/sys"], ids=["no folder", "a read-only one"])
def test_where_nothing_can_be_written_code_is_compiled_for_this_process(place: str) -> None:
    result = finish(compiling(Path(place)))
    assert result["answer"] == 42 and result["compiled"] and len(result["warnings"]) == 1
    assert place in result["warnings"][0] and "NUMBA_CACHE_DIR" in result["warnings"][0]


def test_of_two_folders_the_second_is_taken_where_the_first_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation that belongs to root, and a user with a home."""
    machine_code = pytest.importorskip("adafactor.kernels.cpu.native.machine_code")
    monkeypatch.setattr(machine_code, "folders", lambda: [Path("/proc/none"), tmp_path / "home"])
    assert machine_code.read("what") is None
    assert machine_code.write("what", b"code") == tmp_path / "home"
    assert machine_code.read("what") == b"code"


@pytest.mark.slow
def test_two_processes_may_compile_all_of_a_step_at_once(tmp_path: Path) -> None:
    both = [start("one_step", "cpu", NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    for process in both:
        right(finish(process)["cpu"])
    right(found("one_step", "cpu", NUMBA_CACHE_DIR=str(tmp_path))["cpu"])
