"""What the trial has found on a card, kept in the user's cache folder so that it is held once per card and version.

The folder is `adafactor` in XDG_CACHE_HOME, or in ~/.cache. Where nothing can be written the answer lasts as long as
the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

import adafactor
from adafactor.kernels.triton import trial
from adafactor.kernels.triton.trial import Finding, Sort


class NotNow(Exception):
    """There is no answer, and next time there may be one."""


def reason(device: torch.device, sort: Sort) -> str | None:
    """Why not to rely on Triton for this sort of kernels on this device, in a sentence; None: it is right there.

    The first time on a card this takes about as long as to compile the kernels, and a second besides.
    """
    try:
        finding = answer(device, sort)
    except (NotNow, torch.OutOfMemoryError) as why:
        return f"the kernels have not been tried on this card yet ({next(iter(str(why).splitlines()), 'no memory')})"
    if finding is None:
        return None
    return f"tried on this card, Triton's step is not that of plain torch ({finding}); `adafactor check` shows all"


@lru_cache
def answer(device: torch.device, sort: Sort) -> str | None:
    """What is wrong on this device, from the folder or from a trial; None: nothing. A process asks once."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotNow("a graph is being captured: take a step before that")
    card = describe(device)
    kept = read(card)
    if str(sort) not in kept:
        with progress("adafactor: trying the kernels on this card, once per card and version", 1.0) as tell:
            kept[str(sort)] = sum_up(trial.examine(device, sort, tell=tell))
        write(card, {str(sort): kept[str(sort)]})
    return kept[str(sort)]


def sum_up(found: Sequence[Finding]) -> str | None:
    """The first finding, and how many more there are; None if there is none that would go unnoticed."""
    found = [finding for finding in found if not finding.is_told]
    if not found:
        return None
    return str(found[0]) + (f", and {len(found) - 1} more" if found[1:] else "")


def describe(device: torch.device) -> dict[str, str]:
    """The card and everything else that the answer depends on."""
    found = {"name": platform.machine(), "capability": "", "driver": ""}
    if device.type in ("cuda", "xpu"):
        properties = torch.get_device_module(device).get_device_properties(device)
        found["name"] = str(properties.name)
        if device.type == "cuda":
            found["capability"] = str(getattr(properties, "gcnArchName", f"{properties.major}.{properties.minor}"))
            found["driver"] = f"{torch.version.cuda or torch.version.hip}, {_driver()}"
        else:
            found["driver"] = str(getattr(properties, "driver_version", ""))
    versions = {"torch": str(torch.__version__), "triton": str(triton.__version__), "adafactor": adafactor.__version__}
    return {**found, **versions, "source": source()}


@lru_cache(maxsize=1)
def source() -> str:
    """A hash of this backend's source and of plain torch's, which it is compared with."""
    here = Path(__file__).parent
    code = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *(here.parent / "eager").glob("*.py")]):
        code.update(path.name.encode() + path.read_bytes())
    return code.hexdigest()[:16]


def write(card: dict[str, str], answers: dict[str, str | None]) -> None:
    """Add answers to the file of a card; other processes may be writing to it, too, and none sees half a file."""
    with suppress(OSError, RuntimeError):  # no home, or a read-only one
        path = _path(card)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"card": card, "answers": {**read(card), **answers}}, indent=1)
        number, new = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(new, path)


def read(card: dict[str, str]) -> dict[str, str | None]:
    """The answers for this card; none where the file is not there or is no such file."""
    try:
        found: dict[str, Any] = json.loads(_path(card).read_text(encoding="utf-8"))
        answers = found["answers"] if found["card"] == card else {}
        return {str(name): value for name, value in answers.items() if value is None or isinstance(value, str)}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _path(card: dict[str, str]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()[:16]
    return Path(base) / "adafactor" / f"triton-{name}.json"


def _driver() -> str:
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(version()) if version is not None else ""


@contextmanager
def progress(what: str, after: float = math.inf) -> Iterator[Callable[[str], None]]:
    """Give what takes a text about what comes next: shown on stderr in one line, where that is a terminal.

    Elsewhere `what` alone is said, once, if it takes longer than so many seconds.
    """
    start, shown, terminal = time.monotonic(), 0, sys.stderr.isatty()

    def tell(text: str) -> None:
        nonlocal shown
        if terminal:
            line = f"{what}: {text}"[:118]
            print(f"\r{line:<{shown}}", end="", file=sys.stderr, flush=True)
            shown = max(shown, len(line))
        elif not shown and time.monotonic() - start > after:
            print(f"{what} ...", file=sys.stderr, flush=True)
            shown = 1

    yield tell
    if terminal and shown:
        print(f"\r{'':<{shown}}\r", end="", file=sys.stderr, flush=True)
