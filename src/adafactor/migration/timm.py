"""timm's Adafactor and AdafactorBigVision: small axes are not factored."""

from __future__ import annotations

import torch

from adafactor.migration.argument import clipping, momentum, negative, same
from adafactor.migration.peer import DECAY_BY_ALPHA, HALF_MOMENTUM, Group, Peer, two_largest
from adafactor.migration.state import Arguments, Axes, Format, Shape

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


def _express(group: Group) -> None:
    """Without lr it takes relative steps, and only then does it scale by the parameter."""
    args = group.args
    relative_step = args["relative_step"] if "relative_step" in args else not args["lr"]
    if args["warmup_init"] and not relative_step:
        raise ValueError(f"{group.peer.name} takes warmup_init=True only without lr")
    group.set_step_size(relative_step)
    beta1 = args["beta1"] if "beta1" in args else (args["betas"] or (None,))[0]
    relative = bool(relative_step and args["scale_parameter"])
    group.keywords |= {"relative": relative, "beta1": beta1 or 0.0, "eps": (args["eps"], args["eps_scale"])}
    if relative and args["weight_decay"]:
        group.note(DECAY_BY_ALPHA)
    if args["caution"] and beta1 is not None:
        group.leave_out("caution", CAUTION_SIZE)


def _factored(args: Arguments, shape: Shape, name: str) -> Axes | None:
    """The first two axes of a convolution, else the last two, if both are larger than the bound."""
    least = args["min_dim_size_to_factor"]
    if len(shape) > 2 and min(shape[:2]) > least:
        return 0, 1
    return (len(shape) - 2, len(shape) - 1) if len(shape) >= 2 and min(shape[-2:]) > least else None


def _express_bv(group: Group) -> None:
    """Big Vision's steps are absolute, and lr is outside the momentum."""
    args, lr, dtype = group.args, group.args["lr"], group.args["momentum_dtype"]
    group.keywords["eps"] = (1e-30 if args["eps"] is None else args["eps"], 1e-3)
    group.keywords["beta2_max"] = args["beta2_cap"] if args["beta2_cap"] < 1 else None
    if args["momentum"]:
        group.momentum_scale = lr
        group.note(AFTER_MOMENTUM, lr=lr)
        if dtype not in (torch.float32, "float32"):
            group.note(HALF_MOMENTUM, dtype=str(dtype).removeprefix("torch."))
        if args["caution"]:
            group.leave_out("caution", CAUTION_SIZE)
    if args["weight_decay"] and args["corrected_weight_decay"]:
        group.note(CORRECTED_DECAY)
    if args["unscaled_wd"]:
        group.set_raw_decay(args["weight_decay"])


TIMM = Peer(
    "timm's Adafactor",
    {**same(weight_decay=0.0), "clip_threshold": clipping(1.0), "decay_rate": negative(-0.8)},
    {
        **{"lr": None, "scale_parameter": True, "warmup_init": False, "min_dim_size_to_factor": 16},
        **{"eps": 1e-30, "eps_scale": 1e-3, "betas": None, "caution": False},
    },
    _express,
    rule=_factored,
    treatment=None,
    signs=frozenset({"eps_scale", "scale_parameter"}),
)
TIMM_BV = Peer(
    "timm's AdafactorBigVision",
    {
        **same(lr=1.0, weight_decay=0.0, decay_rate=0.8),
        "momentum": momentum(0.9),
        "clipping_threshold": clipping(None),
    },
    {
        **{"min_dim_size_to_factor": 16, "beta2_cap": 0.999, "momentum_dtype": torch.bfloat16, "eps": None},
        **{"unscaled_wd": False, "corrected_weight_decay": False, "caution": False},
    },
    _express_bv,
    ignored=("foreach", "decay_offset"),  # the second is accepted, not used
    fixed={"lr_decay": None, "relative": False},
    format=Format("exp_avg_sq", "exp_avg_sq_r", "exp_avg_sq_c", "exp_avg", keeps_axes=True),
    rule=two_largest,
    treatment=None,
    signs=frozenset({"beta2_cap", "clipping_threshold"}),
)
