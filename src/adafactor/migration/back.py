"""Ours back to torch.optim.Adafactor and to transformers' Adafactor, where these can go on with the same steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adafactor.core.factoring import find_factoring
from adafactor.core.settings import Settings
from adafactor.migration import arguments as common
from adafactor.migration.form import Named, Shape, StateDict, checked, count, match, statistics, tensor

TARGETS = ("torch", "transformers")
EPS1 = (
    "torch.optim.Adafactor has its ε₁ in other places; at the 1e-18 set here its float32 steps are ours to rounding "
    "while gradients have an RMS of 1e-8 or more"
)
DECAY = (
    "torch.optim.Adafactor decays weights by lr·weight_decay, ours by ρₜ·weight_decay with ρₜ = min(lr, 1/√t): the "
    "same up to step 1/lr²"
)


def convert(ours: Any, target: str, shapes: Named | None) -> tuple[StateDict, list[str]]:
    """The target's state dict, and what will differ."""
    saved, entries = checked(ours)
    known = match(saved, shapes)
    groups, state, notes = [], {}, []
    for group in saved:
        try:
            settings = Settings.of(group)
        except (KeyError, TypeError, ValueError) as wrong:
            raise ValueError(f"the state dict is not of this optimizer: {wrong}") from wrong
        keywords, more = (_torch if target == "torch" else _transformers)(settings)
        names = group.get("param_names") or [f"parameter {key}" for key in group["params"]]
        extras = {k: v for k, v in group.items() if k not in Settings.__dataclass_fields__}
        groups.append({**extras, **keywords})
        notes += more
        for key, name in zip(group["params"], names, strict=True):
            if entry := entries.get(key):
                row, col, whole = _factors(entry, settings, known.get(key), name)
                state[key] = (_torch_state if target == "torch" else _transformers_state)(entry, row, col, whole, name)
    return {"state": state, "param_groups": groups}, notes


def _common(s: Settings, peer: str) -> None:
    for keyword, value, fine in (
        ("factored", s.factored, ("outer",)),
        ("momentum_of", s.momentum_of, ("update",) if s.beta1 else ("update", "gradient")),
        ("beta2", s.beta2, (None,)),
    ):
        if value not in fine:
            raise ValueError(f"{peer} has nothing like {keyword}={value!r}")


def _torch(s: Settings) -> tuple[dict[str, Any], list[str]]:
    peer = "torch.optim.Adafactor"
    _common(s, peer)
    for keyword, value, fine in (
        ("relative", s.relative, True),
        ("lr_decay", s.lr_decay, "rsqrt"),
        ("beta1", s.beta1, 0),
    ):
        if value != fine:
            raise ValueError(f"{peer} has nothing like {keyword}={value!r}")
    if s.clip is not None and s.clip < 1:
        raise ValueError(f"{peer} takes no clip={s.clip!r} below 1")
    keywords = {
        "lr": s.lr,
        "beta2_decay": -s.decay_rate,
        "eps": (1e-18, s.eps[1]),  # its square is still a normal float32, so that a row of zeros gives no NaN
        "d": float("inf") if s.clip is None else s.clip,
        "weight_decay": s.weight_decay,
        "foreach": None,
        "maximize": s.maximize,
    }
    return keywords, [EPS1, *([DECAY] if s.weight_decay else [])]


def _transformers(s: Settings) -> tuple[dict[str, Any], list[str]]:
    peer = "transformers' Adafactor"
    _common(s, peer)
    if s.maximize:
        raise ValueError(f"{peer} has nothing like maximize=True")
    if s.lr_decay == "rsqrt" and s.lr != 1e-2:
        raise ValueError(f"{peer} has min(0.01, 1/√t) and nothing like lr={s.lr!r} with lr_decay='rsqrt'")
    keywords = {
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
    note = common.DECAY_BY_ALPHA.format(peer=peer)
    return keywords, [note] if s.relative and s.weight_decay else []


def _factors(
    entry: Mapping[str, Any], s: Settings, shape: Shape | None, where: str
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Means over the last axis and over the one before it; or, for fewer than two axes, the whole second moment."""
    found = statistics(entry, ("full", "row", "col"), where)
    if len(found) == 1:
        whole = found[0]
        if whole.dim() < 2:
            return None, None, whole
        if 1 not in whole.shape[-2:]:
            raise ValueError(f"{where} of shape {tuple(whole.shape)} has its second moment whole; it would be factored")
        return whole.mean(-1), whole.mean(-2), None
    row, col = found
    # rows first: the layout names the lower axis the row, unless `axes` says otherwise
    for full, axes in _candidates(row, col, s):
        if (shape is None or full == shape) and axes == (len(full) - 2, len(full) - 1):
            return row, col, None
        if (shape is None or full == shape) and axes == (len(full) - 1, len(full) - 2):
            return col, row, None
    raise ValueError(
        f"{where} has statistics of shapes {tuple(row.shape)} and {tuple(col.shape)}, which are not those of "
        f"{'its shape ' + str(shape) if shape else 'a tensor'} factored over the last two axes"
    )


def _candidates(row: Tensor, col: Tensor, s: Settings) -> list[tuple[Shape, tuple[int, int]]]:
    """Every shape and pair of (row, column) axes that would have these statistics."""
    result = []
    for row_axis, col_axis in itertools.permutations(range(row.dim() + 1), 2):
        full = list(row.shape)  # the shape without the column axis
        full.insert(col_axis, col.shape[col_axis - (col_axis > row_axis)])
        without_row = full[:row_axis] + full[row_axis + 1 :]
        shapes = find_factoring(tuple(full), "outer", _valid(s, len(full)))
        if without_row == list(col.shape) and (shapes.row_axis, shapes.col_axis) == (row_axis, col_axis):
            result.append((tuple(full), (row_axis, col_axis)))
    return result


def _valid(s: Settings, dim: int) -> tuple[int, int] | None:
    return None if s.axes is None or any(not -dim <= axis < dim for axis in s.axes) else s.axes


def _torch_state(
    entry: Mapping[str, Any], row: Tensor | None, col: Tensor | None, whole: Tensor | None, where: str
) -> dict[str, Any]:
    state: dict[str, Any] = {"step": torch.tensor(float(count(entry, "step", where)))}
    if row is None or col is None:
        return {**state, "variance": _copy(whole)}
    return {**state, "row_var": _copy(row.unsqueeze(-1)), "col_var": _copy(col.unsqueeze(-2))}


def _transformers_state(
    entry: Mapping[str, Any], row: Tensor | None, col: Tensor | None, whole: Tensor | None, where: str
) -> dict[str, Any]:
    state: dict[str, Any] = {"step": count(entry, "step", where), "RMS": 0.0}
    if "momentum" in entry:
        state["exp_avg"] = _copy(tensor(entry, "momentum", where))
    if row is None or col is None:
        return {**state, "exp_avg_sq": _copy(whole)}
    return {**state, "exp_avg_sq_row": _copy(row), "exp_avg_sq_col": _copy(col)}


def _copy(value: Tensor | None) -> Tensor:
    """Torch's loading does not copy, and the source may go on."""
    assert value is not None
    return value.clone(memory_format=torch.contiguous_format)
