"""The records of finished runs: a file for each scale, a line for each run."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from lab.corpus import is_same_text
from lab.files import locked, write_text
from lab.presets import Job
from lab.results import Record

RECORDS = Path(__file__).parent / "records"


def read(folder: Path, scale: str = "*") -> list[Record]:
    """All records in a folder, or those of one scale."""
    paths = sorted(folder.glob(f"{scale}.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").split("\n") if line]


def find(job: Job, records: Iterable[Record], fingerprint: str | None = None) -> Record | None:
    """The record of a job's very configuration and, if a fingerprint is given, of that text."""
    config = json.loads(json.dumps(job.config()))
    for record in records:
        if record["config"] == config:
            if fingerprint is None or is_same_text(fingerprint, record["corpus"]["fingerprint"]):
                return record
    return None


def keep(record: Record, folder: Path) -> None:
    """Put a record into its scale's file, in the place of an earlier one of the same name."""
    scale = record["config"]["scale"]["name"]
    with locked(folder / ".lock"):
        others = [other for other in read(folder, scale) if other["name"] != record["name"]]
        ordered = sorted([*others, record], key=lambda each: str(each["name"]))
        lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in ordered)
        write_text(folder / f"{scale}.jsonl", "".join(lines))


def commit() -> str | None:
    """The commit of this checkout, or None outside of one."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    """The versions a result may depend on."""
    names = ("torch", "numpy", "sentencepiece", "sacrebleu")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
