"""`make matrix`: the core's tests with every version of Python, torch and NumPy that we name, one venv for each.

A cell whose record is in `runs/matrix` is not run again: delete the record to do so. With `--prune` a venv is removed
when its cell is done (each holds up to 6 GB). The table is for `docs/machines.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "runs" / "matrix"
TESTS = ("tests/step", "tests/kernels", "tests/backward")
TOOLS = ("pytest", "hypothesis")


@dataclass(frozen=True)
class Cell:
    """Versions that are tried together; an empty one is the newest that pip finds."""

    python: str
    torch: str
    numpy: str = ""

    @property
    def name(self) -> str:
        """A name for its folder and its record."""
        named = zip(("python", "torch", "numpy"), asdict(self).values(), strict=True)
        return "-".join(f"{what}{version}" for what, version in named if version)

    @property
    def packages(self) -> list[str]:
        """What pip shall install."""
        wanted = {"torch": self.torch, "numpy": self.numpy}
        return [f"{name}=={version}" if version else name for name, version in wanted.items()]


CELLS = (
    Cell("3.10", "2.6.0", "1.23.5"),  # the oldest of all
    Cell("3.10", "2.6.0"),
    Cell("3.12", "2.8.0"),
    Cell("3.13", "2.10.0", "2.3.5"),  # its Triton's interpreter does not work with NumPy 2.4
    Cell("3.11", "2.13.0"),
    Cell("3.13", "2.15.0"),  # what a plain `pip install` brought in November 2026
)


def interpreter(version: str) -> str | None:
    """Find a Python of this version: on the path, or one of pyenv's."""
    found = [
        shutil.which(f"python{version}") or "",
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    for path in filter(None, found):
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def run(cell: Cell, folder: Path) -> dict[str, str]:
    """Make the venv, install, run the tests; return what the table says."""
    base = interpreter(cell.python)
    if base is None:
        return {"result": "no such Python here"}
    python = folder / cell.name / "bin" / "python"
    if not python.exists():
        subprocess.run([base, "-m", "venv", str(folder / cell.name)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*install, *cell.packages, *TOOLS], capture_output=True, text=True)
    if done.returncode:
        return {"result": "does not install: " + done.stderr.strip().splitlines()[-1]}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }
    show = "import torch, numpy, platform as p; print(p.python_version(), *(m.__version__.split('+')[0] for m in "
    versions = subprocess.run(
        [str(python), "-c", show + "(torch, numpy)))"], capture_output=True, text=True, check=True
    ).stdout.split()
    tests = [str(python), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True)
    (RECORDS / f"{cell.name}.log").write_text(done.stdout + done.stderr)
    last = next((line for line in reversed(done.stdout.splitlines()) if " in " in line), "did not start")
    result = re.sub(r" in [\d.]+s.*", "", last).strip("= ")
    return {**dict(zip(("python", "torch", "numpy"), versions, strict=True)), "result": result}


def table(records: list[dict[str, str]]) -> str:
    """The records as Markdown."""
    heads = ("python", "torch", "numpy", "result", "date")
    rows = [heads, ("---",) * len(heads), *([record.get(head, "–") for head in heads] for record in records)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Run the cells that have no record yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="for the venvs (%(default)s)")
    parser.add_argument("--prune", action="store_true", help="remove a venv when its cell is done")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    arguments = parser.parse_args()
    RECORDS.mkdir(parents=True, exist_ok=True)
    records = []
    for cell in CELLS:
        record = RECORDS / f"{cell.name}.json"
        if not record.exists() and arguments.only in cell.name:
            print(f"{cell.name} ...", file=sys.stderr, flush=True)
            date = datetime.date.today().isoformat()
            record.write_text(json.dumps({**asdict(cell), **run(cell, arguments.folder), "date": date}, indent=1))
            if arguments.prune:
                shutil.rmtree(arguments.folder / cell.name, ignore_errors=True)
        if record.exists():
            records.append(json.loads(record.read_text()))
    print(table(records))
    return int(any("passed" not in record["result"] or "failed" in record["result"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
