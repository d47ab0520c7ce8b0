"""Ours back to torch.optim.Adafactor and to transformers' Adafactor, where these can go on with the same steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from adafactor.core.settings import Settings
from adafactor.migration.state import (
    Axes,
    Entry,
    NamedShapes,
    Shape,
    StateDict,
    check_state_dict,
    factored_axes,
    match_shapes,
    read_statistics,
    read_step,
    read_tensor,
)
from adafactor.migration.translate import DECAY_BY_ALPHA, KEYWORDS

EPS1 = (
    "torch.optim.Adafactor has its ε₁ in other places; at the 1e-18 set here its float32 steps are ours to rounding "
    "while gradients have an RMS of 1e-8 or more"
)
DECAY = (
    "torch.optim.Adafactor decays weights by lr·weight_decay, ours by ρₜ·weight_decay with ρₜ = min(lr, 1/√t): the "
    "same up to step 1/lr²"
)
# no target has these, and its state is the same without them; of `axes`, the shapes of the statistics decide
NOT_IN_THE_STATE = frozenset({"axes", "on_nonfinite", "rounding", "seed"})
Factors = tuple[Tensor, Tensor] | Tensor  # means over the last axis and over the one before it; or V, unfactored


@dataclass(frozen=True)
class Target:
    """An optimizer that can take our state; every keyword that it does not express must have its default."""

    name: str
    expressed: frozenset[str]
    translate: Callable[[Settings], tuple[dict[str, Any], list[str]]]  # its arguments, and what will differ
    state: Callable[[Entry, Factors, str], dict[str, Any]]

    def check(self, settings: Settings) -> None:
        """Refuse keywords that would be lost."""
        unused = {"momentum_of"} if not settings.beta1 else set()
        values = {keyword: getattr(settings, keyword.name) for keyword in fields(settings)}
        lost = [
            f"{keyword.name}={value!r}"
            for keyword, value in values.items()
            if keyword.name not in self.expressed | NOT_IN_THE_STATE | unused and value != keyword.default
        ]
        if lost:
            raise ValueError(f"{self.name} has nothing like {', '.join(lost)}")


def convert(state_dict: Any, target: str, shapes: NamedShapes | None) -> tuple[StateDict, list[str]]:
    """Return the target's state dict, and what will differ."""
    our_groups, entries = check_state_dict(state_dict)
    shape_of, peer = match_shapes(our_groups, shapes), TARGETS[target]
    groups, state, notes = [], {}, []
    for group in our_groups:
        try:
            settings = Settings.of(group)
        except (KeyError, TypeError, ValueError) as wrong:
            raise ValueError(f"the state dict is not of this optimizer: {wrong}") from wrong
        peer.check(settings)
        args, differences = peer.translate(settings)
        groups.append({**{k: v for k, v in group.items() if k not in KEYWORDS}, **args})
        notes += differences
        names = group.get("param_names") or [f"parameter {key}" for key in group["params"]]
        for key, name in zip(group["params"], names, strict=True):
            if entry := entries.get(key):
                state[key] = peer.state(entry, _factors(entry, settings, shape_of.get(key), name), name)
    return {"state": state, "param_groups": groups}, notes


def _torch(s: Settings) -> tuple[dict[str, Any], list[str]]:
    if s.clip is not None and s.clip < 1:
        raise ValueError(f"torch.optim.Adafactor takes no clip={s.clip!r} below 1")
    args = {
        "lr": s.lr,
        "beta2_decay": -s.decay_rate,
        "eps": (1e-18, s.eps[1]),  # its square is still a normal float32, so that a row of zeros gives no NaN
        "d": float("inf") if s.clip is None else s.clip,
        "weight_decay": s.weight_decay,
        "foreach": None,
        "maximize": s.maximize,
    }
    return args, [EPS1, *([DECAY] if s.weight_decay else [])]


def _transformers(s: Settings) -> tuple[dict[str, Any], list[str]]:
    peer = "transformers' Adafactor"
    if s.lr_decay == "rsqrt" and s.lr != 1e-2:
        raise ValueError(f"{peer} has min(0.01, 1/√t) and nothing like lr={s.lr!r} with lr_decay='rsqrt'")
    args = {
        "lr": None if s.lr_decay == "rsqrt" else s.lr,
        "eps": s.eps,
        "clip_threshold": float("inf") if s.clip is None else s.clip,
        "decay_rate": -s.decay_rate,
        "beta1": s.beta1 or None,
        "weight_decay": s.weight_decay,
        "scale_parameter": s.relative,
        "relative_step": s.lr_decay == "rsqrt",
        "warmup_init": False,
    }
    return args, [DECAY_BY_ALPHA.format(peer=peer)] if s.relative and s.weight_decay else []


def _factors(entry: Entry, s: Settings, shape: Shape | None, name: str) -> Factors:
    statistics = read_statistics(entry, ("full", "row", "col"), name)
    if len(statistics) == 1:
        full = statistics[0]
        if full.dim() < 2:
            return full
        if 1 not in full.shape[-2:]:
            raise ValueError(f"{name} of shape {tuple(full.shape)} has its second moment whole; it would be factored")
        return full.mean(-1), full.mean(-2)
    row, col = statistics
    # rows first: the lower axis is the row, unless `axes` says otherwise
    for full_shape, axes in _candidates(row, col, s):
        last_two = (len(full_shape) - 2, len(full_shape) - 1)
        if shape in (None, full_shape) and axes == last_two:
            return row, col
        if shape in (None, full_shape) and axes == last_two[::-1]:
            return col, row
    raise ValueError(
        f"{name} has statistics of shapes {tuple(row.shape)} and {tuple(col.shape)}, which are not those of "
        f"{'its shape ' + str(shape) if shape else 'a tensor'} factored over the last two axes"
    )


def _candidates(row: Tensor, col: Tensor, s: Settings) -> list[tuple[Shape, Axes]]:
    """Return every shape and pair of (row, column) axes that would have these statistics."""
    candidates = []
    for axes in itertools.permutations(range(row.dim() + 1), 2):
        row_axis, col_axis = axes
        shape = list(row.shape)  # without the column axis
        shape.insert(col_axis, col.shape[col_axis - (col_axis > row_axis)])
        named = None if s.axes is None or any(not -len(shape) <= a < len(shape) for a in s.axes) else s.axes
        without_row = shape[:row_axis] + shape[row_axis + 1 :]
        if without_row == list(col.shape) and factored_axes(tuple(shape), "outer", named) == axes:
            candidates.append((tuple(shape), axes))
    return candidates


def _torch_state(entry: Entry, factors: Factors, name: str) -> dict[str, Any]:
    state: dict[str, Any] = {"step": torch.tensor(float(read_step({}, entry, name)))}
    if isinstance(factors, Tensor):
        return {**state, "variance": _copy(factors)}
    row, col = factors
    return {**state, "row_var": _copy(row.unsqueeze(-1)), "col_var": _copy(col.unsqueeze(-2))}


def _transformers_state(entry: Entry, factors: Factors, name: str) -> dict[str, Any]:
    state: dict[str, Any] = {"step": read_step({}, entry, name), "RMS": 0.0}
    if "momentum" in entry:
        state["exp_avg"] = _copy(read_tensor(entry, "momentum", name))
    if isinstance(factors, Tensor):
        return {**state, "exp_avg_sq": _copy(factors)}
    row, col = factors
    return {**state, "exp_avg_sq_row": _copy(row), "exp_avg_sq_col": _copy(col)}


def _copy(value: Tensor) -> Tensor:
    """Torch's loading does not copy, and the source may go on."""
    return value.clone(memory_format=torch.contiguous_format)


SHARED = frozenset({"lr", "decay_rate", "clip", "eps", "weight_decay"})
TARGETS = {
    "torch": Target("torch.optim.Adafactor", SHARED | {"maximize"}, _torch, _torch_state),
    "transformers": Target(
        "transformers' Adafactor", SHARED | {"lr_decay", "relative", "beta1"}, _transformers, _transformers_state
    ),
}
