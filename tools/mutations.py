"""Breaks the step in many places, one after the other, and asks the tests whether they notice.

A mutation is what goes wrong, a file, a text that stands in it exactly once, and the text in its place. Each is made
in a copy of the tree, where the tests of its backend run until the first one fails: the properties first, and if they
hold, what takes longer. Where all hold, the mutation is not caught: a test is missing.

    python -m tools.mutations                    all, about a minute each at the worst
    python -m tools.mutations cpu --only clip    of one backend, only those with this word
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

# Children are forks, so that none has to import these again. The first decides which library of the core is loaded,
# that of `build`; the second that Triton's kernels are interpreted.
os.environ |= {"ATEN_CPU_CAPABILITY": "default", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "300"}

import pytest  # noqa: E402
import torch.distributed.tensor  # noqa: E402, F401

ROOT = Path(__file__).parents[1]
SECONDS = 900  # of one run of tests
PROPERTIES = ("tests/test_properties.py", "-m", "not slow")


class Backend(NamedTuple):
    """What is tested where it is broken: arguments of pytest, the quick ones first; and how it is built."""

    stages: tuple[tuple[str, ...], ...]
    build: tuple[str, ...] = ()


BACKENDS = {
    "eager": Backend(
        (
            (*PROPERTIES, "-k", "eager"),
            ("tests/step", "--only-backend", "eager", "-m", "not slow"),
            ("tests/distributed", "tests/kernels", "tests/attack", "-k", "not cpu and not triton", "-m", "not slow"),
        ),
    ),
    "cpu": Backend(
        (
            (*PROPERTIES, "-k", "cpu"),
            ("tests/distributed", "tests/kernels", "tests/step", "tests/attack", "-k", "cpu", "-m", "not slow"),
        ),
        build=(
            *("g++", "-std=c++17", "-O1", "-fopenmp-simd", "-fno-exceptions", "-fPIC", "-shared"),
            *("src/adafactor/kernels/cpu/src/step.cpp", "-o", "src/adafactor/kernels/cpu/libadafactor_baseline.so"),
        ),
    ),
    "triton": Backend(
        (
            (*PROPERTIES, "-k", "triton"),
            ("tests/interpreted", "-m", "not slow"),
            ("tests/distributed/test_placements.py", "-k", "triton", "-m", "not slow"),
        ),
    ),
}

WRITTEN = [name for name in BACKENDS if (ROOT / "tools" / "mutants" / f"{name}.py").exists()]


class Mutation(NamedTuple):
    """One way to be wrong."""

    what: str
    file: str  # below src/adafactor
    old: str
    new: str


class Outcome(NamedTuple):
    """What the tests said: which one failed first, or none; and why."""

    test: str
    why: str
    seconds: float


def mutations_of(backend: str) -> list[Mutation]:
    """The list of a backend, each of them applicable."""
    found = [Mutation(*row) for row in import_module(f"tools.mutants.{backend}").MUTATIONS]
    for mutation in found:
        source = (ROOT / "src/adafactor" / mutation.file).read_text()
        if (count := source.count(mutation.old)) != 1:
            raise SystemExit(f"{mutation.what}: its text stands {count} times in {mutation.file}, not once")
    return found


class Tree:
    """A copy of the files that git knows, which may be broken."""

    def __init__(self, root: Path, backend: Backend):
        """Copy them, as they are in the working tree."""
        self.root, self.backend = root, backend
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        shutil.copytree(ROOT / "src", root / "src", dirs_exist_ok=True)  # and what was built there
        self.is_broken = cache(lambda test: self.first_failure((f"tests/{test}",)) is not None)

    def outcome(self, mutation: Mutation) -> Outcome:
        """Break it, test it, and mend it."""
        start, file = time.monotonic(), self.root / "src/adafactor" / mutation.file
        text = file.read_text()
        try:
            for stage in self.backend.stages:
                file.write_text(text.replace(mutation.old, mutation.new))
                found = self.first_failure(stage)
                if found is None:
                    continue
                file.write_text(text)
                if "::" in found[0] and self.is_broken(found[0]):
                    raise SystemExit(f"without any mutation, too, {found[0]} fails: {found[1]}")
                return Outcome(*found, time.monotonic() - start)
            return Outcome("", "", time.monotonic() - start)
        finally:
            file.write_text(text)

    def build(self) -> None:
        """Compile what is compiled ahead."""
        if self.backend.build:
            subprocess.run(self.backend.build, cwd=self.root, check=True, capture_output=True)

    def first_failure(self, arguments: tuple[str, ...]) -> tuple[str, str] | None:
        """Run these tests; return the first one that fails, and why."""
        self.build()
        output = self.root / "output"
        child = multiprocessing.get_context("fork").Process(target=run_tests, args=(self.root, arguments, output))
        child.start()
        child.join(SECONDS)
        if child.exitcode is None:
            child.kill()
            return "no test ends", f"after {SECONDS} s"
        said = output.read_text()
        if child.exitcode == 0:
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - (.*))?$", said, re.MULTILINE)
        if child.exitcode < 0:
            return "a test ends the process", f"signal {-child.exitcode}"
        if child.exitcode != 1 or failed is None:
            raise SystemExit(f"the tests did not run:\n{said[-3000:]}")
        return failed[1].removeprefix("tests/"), (failed[2] or "").strip()


def run_tests(root: Path, arguments: tuple[str, ...], output: Path) -> None:
    """In a child process: run tests of the tree at `root`, and exit as pytest does."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    sys.dont_write_bytecode = True  # a mutation may have the length and the second of the text before it
    sys.path[:] = [str(root / "src"), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("adafactor", "tests", "tools")]:
        del sys.modules[name]
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(int(code))


def outcomes(name: str, only: str) -> Iterator[tuple[Mutation, Outcome]]:
    """Try the mutations of a backend."""
    chosen = [mutation for mutation in mutations_of(name) if only in mutation.what]
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), BACKENDS[name])
        for mutation in chosen:
            yield mutation, tree.outcome(mutation)


def main() -> None:
    """Print a table as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=WRITTEN, help=f"of {', '.join(WRITTEN)}; default: all")
    parser.add_argument("--only", default="", help="of the mutations, those whose name has this in it")
    arguments = parser.parse_args()
    for name in arguments.backends:
        if name not in WRITTEN:
            parser.error(f"{name!r} is none of {', '.join(WRITTEN)}")
    missed = []
    for name in arguments.backends:
        print(f"\n| {name}: what is broken | caught by | seconds |\n|---|---|---|", flush=True)
        for mutation, outcome in outcomes(name, arguments.only):
            print(f"| {mutation.what} | {outcome.test or '**not caught**'} | {outcome.seconds:.0f} |", flush=True)
            missed += [] if outcome.test else [f"{name}: {mutation.what}"]
    raise SystemExit(f"\nnot caught: {'; '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
