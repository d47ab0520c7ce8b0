"""The keywords of one parameter group, checked."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral, Real
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from adafactor.core import equations as eq
from adafactor.core.equations import Scalar

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
    "min_dim_size_to_factor": "min_factored",
    "amsgrad": "nothing: there is no such variant",
    "momentum": "beta1, and momentum_of for what it averages",
    "capturable": "nothing: no step waits for a device",
    "differentiable": "nothing: a step is not recorded for a gradient of its own",
}


class Rates(NamedTuple):
    """The numbers of a step that depend on t alone."""

    beta2: Scalar  # β̂₂ₜ
    w1: Scalar  # 1 − β̂₁ₜ, the weight of the newest term in the momentum
    w2: Scalar  # 1 − β̂₂ₜ
    rho: Scalar  # ρₜ
    decay: Scalar  # the share of X that weight decay takes; with `weight_decay_by="alpha"`, of X/max(ε₂, RMS(X))


def _declare(default: Any, check: Callable[[str, Any], Any], rate: bool = False) -> Any:
    """A keyword: its default, and what checks a value or raises. A schedule may write to a `rate` at any time."""
    return field(default=default, metadata={"check": check, "rate": rate})


def _number(default: float | None, rate: bool = False, **limits: float) -> Any:
    """A finite number within limits."""
    return _declare(default, lambda name, value: _check_number(name, value, **limits), rate)


def _number_or_none(default: float | None, rate: bool = False, **limits: float) -> Any:
    return _declare(default, lambda name, value: None if value is None else _check_number(name, value, **limits), rate)


def _word(*allowed: Any, rate: bool = False) -> Any:
    """One of these; the first is the default."""
    return _declare(allowed[0], lambda name, value: _check_word(name, value, allowed), rate)


@dataclass(frozen=True)
class Settings:
    """Every keyword that may differ between groups, declared once; `docs/paper.md` maps each to the paper."""

    lr: float | Tensor = _declare(1e-2, lambda _, value: _learning_rate(value), rate=True)
    lr_decay: str | None = _word("rsqrt", None, rate=True)
    relative: bool = _word(True, False)
    factored: str | bool = _word("outer", "row", "column", False)
    beta1: float = _number(0.0, at_least=0.0, below=1.0)
    momentum_of: str = _word("update", "gradient", "direction")
    momentum_dtype: str = _word("float32", "bfloat16", "int8")
    beta2: float | None = _number_or_none(None, rate=True, at_least=0.0, below=1.0)
    decay_rate: float = _number(0.8, rate=True, above=0.0)
    beta2_max: float | None = _number_or_none(None, rate=True, above=0.0, below=1.0)
    clip: float | None = _number_or_none(1.0, above=0.0)
    eps: tuple[float, float] = _declare((1e-30, 1e-3), lambda name, value: _check_eps(name, value))
    weight_decay: float = _number(0.0, rate=True, at_least=0.0)
    weight_decay_by: str = _word("rho", "alpha", "lr")
    axes: tuple[int, int] | None = _declare(None, lambda name, value: _check_axes(name, value))
    min_factored: int = _declare(0, lambda name, value: _check_integer(name, value))
    per_slice: bool = _word(False, True)
    maximize: bool = _word(False, True)
    on_nonfinite: str = _word("skip", "raise", "ignore")
    rounding: str = _word("nearest", "stochastic", "kahan")
    seed: int = _declare(0, lambda name, value: _check_integer(name, value))

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Settings:
        """The settings of a parameter group, which may have been edited since the last step."""
        return cls(**{f.name: group[f.name] for f in fields(cls) if f.name in group})

    @cached_property
    def without_rates(self) -> tuple[Any, ...]:
        """Every setting except those that a schedule may change; while these are equal, a prepared step stays valid."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in RATES)

    def rates(self, t: Scalar) -> Rates:
        """Return the rates of step t (Algorithm 6)."""
        beta2, w2 = eq.second_moment_decay(t, self.beta2, self.decay_rate, self.beta2_max)
        w1 = eq.corrected_decay(t, self.beta1)[1] if self.momentum_of == "gradient" else 1 - self.beta1
        lr = self._lr(t)
        rho = eq.relative_step(t, lr, self.lr_decay)
        decay = self.weight_decay * (lr if self.weight_decay_by == "lr" else rho) if self.weight_decay else 0.0
        return Rates(beta2, w1, w2, rho, decay)

    def _lr(self, t: Scalar) -> Scalar:
        """The learning rate where t is: a tensor lr is read on the host only for a parameter that lives there."""
        if not isinstance(self.lr, Tensor):
            return self.lr
        return self.lr.to(t.device, t.dtype).reshape(()) if isinstance(t, Tensor) else float(self.lr)

    def __post_init__(self) -> None:
        """Name the argument, its value and what is allowed, for the first one that is wrong.

        Numbers become Python's own, so that a NumPy float32 in a group does not make the equations float32.
        """
        for f in fields(self):
            object.__setattr__(self, f.name, f.metadata["check"](f.name, getattr(self, f.name)))
        if self.beta2 is not None and self.beta2_max is not None:
            raise ValueError(
                f"beta2_max={self.beta2_max!r} bounds 1 - t^-decay_rate, so beta2={self.beta2!r} must be None"
            )


RATES = tuple(f.name for f in fields(Settings) if f.metadata["rate"])  # that a schedule may write to


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
    return {f.name: read_text(group[f.name]) for f in fields(Settings) if f.name in group}


def read_text(value: Any) -> Any:
    """Return the number, pair, True, False or None that a text says; anything else, also a word, as it is."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):  # also OmegaConf's, which Hydra hands over
        return (list if type(value) is list else tuple)(map(read_text, value))
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(value.lower(), value))
    except (ValueError, SyntaxError):  # a word
        return value


_values = itemgetter(*(f.name for f in fields(Settings)))
_CONSTANT = {float, str, bool, int, type(None), tuple}  # types of which no value changes


def _comparable(value: Any) -> Any:
    """A value that says, by ==, whether a keyword has been edited, also where its own == does not."""
    if type(value) in _CONSTANT:
        return value
    if isinstance(value, Tensor):  # one on a device is not read here: its value may change without notice
        return value.tolist() if value.is_cpu else id(value)
    return tuple(value) if isinstance(value, list) else value


def _learning_rate(value: Any) -> float | Tensor:
    """A number; a tensor of one element as torch's optimizers allow, read here if it is on the CPU."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.dtype.is_floating_point:
            raise ValueError(f"lr={value!r} must be a number or a floating-point tensor of one element")
        if not value.is_cpu:
            return value
        value = value.item()
    return _check_number("lr", value, at_least=0.0)


def _check_number(
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
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} {allowed}, not {type(value).__name__}")
    number = float(value)
    if not (math.isfinite(number) and at_least <= number and above < number < below):
        raise ValueError(f"{name}={value!r} {allowed}")
    return number


def _check_word(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    # `is` for True, False and None: 1 == True, but 1 is not what was meant
    if not any(value is word or (isinstance(word, str) and value == word) for word in allowed):
        words = ", ".join(repr(word) for word in allowed)
        raise ValueError(f"{name}={value!r} must be one of {words}")
    return value


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name}={value!r} must be a pair")
    return value[0], value[1]


def _check_eps(name: str, value: Any) -> tuple[float, float]:
    eps1, eps2 = _pair(name, value)
    return _check_number("eps[0]", eps1, at_least=SMALLEST_EPS1), _check_number("eps[1]", eps2, at_least=0.0)


def _check_axes(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    row, col = _pair(name, value)
    if not all(isinstance(axis, Integral) and not isinstance(axis, bool) for axis in (row, col)):
        raise TypeError(f"axes={value!r} must be None or a pair of integers")
    return int(row), int(col)


def _check_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
    number = int(value)
    if not 0 <= number < 2**64:
        raise ValueError(f"{name}={value!r} must be at least 0 and below 2**64")
    return number
