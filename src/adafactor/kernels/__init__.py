"""Which backend steps which parameter. `core/contract.py` says what a backend is."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from typing import Any

from adafactor.core.contract import Backend, Executor, Fallback, Parameter
from adafactor.core.warn import warn
from adafactor.kernels import eager

PROCESS = os.getpid()  # in which the package was imported: in a child, forked later, torch's threads are gone
# For each folder of this package that is a compiled backend: what it is written in, the oldest version that it works
# with, and what brings it. Before 3.6, Triton flushes subnormal quotients and roots to zero, or cannot compile the
# kernels.
PACKAGES = {
    "cpu": ("Numba", (0, 57), '`pip install "numba>=0.57"`'),
    "triton": ("Triton", (3, 6), "torch's build for GPUs, from 2.10 on,"),
}
COMPILED = tuple(PACKAGES)
# What "auto" takes for tensors on a device of this type; else eager PyTorch. CONTRIBUTING.md says when "cuda" comes in.
AUTO = {"cpu": "cpu"}
BACKENDS = ("auto", "eager", *COMPILED)


def prepare(parameters: list[Parameter], backend: str) -> tuple[list[Executor], Fallback | None]:
    """Give every parameter to a backend; a backend that was asked for by name takes all or raises."""
    chosen: dict[str, list[Parameter]] = {}
    fallback: Fallback | None = None
    for parameter in parameters:
        name = AUTO.get(parameter.x.device.type, "eager") if backend == "auto" else backend
        if not parameter.x.numel():  # an empty shard: there is nothing to compute
            name = "eager"
        module = eager if name == "eager" else _find(name, required=backend != "auto")
        reason = module.why_not(parameter) if module is not None else None
        if reason is not None and backend != "auto":
            raise ValueError(
                f'backend="{backend}" cannot step {parameter.name} (shape {parameter.shape}): {reason}; "auto" can'
            )
        if reason is not None and fallback is None:
            fallback = parameter, reason
        chosen.setdefault("eager" if module is None or reason is not None else name, []).append(parameter)
    executors: list[Executor] = []
    for name, members in chosen.items():
        executors += eager.prepare(members) if name == "eager" else _compiled(name).prepare(members)
    return executors, fallback


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
        raise ImportError(f'backend="{name}" cannot be used: {_explain(name, found)}') from found
    _warn_once(name)
    return None


@lru_cache
def _compiled(name: str) -> Any:
    """The module of a compiled backend, imported at the first need, or what is in the way."""
    try:
        _check_version(name)
        return import_module(f"adafactor.kernels.{name}")
    except (ImportError, RuntimeError) as problem:  # RuntimeError: compiling is switched off, or no folder for the code
        return problem


def _check_version(name: str) -> None:
    package, oldest, _ = PACKAGES[name]
    version = import_module(package.lower()).__version__
    if tuple(map(int, version.split(".")[:2])) < oldest:
        raise ImportError(f"this is {version}")


@lru_cache
def _warn_once(name: str) -> None:
    warn(
        f"stepping with eager PyTorch, several times slower than compiled code: {_explain(name, _compiled(name))}. "
        'Pass backend="eager" to silence this.'
    )


def _explain(name: str, problem: Exception) -> str:
    if isinstance(problem, ImportError):
        package, oldest, source = PACKAGES[name]
        version = ".".join(map(str, oldest))
        return f"the compiled step needs {package} {version} or newer ({problem}); {source} brings it"
    advice = "; NUMBA_CACHE_DIR can name a folder for compiled code" if "cache" in str(problem) else ""
    return f"{problem}{advice}"
