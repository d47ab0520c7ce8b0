"""timm's Adafactor and AdafactorBigVision: small axes are not factored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adafactor.migration import arguments as common
from adafactor.migration.fairseq import KEYS
from adafactor.migration.form import (
    Arguments,
    Axes,
    Moments,
    Peer,
    Shape,
    Translation,
    count,
    factors,
    statistics,
    tensor,
)

CAUTION_SIZE = "20 steps end 24 % of the distance travelled apart"
AFTER_MOMENTUM = (
    "timm's AdafactorBigVision multiplies by lr after the momentum, ours before it: the same while lr is {lr:g}; a "
    "change of lr reaches our steps about 1/(1 − momentum) steps later (20 steps after lr is halved end 54 % of the "
    "distance travelled apart)"
)


def translate(theirs: Arguments, step: int | None) -> Translation:
    """Their keywords in ours; without lr it takes relative steps, and only then does it scale by the parameter."""
    peer, lr = "timm's Adafactor", theirs["lr"]
    relative_step = theirs["relative_step"] if step is not None and "relative_step" in theirs else not lr
    if theirs["warmup_init"] and not relative_step:
        raise ValueError(f"{peer} takes warmup_init=True only without lr")
    told = common.step_size({**theirs, "relative_step": relative_step}, step, peer)
    relative = bool(relative_step and theirs["scale_parameter"])
    beta1 = theirs["beta1"] if "beta1" in theirs else (theirs["betas"] or (None,))[0]
    if relative and theirs["weight_decay"]:
        told.notes.append(common.DECAY_BY_ALPHA.format(peer=peer))
    if theirs["caution"] and beta1 is not None:
        told.notes.append(common.NO_COUNTERPART.format(peer=peer, argument="caution", size=CAUTION_SIZE))
    told.keywords |= {
        "relative": relative,
        "decay_rate": -theirs["decay_rate"],
        "beta1": beta1 or 0.0,
        "eps": (theirs["eps"], theirs["eps_scale"]),
        "clip": common.clip(theirs["clip_threshold"]),
        "weight_decay": theirs["weight_decay"],
    }
    return told


def factored(theirs: Arguments, shape: Shape, name: str) -> Axes | None:
    """The first two axes of a convolution, else the last two, if both are larger than the bound."""
    least = theirs["min_dim_size_to_factor"]
    if len(shape) > 2 and min(shape[:2]) > least:
        return 0, 1
    return (len(shape) - 2, len(shape) - 1) if len(shape) >= 2 and min(shape[-2:]) > least else None


def read(theirs: Arguments, entry: Mapping[str, Any], shape: Shape | None, where: str) -> Moments:
    """As fairseq's; which two axes are factored follows from the shapes, since the rule picks one for each shape."""
    step = count(entry, "step", where)
    momentum = tensor(entry, "exp_avg", where) if "exp_avg" in entry else None
    found = statistics(entry, KEYS, where)
    if len(found) == 1:
        return Moments(tuple(found[0].shape), step, whole=found[0], momentum=momentum)
    row, col = found
    if row.dim() < 1 or col.dim() < 1:
        raise ValueError(f"the row and column statistics of {where} are {tuple(row.shape)} and {tuple(col.shape)}")
    outer = (row.shape[0], col.shape[0], *row.shape[1:])
    full = (
        outer
        if factored(theirs, outer, where) == (0, 1) and row.shape[1:] == col.shape[1:]
        else (*row.shape, col.shape[-1])
    )
    axes = factored(theirs, full, where)
    if axes is None:
        raise ValueError(
            f"{where} has row and column statistics for the shape {full}, which min_dim_size_to_factor="
            f"{theirs['min_dim_size_to_factor']} keeps whole"
        )
    return Moments(full, step, over=factors(full, axes, row, col, where), momentum=momentum)


def translate_bv(theirs: Arguments, step: int | None) -> Translation:
    """Big Vision's keywords in ours: absolute steps, and lr outside the momentum."""
    peer, lr = "timm's AdafactorBigVision", float(common.number(theirs["lr"]))
    told = Translation({"lr": lr, "lr_decay": None, "relative": False})
    beta1 = theirs["momentum"] or 0.0
    dtype = theirs["momentum_dtype"]
    if beta1:
        told.notes.append(AFTER_MOMENTUM.format(lr=lr))
        told.momentum_scale = lr
        if dtype not in (torch.float32, "float32"):
            name = str(dtype).removeprefix("torch.")
            told.notes.append(common.HALF_MOMENTUM.format(peer=peer, dtype=name))
        if theirs["caution"]:
            told.notes.append(common.NO_COUNTERPART.format(peer=peer, argument="caution", size=CAUTION_SIZE))
    told.keywords |= {
        "beta1": beta1,
        "eps": (1e-30 if theirs["eps"] is None else theirs["eps"], 1e-3),
        "clip": common.clip(theirs["clipping_threshold"]),
        **common.capped(theirs["decay_rate"], theirs["beta2_cap"], step, peer, told.notes),
        "weight_decay": _decay(theirs, lr, told.notes, peer),
    }
    return told


def _decay(theirs: Arguments, lr: float, notes: list[str], peer: str) -> float:
    decay: float = theirs["weight_decay"]
    if decay and theirs["corrected_weight_decay"]:
        notes.append(
            f"{peer}'s corrected_weight_decay multiplies the decay by lr over the largest lr, ours does not: the same "
            "at the largest lr"
        )
    return common.raw_decay(decay, lr, peer, notes) if theirs["unscaled_wd"] else decay


def factored_bv(theirs: Arguments, shape: Shape, name: str) -> Axes | None:
    """The two largest axes (of equals the later ones), if both reach the bound."""
    if len(shape) < 2:
        return None
    first, second = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
    return (first, second) if shape[first] >= theirs["min_dim_size_to_factor"] else None


def read_bv(theirs: Arguments, entry: Mapping[str, Any], shape: Shape | None, where: str) -> Moments:
    """`exp_avg_sq_r` and `exp_avg_sq_c` with an axis of length 1 where it was averaged, or `exp_avg_sq`."""
    step = count(entry, "step", where)
    momentum = tensor(entry, "exp_avg", where) if "exp_avg" in entry else None
    found = statistics(entry, ("exp_avg_sq", "exp_avg_sq_r", "exp_avg_sq_c"), where)
    if len(found) == 1:
        return Moments(tuple(found[0].shape), step, whole=found[0], momentum=momentum)
    full = tuple(max(n, m) for n, m in zip(found[0].shape, found[1].shape, strict=False))
    axes = factored_bv(theirs, full, where)
    if axes is None:
        raise ValueError(f"{where} has row and column statistics for the shape {full}, which should be kept whole")
    row, col = _squeezed(found[0], axes[1], where), _squeezed(found[1], axes[0], where)
    return Moments(full, step, over=factors(full, axes, row, col, where), momentum=momentum)


def _squeezed(mean: Tensor, axis: int, where: str) -> Tensor:
    if mean.dim() <= axis or mean.shape[axis] != 1:
        raise ValueError(f"the statistics of {where} have the shape {tuple(mean.shape)}, whose axis {axis} should be 1")
    return mean.squeeze(axis)


TIMM = Peer(
    "timm's Adafactor",
    {
        "lr": None,
        "eps": 1e-30,
        "eps_scale": 1e-3,
        "clip_threshold": 1.0,
        "decay_rate": -0.8,
        "betas": None,
        "weight_decay": 0.0,
        "scale_parameter": True,
        "warmup_init": False,
        "min_dim_size_to_factor": 16,
        "caution": False,
    },
    translate,
    read,
    factored,
    internal=frozenset({"beta1", "relative_step"}),
)
TIMM_BV = Peer(
    "timm's AdafactorBigVision",
    {
        "lr": 1.0,
        "min_dim_size_to_factor": 16,
        "decay_rate": 0.8,
        "decay_offset": 0,  # accepted, not used
        "beta2_cap": 0.999,
        "momentum": 0.9,
        "momentum_dtype": torch.bfloat16,
        "eps": None,
        "weight_decay": 0.0,
        "clipping_threshold": None,
        "unscaled_wd": False,
        "caution": False,
        "corrected_weight_decay": False,
        "foreach": False,
    },
    translate_bv,
    read_bv,
    factored_bv,
)
