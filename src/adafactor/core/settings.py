"""The keywords of one parameter group, checked."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral, Real
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from adafactor.core import equations as eq
from adafactor.core.equations import Scalar

RATES = ("lr", "lr_decay", "beta2", "decay_rate", "weight_decay")  # that a schedule may write to
SMALLEST_EPS1 = 1.1754944e-38  # the smallest normal float32: below it, a row of zeros would divide by zero

SMALL_LR = 1e-3  # a share of a weight's size: T5 is fine-tuned with 0.001 of it; less is what AdamW's users write
FOREIGN = {  # what transformers, torch, timm and AdamW call things, and what to write here
    "scale_parameter": "relative",
    "relative_step": 'lr_decay, "rsqrt" or None',
    "warmup_init": "adafactor.schedules.warmup",
    "clip_threshold": "clip",
    "d": "clip",
    "beta2_decay": "decay_rate, without the minus",
    "eps_scale": "eps[1]",
    "betas": "beta1 and beta2",
    "min_dim_size_to_factor": "factored=False, in a group of the small ones",
    "amsgrad": "nothing: there is no such variant",
}


class Rates(NamedTuple):
    """The numbers of a step that depend on t alone."""

    beta2: Scalar  # β̂₂ₜ
    w1: Scalar  # 1 − β̂₁ₜ, the weight of the newest term in the momentum
    w2: Scalar  # 1 − β̂₂ₜ
    rho: Scalar  # ρₜ


@dataclass(frozen=True)
class Settings:
    """Every keyword that may differ between groups; `docs/paper.md` maps each to its line in the paper."""

    lr: float | Tensor = 1e-2
    lr_decay: str | None = "rsqrt"
    relative: bool = True
    factored: str | bool = "outer"
    beta1: float = 0.0
    momentum_of: str = "update"
    beta2: float | None = None
    decay_rate: float = 0.8
    clip: float | None = 1.0
    eps: tuple[float, float] = (1e-30, 1e-3)
    weight_decay: float = 0.0
    axes: tuple[int, int] | None = None
    maximize: bool = False
    on_nonfinite: str = "skip"
    rounding: str = "nearest"
    seed: int = 0

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Settings:
        """The settings of a parameter group, which may have been edited since the last step."""
        return cls(**{field.name: group[field.name] for field in fields(cls)})

    @cached_property
    def without_rates(self) -> tuple[Any, ...]:
        """Every setting except those that a schedule may change; while these are equal, a prepared step stays valid."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in RATES)

    def rates(self, t: Scalar) -> Rates:
        """Return the rates of step t (Algorithm 6)."""
        beta2, w2 = eq.second_moment_decay(t, self.beta2, self.decay_rate)
        w1 = eq.corrected_decay(t, self.beta1)[1] if self.momentum_of == "gradient" else 1 - self.beta1
        return Rates(beta2, w1, w2, eq.relative_step(t, self._lr(t), self.lr_decay))

    def _lr(self, t: Scalar) -> Scalar:
        """The learning rate where t is: a tensor lr is read on the host only for a parameter that lives there."""
        if not isinstance(self.lr, Tensor):
            return self.lr
        return self.lr.to(t.device, t.dtype).reshape(()) if isinstance(t, Tensor) else float(self.lr)

    def __post_init__(self) -> None:
        """Name the argument, its value and what is allowed, for the first one that is wrong.

        Numbers become Python's own, so that a NumPy float32 in a group does not make the equations float32.
        """
        eps1, eps2 = _pair("eps", self.eps)
        checked = {
            "lr": _learning_rate(self.lr),
            "beta1": _number("beta1", self.beta1, at_least=0.0, below=1.0),
            "beta2": None if self.beta2 is None else _number("beta2", self.beta2, at_least=0.0, below=1.0),
            "decay_rate": _number("decay_rate", self.decay_rate, above=0.0),
            "clip": None if self.clip is None else _number("clip", self.clip, above=0.0),
            "eps": (_number("eps[0]", eps1, at_least=SMALLEST_EPS1), _number("eps[1]", eps2, at_least=0.0)),
            "weight_decay": _number("weight_decay", self.weight_decay, at_least=0.0),
            "axes": None if self.axes is None else _axes(self.axes),
            "seed": _seed(self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        _word("lr_decay", self.lr_decay, ("rsqrt", None))
        _word("relative", self.relative, (True, False))
        _word("factored", self.factored, ("outer", "row", "column", False))
        _word("momentum_of", self.momentum_of, ("update", "gradient"))
        _word("maximize", self.maximize, (True, False))
        _word("on_nonfinite", self.on_nonfinite, ("skip", "raise", "ignore"))
        _word("rounding", self.rounding, ("nearest", "stochastic", "kahan"))


class CheckedGroups:
    """The settings of groups, checked again only when a group has been edited since the last time."""

    def __init__(self) -> None:
        """Start without any."""
        self._known: dict[int, tuple[tuple[Any, ...], Settings]] = {}

    def __call__(self, number: int, group: Mapping[str, Any]) -> Settings:
        """Return the settings of the group with this number."""
        values = _values(group)
        if not _CONSTANT.issuperset(map(type, values)):
            values = tuple(map(_comparable, values))
        known = self._known.get(number)
        if known is None or known[0] != values:
            known = self._known[number] = (values, Settings.of(group))
        return known[1]


def from_text(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a group, with numbers, pairs, True, False and None read where they are given as text.

    YAML reads 1e-3 as a word, because it has no point; some command lines hand on every value as text.
    """
    return {field.name: read_text(group[field.name]) for field in fields(Settings) if field.name in group}


def read_text(value: Any) -> Any:
    """Return the number, pair, True, False or None that a text says; anything else, also a word, as it is."""
    if type(value) in (list, tuple):
        return type(value)(map(read_text, value))
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(value.lower(), value))
    except (ValueError, SyntaxError):  # a word
        return value


def rename_momentum(group: dict[str, Any]) -> bool:
    """Take a word under the former name of `momentum_of`; a number there is somebody else's."""
    if not isinstance(group.get("momentum"), str):
        return False
    group["momentum_of"] = group.pop("momentum")
    return True


_values = itemgetter(*(field.name for field in fields(Settings)))
_CONSTANT = {float, str, bool, int, type(None), tuple}  # types of which no value changes


def _comparable(value: Any) -> Any:
    """A value that says, by ==, whether a keyword has been edited, also where its own == does not."""
    if type(value) in _CONSTANT:
        return value
    if isinstance(value, Tensor):  # one on a device is not read here: its value may change without notice
        return value.tolist() if value.is_cpu else id(value)
    if isinstance(value, list):
        return tuple(value)
    return value.tolist() if hasattr(value, "tolist") else value  # NumPy's


def _learning_rate(value: Any) -> float | Tensor:
    """A number; a tensor of one element as torch's optimizers allow, read here if it is on the CPU."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.dtype.is_floating_point:
            raise ValueError(f"lr={value!r} must be a number or a floating-point tensor of one element")
        if not value.is_cpu:
            return value
        value = value.item()
    return _number("lr", value, at_least=0.0)


def _number(
    name: str,
    value: Any,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> float:
    limits = [f"at least {at_least:g}"] if at_least > -math.inf else []
    limits += [f"above {above:g}"] if above > -math.inf else []
    limits += [f"below {below:g}"] if below < math.inf else []
    allowed = f"must be a finite number {' and '.join(limits)}"
    shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}…"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={shown} {allowed}, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a float
        number = math.inf
    if not (math.isfinite(number) and at_least <= number and above < number < below):
        raise ValueError(f"{name}={shown} {allowed}")
    return number


def _word(name: str, value: Any, allowed: tuple[Any, ...], hint: str = "") -> None:
    # `is` for True, False and None: 1 == True, but 1 is not what was meant
    if not any(value is word or (isinstance(word, str) and value == word) for word in allowed):
        words = ", ".join(repr(word) for word in allowed)
        raise ValueError(f"{name}={value!r} must be one of {words}{hint}")


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    pair = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name}={value!r} must be a pair")
    return pair[0], pair[1]


def _axes(value: Any) -> tuple[int, int]:
    row, col = _pair("axes", value)
    if not all(isinstance(axis, Integral) and not isinstance(axis, bool) for axis in (row, col)):
        raise TypeError(f"axes={value!r} must be None or a pair of integers")
    return int(row), int(col)


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"seed={value!r} must be an integer, not {type(value).__name__}")
    number = int(value)
    if not 0 <= number < 2**64:
        raise ValueError(f"seed={value!r} must be at least 0 and below 2**64")
    return number
