"""The contract of a kernel: three walks over the data of a bucket, and the vectors between the first two.

A bucket is a list of `step.Update`. Each walk reads what `step` prepared and leaves its result on the updates:

| walk | reads | leaves |
|---|---|---|
| `moments` | G | `rows`, `cols` (means of G² + ε₁, where factored), `finite` |
| `factors` | `rows`, `cols` | `state["row"]`, `state["col"]`, `scales` (1/√V̂ as a product of vectors) |
| `energy` | G, X, `scales` | `u2`, `x2` (where `measures_x`) |
| `apply_` | G, X, `scales`, `scale`, `decay` | X |

A kernel may also take whole steps by itself (`whole`), to the same result; those it leaves are led from walk to walk.

What is kept whole, `state["full"]` and `state["momentum"]`, is averaged in `energy` or in `apply_`. A kernel may do in
`moments` what it would do in `energy`, as long as it only reads.

Where a parameter is sharded, X, G and the state are this rank's shard and `layout` is that of the whole: sums are
divided by the whole's lengths, and `sharding.py` adds up the parts between the walks. `factors` takes mean(R) from
`mean_row` where that is set, since R is then not whole here. A walk is never given an empty shard; `factors` may be.

Nothing in the state or in X changes before `step` has seen `finite`.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from adafactor.step import Update

BACKENDS = ("auto", "eager", "cpu")


class Kernel(Protocol):
    """What `step` needs of a backend."""

    def obstacle(self, u: Update) -> str | None:
        """Why this kernel leaves a tensor to `eager`; None if it does not."""

    def whole(self, bucket: list[Update]) -> tuple[list[Update], list[Update]]:
        """Take whole steps; returns those that were left out as non-finite, and those that are still to be stepped."""

    def moments(self, bucket: list[Update]) -> None:
        """First walk: means of G² + ε₁."""

    def factors(self, bucket: list[Update]) -> None:
        """R and C, and what they make of 1/√V̂: vectors only."""

    def energy(self, bucket: list[Update]) -> None:
        """Second walk: ΣU² and ΣX²."""

    def apply_(self, bucket: list[Update]) -> None:
        """Third walk: X."""


def choose(backend: str, on_cpu: bool = True) -> Kernel:
    """The kernel of that name; `auto` takes the best that is there for tensors on a CPU or elsewhere."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(map(repr, BACKENDS))}")
    from adafactor.kernels import eager

    if backend == "eager" or (backend == "auto" and not on_cpu):
        return eager
    kernel = _compiled()
    if not isinstance(kernel, Exception):
        return kernel
    if backend == "cpu":
        raise ImportError(f'backend="cpu" cannot be used: {_explain(kernel)}') from kernel
    _warn_once(kernel)
    return eager


@lru_cache(maxsize=1)
def _compiled() -> Kernel | Exception:
    """The kernel that Numba compiles, imported at the first need, or what is in the way."""
    try:
        from adafactor.kernels import cpu
    except (ImportError, RuntimeError) as problem:  # RuntimeError: there is no folder to keep compiled code in
        return problem
    return cpu


@lru_cache(maxsize=1)
def _warn_once(problem: Exception) -> None:
    warnings.warn(
        f"stepping with plain torch, several times slower on a CPU than need be: {_explain(problem)}. "
        'backend="eager" says that this is meant.',
        RuntimeWarning,
        stacklevel=9,
    )


def _explain(problem: Exception) -> str:
    if isinstance(problem, ImportError):
        return f"Numba cannot be imported ({problem}); `pip install adafactor[cpu]` brings it"
    return f"Numba finds no folder for compiled code ({problem}); NUMBA_CACHE_DIR can name one"
