"""What the trial has found on a card, kept in the user's cache folder so that it is held once per card and version.

Processes that miss the same answer take turns: the first tries the card, the others wait, and read. Where nothing can
be kept the answer lasts as long as the process, and so does one that is only an exception, whose reason may pass.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

import adafactor
from adafactor.check import trial
from adafactor.check.trial import Finding, Sort
from adafactor.kernels import cache

PATIENCE = 60.0  # seconds in which another process must have tried a setting; the first compiles all kernels


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
    return f"on this card Triton's step fails or is not that of plain torch ({finding}); `adafactor check` shows all"


@lru_cache
def answer(device: torch.device, sort: Sort) -> str | None:
    """What is wrong on this device, from the folder or from a trial; None: nothing. A process asks once."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotNow("a graph is being captured: take a step before that")
    card = describe(device)
    kept = read(card)
    if str(sort) in kept:
        return kept[str(sort)]
    what = "adafactor: trying the kernels on this card, once per card and version"
    with cache.turn([cache.users_folder()], f"{_name(card)}.lock", what, PATIENCE, after=1.0) as tell:
        kept = read(card)  # another process may have tried it meanwhile
        return kept[str(sort)] if str(sort) in kept else keep(card, sort, trial.examine(device, sort, tell=tell))


def keep(card: dict[str, str], sort: Sort, found: Sequence[Finding]) -> str | None:
    """Keep what comparisons have shown, but no exception; return what is wrong, None: nothing."""
    wrong = [finding for finding in found if not finding.is_exception]
    off = sum_up(wrong or found)
    if off is not None and not wrong:
        return f"{off}; the next process tries again"
    write(card, {str(sort): off})
    return off


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
    text = json.dumps({"card": card, "answers": {**read(card), **answers}}, indent=1)
    trouble = "every process tries the kernels again on this card, as there is no folder for the answer"
    cache.write([cache.users_folder()], f"{_name(card)}.json", text.encode(), trouble)


def read(card: dict[str, str]) -> dict[str, str | None]:
    """The answers for this card; none where the file is not there, is no such file, or cannot be trusted."""
    try:
        found: dict[str, Any] = json.loads(cache.read(cache.users_folder(), f"{_name(card)}.json") or "")
        answers = found["answers"] if found["card"] == card else {}
        return {str(name): value for name, value in answers.items() if value is None or isinstance(value, str)}
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _name(card: dict[str, str]) -> str:
    return f"triton-{hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()[:16]}"


def _driver() -> str:
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(version()) if version is not None else ""
