"""Arguments of other optimizers that one keyword of ours stands for, with both ways between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import neg
from typing import Any


@dataclass(frozen=True)
class Argument:
    """An argument of another optimizer, and the keyword of ours with the same meaning."""

    default: Any
    keyword: str
    to_ours: Callable[[Any], Any] = lambda value: value
    to_theirs: Callable[[Any], Any] = lambda value: value


def same(**defaults: Any) -> dict[str, Argument]:
    """Declare arguments that have the same name and meaning here."""
    return {name: Argument(default, name) for name, default in defaults.items()}


def negative(default: float) -> Argument:
    """Declare the exponent c of 1 − t^−c, given with its minus."""
    return Argument(default, "decay_rate", neg, neg)


def clipping(default: float | None) -> Argument:
    """Declare the bound of RMS(U), where infinity is no clipping."""

    def to_ours(d: float | None) -> float | None:
        return None if d is None or math.isinf(d) else d

    return Argument(default, "clip", to_ours, lambda d: math.inf if d is None else d)


def momentum(default: float | None) -> Argument:
    """Declare β₁, where None is no momentum."""
    return Argument(default, "beta1", lambda beta1: beta1 or 0.0, lambda beta1: beta1 or None)
