"""The contract of a backend, and which one steps which parameter.

A backend is a module with two functions: `why_not` says what is in the way of a parameter, `prepare` makes *works* of
those that it can step. For `auto` the optimizer may doubt a backend besides: why not to rely on this machine for a
parameter that there is a path for (`doubt`). A work is prepared once and then takes many steps:

| part | reads | leaves |
|---|---|---|
| `begin` | gradients, settings, t | β̂₂ₜ, ρₜ; nothing of X or the state changes before `factors` |
| `moments` | G | means of G² + ε₁ over rows and columns, and whether G² is finite |
| `admit` | whether G² is finite | which steps are taken; raises where that is asked for |
| `factors` | the means | `state["row"]`, `state["col"]`, 1/√V̂ as a product of vectors |
| `energy` | G, X, 1/√V̂ | ΣU², ΣX² |
| `conclude` | ΣU², ΣX² | αₜ / max(1, RMS(U)/d) |
| `apply_` | G, X, 1/√V̂ | X, t |
| `end` | | the parameters that were skipped; lets go of the gradients |

`step.walk` calls the parts in this order. Where `at_once` is true, `step()` does all from `moments` to `apply_` in one
call. What is kept whole, `state["full"]` and `state["momentum"]`, is averaged in `energy` or in `apply_`.

Where a parameter is sharded, X, G and the state are this rank's shard and `factoring` is that of the whole: sums are
divided by the whole's lengths, and `sharding.py` adds up the parts, which a work offers as `updates`. A shard may be
empty: then there is nothing to walk, but its factors are kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch

from adafactor.core.warn import warn

if TYPE_CHECKING:
    from torch import Tensor

    from adafactor.core.bucket import Parameter
    from adafactor.core.settings import Settings
    from adafactor.core.step import Update

PROCESS = os.getpid()  # in which the package was imported: in a child, forked later, torch's threads are gone
# For each folder of this package that is a compiled backend: what it is written in, the oldest version that it works
# with, and what brings it. Before 3.6, Triton flushes subnormal quotients and roots to zero, or cannot compile the
# kernels.
PACKAGES = {
    "cpu": ("Numba", (0, 57), '`pip install "numba>=0.57"`'),
    "triton": ("Triton", (3, 6), "torch's build for GPUs, from 2.10 on,"),
}
COMPILED = tuple(PACKAGES)
AUTO = {"cpu": "cpu", "cuda": "triton", "xpu": "triton"}  # for tensors on a device of this type, what "auto" takes
BACKENDS = ("auto", "eager", *COMPILED)
_modes, _level = torch._C._len_torch_dispatch_stack, torch._C._functorch.maybe_current_level  # asked in every step


class Executor(Protocol):
    """What a backend has prepared for some parameters of a bucket."""

    parameters: list[Parameter]
    together: bool  # goes walk by walk beside others: it is sharded, or a bad gradient shall raise
    at_once: bool  # `step` takes a whole step
    updates: list[Update]  # of this step, where `sharding.Ranks` has to complete sums
    scaling: tuple[Tensor, Tensor] | None  # a GradScaler's scale and found_inf; None: the work wants unscaled gradients

    def begin(self, grads: list[Tensor | None], settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Take gradients, the groups' settings, and which parameters were written to since the last step (or None)."""

    def moments(self) -> None:
        """First walk: means of G² + ε₁."""

    def admit(self) -> None:
        """Decide which steps are taken."""

    def factors(self) -> None:
        """R and C, and what they make of 1/√V̂: vectors only."""

    def energy(self) -> None:
        """Second walk: ΣU² and ΣX²."""

    def conclude(self) -> None:
        """From RMS(X) and RMS(U) to the length of the step: scalars only."""

    def apply_(self) -> None:
        """Third walk: X."""

    def step(self) -> None:
        """All of these parts in one call."""

    def end(self) -> list[Parameter]:
        """Let go of what was of this step; return the parameters that were skipped."""

    def flush(self) -> None:
        """Hand the figures of the steps since the last time to the parameters' traces."""


class Backend(Protocol):
    """A module that steps parameters."""

    def why_not(self, parameter: Parameter) -> str | None:
        """What is in the way of stepping this parameter; None if nothing is."""

    def prepare(self, parameters: list[Parameter]) -> list[Executor]:
        """Prepare parameters that nothing is in the way of."""


Fallback = tuple["Parameter", str]  # a parameter that `eager` has to step, and why
Doubt = Callable[[str, "Parameter"], "str | None"]  # why not to rely on the backend of this name for a parameter


def prepare(
    parameters: list[Parameter], backend: str, doubt: Doubt | None = None
) -> tuple[list[Executor], Fallback | None]:
    """Give every parameter to a backend; a backend that was asked for by name takes all or raises."""
    from adafactor.kernels import eager

    chosen: dict[str, list[Parameter]] = {}
    fallback: Fallback | None = None
    for parameter in parameters:
        name = AUTO.get(parameter.x.device.type, "eager") if backend == "auto" else backend
        if not parameter.x.numel():  # an empty shard: there is nothing to walk
            name = "eager"
        module = eager if name == "eager" else _find(name, required=backend != "auto")
        reason = module.why_not(parameter) if module is not None else None
        if reason is None and module is not None and backend == "auto" and doubt is not None:
            reason = doubt(name, parameter)
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


def is_watched() -> bool:
    """Whether a mode stands between torch and its operations, as make_fx's: it would see nothing of compiled code."""
    return _modes() > 0 or _level() is not None


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
        f"stepping with plain torch, several times slower than compiled code: {_explain(name, _compiled(name))}. "
        'Pass backend="eager" to silence this.'
    )


def _explain(name: str, problem: Exception) -> str:
    if isinstance(problem, ImportError):
        package, oldest, source = PACKAGES[name]
        version = ".".join(map(str, oldest))
        return f"the compiled step needs {package} {version} or newer ({problem}); {source} brings it"
    advice = "; NUMBA_CACHE_DIR can name a folder for compiled code" if "cache" in str(problem) else ""
    return f"{problem}{advice}"
