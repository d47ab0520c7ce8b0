"""The contract of a kernel: three walks over the data of a bucket, and nothing else.

A bucket is a list of `step.Update`. Each walk reads what `step` prepared and leaves its result on the updates:

| walk | reads | leaves |
|---|---|---|
| `moments` | G, X | `rows`, `cols` (means of G² + ε₁, where factored), `x2` (for relative steps), `finite` |
| `energy` | G, `scales` | `u2`; it also averages `state["full"]` and a gradient's `state["momentum"]` |
| `apply_` | G, `scales`, `scale`, `decay` | X; it also averages an update's `state["momentum"]` |

Nothing in the state or in X changes before `step` has seen `finite`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from adafactor.step import Update

BACKENDS = ("auto", "eager")


class Kernel(Protocol):
    """What `step` needs of a backend."""

    def moments(self, bucket: list[Update]) -> None:
        """First walk: means of G² + ε₁ and ΣX²."""

    def energy(self, bucket: list[Update]) -> None:
        """Second walk: ΣU²."""

    def apply_(self, bucket: list[Update]) -> None:
        """Third walk: X."""


def choose(backend: str) -> Kernel:
    """The kernel of that name; `auto` takes the best that is there."""
    from adafactor.kernels import eager

    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(map(repr, BACKENDS))}")
    return eager
