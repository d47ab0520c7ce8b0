"""timm's Adafactor and AdafactorBigVision: small axes are not factored."""

from __future__ import annotations

import torch

from adafactor.migration.fairseq import express_common
from adafactor.migration.peer import ROUNDED_UPDATE, Group, Keywords, Peer, finite, two_largest
from adafactor.migration.state import Arguments, Axes, Format, Shape

CAUTION_SIZE = "20 steps end 24 % of the distance travelled apart"
FIRST_LR = (
    "state dicts of {peer} do not hold the lr that it was made with, by which corrected_weight_decay divides: taken as "
    "{lr:g}, pass another in arguments"
)


def _express(group: Group) -> Keywords:
    """Without lr it takes relative steps, and only then does it scale by the parameter."""
    args = group.args
    relative_step = args["relative_step"] if "relative_step" in args else not args["lr"]
    if args["warmup_init"] and not relative_step:
        raise ValueError(f"{group.peer.name} takes warmup_init=True only without lr")
    beta1 = args["beta1"] if "beta1" in args else (args["betas"] or (None,))[0]
    keywords = {
        **express_common(group, relative_step),
        "eps": (args["eps"], args["eps_scale"]),
        "beta1": beta1 or 0.0,
        "relative": bool(relative_step and args["scale_parameter"]),
        "min_factored": args["min_dim_size_to_factor"] + 1,
    }
    group.leave_out("caution", args["caution"] and beta1 is not None, CAUTION_SIZE)
    return keywords


def _factored(args: Arguments, shape: Shape, name: str) -> Axes | None:
    """The first two axes of a convolution, else the last two, if both are larger than the bound."""
    least = args["min_dim_size_to_factor"]
    if len(shape) > 2 and min(shape[:2]) > least:
        return 0, 1
    return (len(shape) - 2, len(shape) - 1) if len(shape) >= 2 and min(shape[-2:]) > least else None


def _express_bv(group: Group) -> Keywords:
    """Big Vision's steps are absolute, and lr is outside the momentum."""
    args = group.args
    keywords = {
        **group.momentum(args["momentum"], args["momentum_dtype"], ROUNDED_UPDATE),
        "lr": args["lr"],
        "beta2_max": args["beta2_cap"] if args["beta2_cap"] < 1 else None,
        "clip": finite(args["clipping_threshold"]),
        "decay_rate": args["decay_rate"],
        "eps": (1e-30 if args["eps"] is None else args["eps"], 1e-3),
        "weight_decay": args["weight_decay"],
        "weight_decay_by": "constant" if args["unscaled_wd"] else "rho",
        "min_factored": args["min_dim_size_to_factor"],
    }
    group.leave_out("caution", args["momentum"] and args["caution"], CAUTION_SIZE)
    if args["weight_decay"] and args["corrected_weight_decay"]:
        keywords |= _corrected_decay(group)
    return keywords


def _corrected_decay(group: Group) -> Keywords:
    """Translate λ·lr²/lr₀, and λ·lr/lr₀ of `unscaled_wd`; lr₀ is that of the optimizer, whatever its groups have."""
    first = group.given.get("lr", group.extras.get("initial_lr", group.args["lr"]))
    if group.saved is not None and "lr" not in group.given:
        group.note(FIRST_LR, lr=first)
    if group.args["unscaled_wd"]:
        return {"weight_decay": group.args["weight_decay"] / first, "weight_decay_by": "rho"}
    return {"weight_decay_by": first}


TIMM = Peer(
    "timm's Adafactor",
    {
        **{"lr": None, "eps": 1e-30, "eps_scale": 1e-3, "clip_threshold": 1.0, "decay_rate": -0.8, "betas": None},
        **{"weight_decay": 0.0, "scale_parameter": True, "warmup_init": False, "min_dim_size_to_factor": 16},
        "caution": False,
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
        **{"lr": 1.0, "min_dim_size_to_factor": 16, "decay_rate": 0.8, "beta2_cap": 0.999, "momentum": 0.9},
        **{"momentum_dtype": torch.bfloat16, "eps": None, "weight_decay": 0.0, "clipping_threshold": None},
        **{"unscaled_wd": False, "corrected_weight_decay": False, "caution": False},
        **{"foreach": None, "decay_offset": None},  # the second is accepted, not used
    },
    _express_bv,
    fixed={"lr_decay": None, "relative": False, "momentum_of": "direction"},
    format=Format("exp_avg_sq", "exp_avg_sq_r", "exp_avg_sq_c", "exp_avg", keeps_axes=True),
    rule=two_largest,
    signs=frozenset({"beta2_cap", "clipping_threshold"}),
)
