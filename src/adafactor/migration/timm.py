"""timm's Adafactor and AdafactorBigVision: small axes are not factored."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from adafactor.migration.state import Arguments, Axes, Shape, read_moments
from adafactor.migration.transformers import KEYS
from adafactor.migration.translate import DECAY_BY_ALPHA, HALF_MOMENTUM, Peer, Translation, clip, number, two_largest

CAUTION_SIZE = "20 steps end 24 % of the distance travelled apart"
AFTER_MOMENTUM = (
    "timm's AdafactorBigVision multiplies by lr after the momentum, ours before it: the same while lr is {lr:g}; a "
    "change of lr reaches our steps about 1/(1 − momentum) steps later (20 steps after lr is halved end 54 % of the "
    "distance travelled apart)"
)
CORRECTED_DECAY = (
    "{peer}'s corrected_weight_decay multiplies the decay by lr over the largest lr, ours does not: the same at the "
    "largest lr"
)


def _express(translation: Translation, args: Arguments, step: int | None) -> None:
    """Without lr it takes relative steps, and only then does it scale by the parameter."""
    relative_step = args["relative_step"] if step is not None and "relative_step" in args else not args["lr"]
    if args["warmup_init"] and not relative_step:
        raise ValueError(f"{translation.peer} takes warmup_init=True only without lr")
    translation.set_step_size({**args, "relative_step": relative_step}, step)
    relative = bool(relative_step and args["scale_parameter"])
    beta1 = args["beta1"] if "beta1" in args else (args["betas"] or (None,))[0]
    if relative and args["weight_decay"]:
        translation.note(DECAY_BY_ALPHA)
    if args["caution"] and beta1 is not None:
        translation.leave_out(f"{translation.peer}'s caution", CAUTION_SIZE)
    translation.keywords |= {
        "relative": relative,
        "decay_rate": -args["decay_rate"],
        "beta1": beta1 or 0.0,
        "eps": (args["eps"], args["eps_scale"]),
        "clip": clip(args["clip_threshold"]),
        "weight_decay": args["weight_decay"],
    }


def _factored(args: Arguments, shape: Shape, name: str) -> Axes | None:
    """The first two axes of a convolution, else the last two, if both are larger than the bound."""
    least = args["min_dim_size_to_factor"]
    if len(shape) > 2 and min(shape[:2]) > least:
        return 0, 1
    return (len(shape) - 2, len(shape) - 1) if len(shape) >= 2 and min(shape[-2:]) > least else None


def _locate(args: Arguments, row: Tensor, col: Tensor, name: str) -> tuple[Shape, Axes, Tensor, Tensor]:
    """Which two axes are factored follows from the shapes, since the rule picks one for each shape."""
    if row.dim() < 1 or col.dim() < 1:
        raise ValueError(f"the row and column statistics of {name} are {tuple(row.shape)} and {tuple(col.shape)}")
    shape = (row.shape[0], col.shape[0], *row.shape[1:])
    if _factored(args, shape, name) != (0, 1) or row.shape[1:] != col.shape[1:]:
        shape = (*row.shape, col.shape[-1])
    axes = _factored(args, shape, name)
    if axes is None:
        raise ValueError(
            f"{name} has row and column statistics for the shape {shape}, which min_dim_size_to_factor="
            f"{args['min_dim_size_to_factor']} keeps whole"
        )
    return shape, axes, row, col


def _express_bv(translation: Translation, args: Arguments, step: int | None) -> None:
    """Big Vision's steps are absolute, and lr is outside the momentum."""
    lr, dtype = float(number(args["lr"])), args["momentum_dtype"]
    translation.keywords |= {
        "lr": lr,
        "lr_decay": None,
        "relative": False,
        "beta1": args["momentum"] or 0.0,
        "eps": (1e-30 if args["eps"] is None else args["eps"], 1e-3),
        "clip": clip(args["clipping_threshold"]),
        "weight_decay": args["weight_decay"],
    }
    if args["momentum"]:
        translation.momentum_scale = lr
        translation.note(AFTER_MOMENTUM, lr=lr)
        if dtype not in (torch.float32, "float32"):
            translation.note(HALF_MOMENTUM, dtype=str(dtype).removeprefix("torch."))
        if args["caution"]:
            translation.leave_out(f"{translation.peer}'s caution", CAUTION_SIZE)
    translation.set_capped_beta2(args["decay_rate"], args["beta2_cap"], step)
    if args["weight_decay"] and args["corrected_weight_decay"]:
        translation.note(CORRECTED_DECAY)
    if args["unscaled_wd"]:
        translation.set_raw_decay(args["weight_decay"])


def _locate_bv(args: Arguments, row: Tensor, col: Tensor, name: str) -> tuple[Shape, Axes, Tensor, Tensor]:
    """Both have an axis of length 1 where they were averaged."""
    shape = tuple(max(n, m) for n, m in zip(row.shape, col.shape, strict=False))
    axes = two_largest(args, shape, name)
    if axes is None:
        raise ValueError(f"{name} has row and column statistics for the shape {shape}, which should be kept whole")
    return shape, axes, _squeeze(row, axes[1], name), _squeeze(col, axes[0], name)


def _squeeze(mean: Tensor, axis: int, name: str) -> Tensor:
    if mean.dim() <= axis or mean.shape[axis] != 1:
        raise ValueError(f"the statistics of {name} have the shape {tuple(mean.shape)}, whose axis {axis} should be 1")
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
    _express,
    partial(read_moments, keys=KEYS, locate=_locate),
    _factored,
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
    _express_bv,
    partial(read_moments, keys=("exp_avg_sq", "exp_avg_sq_r", "exp_avg_sq_c"), locate=_locate_bv),
    two_largest,
)
