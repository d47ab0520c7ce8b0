"""timm's Adafactor and AdafactorBigVision: small axes are not factored."""

from __future__ import annotations

import torch

from adafactor.migration.argument import Argument, clipping, momentum, negative, same
from adafactor.migration.peer import ROUNDED_UPDATE, Group, Peer, two_largest
from adafactor.migration.state import Arguments, Axes, Format, Shape

CAUTION_SIZE = "20 steps end 24 % of the distance travelled apart"
FIRST_LR = (
    "state dicts of {peer} do not hold the lr that it was made with, by which corrected_weight_decay divides: taken as "
    "{lr:g}, pass another in arguments"
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
    args = group.args
    group.keywords["eps"] = (1e-30 if args["eps"] is None else args["eps"], 1e-3)
    group.keywords["beta2_max"] = args["beta2_cap"] if args["beta2_cap"] < 1 else None
    group.set_momentum_dtype(args["momentum_dtype"], ROUNDED_UPDATE)
    if args["momentum"] and args["caution"]:
        group.leave_out("caution", CAUTION_SIZE)
    if args["weight_decay"] and args["corrected_weight_decay"]:
        _set_corrected_decay(group)
    elif args["unscaled_wd"]:
        group.keywords["weight_decay_by"] = "constant"


def _set_corrected_decay(group: Group) -> None:
    """Translate λ·lr²/lr₀, and λ·lr/lr₀ of `unscaled_wd`; lr₀ is that of the optimizer, whatever its groups have."""
    first = group.given.get("lr", group.extras.get("initial_lr", group.args["lr"]))
    if group.saved is not None and "lr" not in group.given:
        group.note(FIRST_LR, lr=first)
    if group.args["unscaled_wd"]:
        group.keywords["weight_decay"] /= first
    else:
        group.keywords["weight_decay_by"] = first


TIMM = Peer(
    "timm's Adafactor",
    {
        **same(weight_decay=0.0),
        "clip_threshold": clipping(1.0),
        "decay_rate": negative(-0.8),
        "min_dim_size_to_factor": Argument(16, "min_factored", lambda largest: largest + 1),
    },
    {
        **{"lr": None, "scale_parameter": True, "warmup_init": False},
        **{"eps": 1e-30, "eps_scale": 1e-3, "betas": None, "caution": False},
    },
    _express,
    fixed={"weight_decay_by": "alpha"},
    rule=_factored,
    varies=True,
    signs=frozenset({"eps_scale", "scale_parameter"}),
)
TIMM_BV = Peer(
    "timm's AdafactorBigVision",
    {
        **same(lr=1.0, weight_decay=0.0, decay_rate=0.8),
        "momentum": momentum(0.9),
        "clipping_threshold": clipping(None),
        "min_dim_size_to_factor": Argument(16, "min_factored"),
    },
    {
        **{"beta2_cap": 0.999, "momentum_dtype": torch.bfloat16, "eps": None},
        **{"unscaled_wd": False, "corrected_weight_decay": False, "caution": False},
    },
    _express_bv,
    ignored=("foreach", "decay_offset"),  # the second is accepted, not used
    fixed={"lr_decay": None, "relative": False, "momentum_of": "direction"},
    format=Format("exp_avg_sq", "exp_avg_sq_r", "exp_avg_sq_c", "exp_avg", keeps_axes=True),
    rule=two_largest,
    signs=frozenset({"beta2_cap", "clipping_threshold"}),
)
