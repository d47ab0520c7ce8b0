"""Where compiled code cannot be loaded or made, `auto` steps with eager PyTorch, and `cpu` says what is wrong.

Code that somebody else could have put where it is kept is not loaded at all.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adafactor.kernels.cache import turn
from tests.attack.helpers import run_python

STEP = """
import sys, warnings
import torch
from adafactor import Adafactor
warnings.simplefilter("ignore")
p = torch.nn.Parameter(torch.ones(6, 4))
optimizer = Adafactor([p], backend=sys.argv[1])
p.grad = torch.ones(6, 4)
optimizer.step()
print("stepped to", round(p[0, 0].item(), 6))
"""


def step(backend: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", STEP, backend, **environment)


def assert_stepped(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0 and "stepped to 0.99" in run.stdout, run.stderr


def assert_named(run: subprocess.CompletedProcess[str], *words: str) -> None:
    """One of our errors, which names the culprit."""
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith(("ImportError", "RuntimeError", "ValueError")) and any(word in last for word in words), last


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_a_numba_that_does_not_compile_is_named_or_not_needed(backend: str) -> None:
    run = step(backend, NUMBA_DISABLE_JIT="1")
    if backend == "cpu" and run.returncode:
        assert_named(run, "NUMBA_DISABLE_JIT")
    else:
        assert_stepped(run)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what has been compiled."""
    folder = tmp_path_factory.mktemp("numba")
    assert_stepped(step("cpu", NUMBA_CACHE_DIR=str(folder)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 100], ids=["empty", "cut off"])
@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_files_that_a_power_failure_has_cut_off_do_not_stop_a_step(backend: str, kept: int, cache: Path) -> None:
    files = list(cache.rglob("*.o"))
    assert files
    whole = {file: file.read_bytes() for file in cache.rglob("*") if file.is_file()}
    for file in files:
        file.write_bytes(whole[file][:kept])
    try:
        run = step(backend, NUMBA_CACHE_DIR=str(cache))
        if backend == "cpu" and run.returncode:
            assert_named(run, str(cache), "NUMBA_CACHE_DIR")
        else:
            assert_stepped(run)
    finally:
        for file, content in whole.items():
            file.write_bytes(content)


# ---- whose files are loaded

OTHER = 12345  # a user and a group that nobody has here


@pytest.fixture
def machine_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with a current folder, a home and no setting of its own."""
    module = pytest.importorskip("adafactor.kernels.cpu.native.machine_code")
    monkeypatch.setattr(module.config, "CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return module


def plant(module: Any, folder: Path | str) -> Path:
    """A file as it would be kept, with the right checksum."""
    file = Path(folder) / f"planted-{module.key()}.o"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(hashlib.sha256(b"code").digest() + b"code")
    file.chmod(0o644)
    return file


@pytest.mark.parametrize(
    ("name", "value", "folder"),
    [
        ("XDG_CACHE_HOME", "", "adafactor"),
        ("XDG_CACHE_HOME", "caches", "caches/adafactor"),
        ("HOME", "", "~/.cache/adafactor"),
        ("HOME", "home", "home/.cache/adafactor"),
    ],
    ids=["XDG_CACHE_HOME is empty", "XDG_CACHE_HOME is relative", "no home", "a relative home"],
)
def test_no_code_is_read_from_the_current_folder(
    name: str, value: str, folder: str, machine_code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    if (name, value) == ("HOME", ""):  # a container that runs as a user without a name
        monkeypatch.delenv("HOME")
        users: dict[int, Any] = {}
        monkeypatch.setattr(pwd, "getpwuid", users.__getitem__)
    plant(machine_code, folder)
    assert machine_code.read("planted") is None


def test_a_relative_folder_for_numba_is_refused_and_the_warning_says_why(
    machine_code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", "numba")
    plant(machine_code, "numba/adafactor")
    assert machine_code.read("planted") is None
    with pytest.warns(RuntimeWarning, match="numba/adafactor: it is not an absolute path"):
        assert machine_code.write("planted", b"code") is None
    assert not machine_code.kept()


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or folder belong to somebody else; who is not root must be somebody else instead."""
    if os.geteuid() == 0:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)


def link(path: Path, target: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Move a file or folder to `target`, and put a link in its place: somebody else's, if that can be had."""
    path.symlink_to(path.rename(target))
    if monkeypatch is not None:
        give_away(path, monkeypatch)


SPOILERS: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "others can write to the file": lambda file, patch: file.chmod(0o666),
    "others can write to the folder": lambda file, patch: file.parent.chmod(0o1777),
    "others can exchange the folder": lambda file, patch: file.parents[1].chmod(0o777),
    "another's file": give_away,
    "another's folder": lambda file, patch: give_away(file.parent, patch),
    "another's folder above": lambda file, patch: give_away(file.parents[1], patch),
    "a link in place of the file": lambda file, patch: link(file, file.parent / "own"),
    "another's link to a folder of the user's": lambda file, patch: link(file.parent, file.parents[1] / "own", patch),
    "another's link above": lambda file, patch: link(file.parents[1], file.parents[2] / "own", patch),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_code_that_somebody_else_could_have_put_there_is_not_read(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    machine_code: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", str(tmp_path / "numba"))
    file = plant(machine_code, tmp_path / "numba" / "adafactor")
    assert machine_code.read("planted") == b"code"
    spoil(file, monkeypatch)
    assert machine_code.read("planted") is None


@pytest.mark.parametrize(
    "change",
    [lambda folder: folder.parent.chmod(0o1777), lambda folder: link(folder, folder.parent / "own")],
    ids=["below a folder like /tmp", "behind a link to a good folder"],
)
def test_code_that_nobody_else_could_have_put_there_is_read(
    change: Callable[[Path], None], machine_code: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", str(tmp_path / "numba"))
    folder = tmp_path / "numba" / "adafactor"
    plant(machine_code, folder)
    change(folder)
    assert machine_code.read("planted") == b"code"
    assert machine_code.write("another", b"code") == folder and machine_code.read("another") == b"code"


@pytest.mark.parametrize(
    ("group", "members", "code"),
    [("alice", [], b"code"), ("alice", ["alice"], b"code"), ("alice", ["mallory"], None), ("staff", [], None)],
)
def test_a_folder_that_a_group_can_write_to_is_trusted_if_the_user_has_the_group_to_himself(
    group: str,
    members: list[str],
    code: bytes | None,
    machine_code: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With the umask 002 of many systems, all that a user makes can be written to by a group of his name."""
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", str(tmp_path))
    plant(machine_code, tmp_path / "adafactor").parent.chmod(0o775)
    uid, gid = os.geteuid(), (tmp_path / "adafactor").stat().st_gid
    monkeypatch.setattr(pwd, "getpwuid", {uid: pwd.struct_passwd(("alice", "x", uid, gid, "", "/", ""))}.__getitem__)
    monkeypatch.setattr(grp, "getgrgid", {gid: grp.struct_group((group, "x", gid, members))}.__getitem__)
    assert machine_code.read("planted") == code


def test_a_link_of_the_users_to_a_folder_that_others_can_write_to_is_not_followed(
    machine_code: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", str(tmp_path / "numba"))
    folder = plant(machine_code, tmp_path / "numba" / "adafactor").parent
    link(folder, tmp_path / "own")
    assert machine_code.read("planted") == b"code"
    (tmp_path / "own").chmod(0o777)
    assert machine_code.read("planted") is None
    folder.unlink()
    folder.symlink_to(folder)
    assert machine_code.read("planted") is None, "a link in a circle"


@pytest.mark.parametrize("setting", ["", "NUMBA_CACHE_DIR"])
def test_what_is_kept_can_be_written_to_by_nobody_else_whatever_the_umask(
    setting: str, machine_code: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the user's own folders are closed to readers: code may have been compiled for all users of an image."""
    home = tmp_path / "home" / ".cache"
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", str(tmp_path / "all" / "numba") if setting else "")
    if not setting:
        monkeypatch.setattr(machine_code, "folders", lambda folders=machine_code.folders: folders()[1:])
    before = os.umask(0)
    try:
        folder = machine_code.write("planted", b"code")
        with turn(machine_code.folders(), "a lock", "", patience=0):
            pass
    finally:
        os.umask(before)
    assert machine_code.read("planted") == b"code"
    made = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / ("all" if setting else "home")).rglob("*")}
    assert len(made) == 4 and folder in made
    assert not any(mode & 0o022 for mode in made.values()), made
    assert {made[path] for path in made if path.is_dir()} == ({0o755} if setting else {0o700})
    assert (home in made) is not bool(setting)
