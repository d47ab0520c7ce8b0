"""Answers of the self-test, kept in the user's cache folder so that a card is tested once per version.

Processes that miss the same answer take turns: the first tests the card, the others wait, and read. Where nothing can
be kept the answer lasts as long as the process, and so does one that is only an exception, whose reason may pass.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from adafactor.check import selftest
from adafactor.check.selftest import Finding, Make, Variant
from adafactor.core.contract import Parameter
from adafactor.kernels import cache

PACKAGE = Path(__file__).parents[1]
PATIENCE = 60.0  # seconds in which another process must have tested a setting; the first compiles all kernels


class NotNow(Exception):
    """There is no answer, and next time there may be one."""


def why_not_here(make: Make, parameter: Parameter) -> str | None:
    """Why `auto` should not rely on this card for a parameter like this; asked once per card and version."""
    s = parameter.settings
    momentum = (s.momentum_dtype,) if s.beta1 and s.momentum_dtype != "float32" else ()
    of = s.momentum_of if s.beta1 else None
    variant = Variant(parameter.x.dtype, parameter.gradient.dtype, of, parameter.rounding, *momentum)
    return reason(make, parameter.x.device, variant)


def reason(make: Make, device: torch.device, variant: Variant) -> str | None:
    """Why not to rely on Triton for this variant on this device, in a sentence; None: it is right there.

    The first time on a card this takes about as long as to compile the kernels, and a second besides.
    """
    try:
        problem = answer(make, device, variant)
    except (NotNow, torch.OutOfMemoryError) as why:
        return f"the kernels have not been tested on this card yet ({next(iter(str(why).splitlines()), 'no memory')})"
    if problem is None:
        return None
    return f"on this card Triton's step fails or is not that of eager PyTorch ({problem}); `adafactor check` shows all"


@lru_cache
def answer(make: Make, device: torch.device, variant: Variant) -> str | None:
    """What is wrong on this device, from the folder or from a self-test; None: nothing. A process asks once."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotNow("a graph is being captured: take a step before that")
    card, name = describe(device), str(variant)
    if name in (answers := read(card)):
        return answers[name]
    what = "adafactor: testing the kernels on this card, once per card and version"
    with cache.turn([cache.users_folder()], f"{_name(card)}.lock", what, PATIENCE, after=1.0) as tell:
        if name in (answers := read(card)):  # another process may have tested it meanwhile
            return answers[name]
        return keep(card, variant, selftest.examine(make, device, variant, tell=tell))


def keep(card: dict[str, str], variant: Variant, findings: Sequence[Finding]) -> str | None:
    """Keep what comparisons have shown, but no exception; return what is wrong, None: nothing."""
    differences = [finding for finding in findings if not finding.is_exception]
    problem = sum_up(differences or findings)
    if problem is not None and not differences:
        return f"{problem}; the next process tests again"
    write(card, {str(variant): problem})
    return problem


def sum_up(findings: Sequence[Finding]) -> str | None:
    """Return the first finding, and how many more there are; None if there is none that would go unnoticed."""
    silent = [finding for finding in findings if not finding.raises]
    if not silent:
        return None
    return str(silent[0]) + (f", and {len(silent) - 1} more" if silent[1:] else "")


def describe(device: torch.device) -> dict[str, str]:
    """Name the card and everything else that the answer depends on."""
    import triton

    card = {"name": platform.machine(), "capability": "", "driver": ""}
    if device.type in ("cuda", "xpu"):
        properties = torch.get_device_module(device).get_device_properties(device)
        card["name"] = str(properties.name)
        if device.type == "cuda":
            card["capability"] = str(getattr(properties, "gcnArchName", f"{properties.major}.{properties.minor}"))
            driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "")  # not in every build
            card["driver"] = f"{torch.version.cuda or torch.version.hip}, {driver()}"
        else:
            card["driver"] = str(getattr(properties, "driver_version", ""))
    versions = {"torch": str(torch.__version__), "triton": str(triton.__version__), "adafactor": _version()}
    return {**card, **versions, "source": source()}


@lru_cache(maxsize=1)
def source() -> str:
    """Hash the package's source: the kernels, eager PyTorch, and all that the self-test compares them by."""
    code = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        code.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return code.hexdigest()[:16]


def write(card: dict[str, str], answers: dict[str, str | None]) -> None:
    """Add answers to the file of a card; other processes may be writing to it, too, and none sees half a file."""
    text = json.dumps({"card": card, "answers": {**read(card), **answers}}, indent=1)
    trouble = "every process tests the kernels again on this card, as there is no folder for the answer"
    cache.write([cache.users_folder()], f"{_name(card)}.json", text.encode(), trouble)


def read(card: dict[str, str]) -> dict[str, str | None]:
    """Return the answers for this card; none where the file is not there, is no such file, or cannot be trusted."""
    try:
        content: dict[str, Any] = json.loads(cache.read(cache.users_folder(), f"{_name(card)}.json") or "")
        answers = content["answers"] if content["card"] == card else {}
        return {str(name): value for name, value in answers.items() if value is None or isinstance(value, str)}
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _name(card: dict[str, str]) -> str:
    return f"triton-{hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()[:16]}"


def _version() -> str:
    try:
        return version("adafactor")
    except PackageNotFoundError:  # from a checkout; the source's hash is exact anyway
        return "not installed"
