"""Which backend steps which parameter. `core/contract.py` says what a backend is."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from typing import Any

from adafactor.core.contract import Backend, Executor, Parameter
from adafactor.core.warn import warn
from adafactor.kernels import eager

PROCESS = os.getpid()  # in which the package was imported: in a child, forked later, torch's threads are gone
OLDEST_TRITON = 3, 6  # before, it flushes subnormal quotients and roots to zero, or cannot compile the kernels
# For each folder of this package that is a compiled backend, what to do where it cannot be imported.
ADVICE = {
    "cpu": "install a C++17 compiler (on Debian: `apt install g++`) and then this package once more",
    "triton": "it needs Triton 3.6 or newer, which torch's build for GPUs brings from 2.10 on",
}
COMPILED = tuple(ADVICE)
# What "auto" takes for tensors on a device of this type; else eager PyTorch. CONTRIBUTING.md says when "cuda" comes in.
AUTO = {"cpu": "cpu"}
BACKENDS = ("auto", "eager", *COMPILED)


def prepare(parameters: list[Parameter], backend: str) -> list[Executor]:
    """Give every parameter to a backend; one that was asked for by name takes all or raises.

    `"auto"` leaves what the compiled backend does not take to eager PyTorch, without a word.
    """
    chosen: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        name = AUTO.get(parameter.x.device.type, "eager") if backend == "auto" else backend
        if not parameter.x.numel():  # an empty shard: there is nothing to compute
            name = "eager"
        module = eager if name == "eager" else _find(name, required=backend != "auto")
        reason = "it cannot be used" if module is None else module.why_not(parameter)
        if reason is not None and backend != "auto":
            raise ValueError(
                f'backend="{backend}" cannot step {parameter.name} (shape {parameter.shape}): {reason}; "auto" can'
            )
        chosen.setdefault("eager" if reason is not None else name, []).append(parameter)
    executors: list[Executor] = []
    for name, members in chosen.items():
        executors += eager.prepare(members) if name == "eager" else _compiled(name).prepare(members)
    return executors


def check(backend: str) -> None:
    """Raise for a wrong name, and for a backend that was asked for but cannot be used."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(map(repr, BACKENDS))}")
    if backend in COMPILED:
        _find(backend, required=True)


def _find(name: str, required: bool) -> Backend | None:
    """A compiled backend; where it cannot be used, None and one warning."""
    found = _compiled(name)
    if not isinstance(found, Exception):
        module: Backend = found
        return module
    if required:
        raise ImportError(f'backend="{name}" cannot be used: {found}; {ADVICE[name]}') from found
    _warn_once(name)
    return None


@lru_cache
def _compiled(name: str) -> Any:
    """The module of a compiled backend, imported at the first need, or what is in the way."""
    try:
        if name == "triton":
            version = import_module("triton").__version__
            if tuple(map(int, version.split(".")[:2])) < OLDEST_TRITON:
                raise ImportError(f"this is {version}")
        if name == "cpu":
            import_module("adafactor.kernels.cpu.library").library()
        return import_module(f"adafactor.kernels.{name}")
    except ImportError as problem:
        return problem


@lru_cache
def _warn_once(name: str) -> None:
    warn(
        f"stepping with eager PyTorch, several times slower than compiled code: {_compiled(name)}; {ADVICE[name]}. "
        'Pass backend="eager" to silence this.'
    )
