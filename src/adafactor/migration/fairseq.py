"""fairseq's Adafactor, transformers' copy of it, and pytorch_optimizer's AdaFactor as releases from 4.0 on read it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from adafactor.core.settings import Settings
from adafactor.migration.argument import Argument, clipping, momentum, negative, same
from adafactor.migration.peer import ROUNDED_UPDATE, Group, Peer
from adafactor.migration.state import Format

COMPOUNDS = (
    "fairseq multiplies group['lr'] by max(ε₂, RMS(X)) anew with every parameter and every step when scale_parameter "
    "is on and relative_step off, so that its steps vanish (at RMS(X) = 0.05 within 20 steps, to 0 % of ours); ours "
    "takes lr·max(ε₂, RMS(X))"
)
RELEASES = (
    "the state is taken to be of pytorch_optimizer 4.0 or later: 3.10 scaled small updates up to RMS 1 instead of "
    "clipping large ones (20 steps end 10 % of the distance travelled apart), and releases up to 3.9 read "
    "scale_parameter the other way round"
)
L2 = "20 steps with weight_decay=0.01 and gradients of RMS 1 end 9 % of the distance travelled apart, of RMS 0.01 81 %"


def _express(group: Group) -> None:
    args = group.args
    if group.step is None and args["lr"] is not None and args["relative_step"]:
        raise ValueError(f"{group.peer.name} takes lr={args['lr']!r} only with relative_step=False")
    group.set_step_size(args["relative_step"])


def _back(s: Settings, args: dict[str, Any]) -> list[str]:
    if s.lr_decay == "rsqrt":
        if s.lr != 1e-2:
            raise ValueError(
                f"transformers' Adafactor has min(0.01, 1/√t) and nothing like lr={s.lr!r} with lr_decay='rsqrt'"
            )
        args["lr"] = None
    return []


def _express_fairseq(group: Group) -> None:
    """As transformers', but for an lr that the optimizer itself overwrites."""
    _express(group)
    args = group.args
    if args["scale_parameter"] and not args["relative_step"]:
        if group.step is not None and "lr" not in group.given:
            raise ValueError(
                f"lr={args['lr']!r} in the groups is not the one that fairseq was given but that of the last "
                "parameter's last step: pass the real one in arguments={'lr': …}"
            )
        group.note(COMPOUNDS)


def _express_pytorch_optimizer(group: Group) -> None:
    args, (beta1, cap) = group.args, group.args["betas"]
    group.set_step_size(args["relative_step"])
    group.keywords |= {
        "beta1": beta1 or 0.0,
        "eps": (1e-7 if args["momentum_dtype"] == torch.float16 else args["eps1"], args["eps2"]),
        "weight_decay": args["weight_decay"] or 0.0,
        "weight_decay_by": "constant" if args["fixed_decay"] else "alpha",
        "beta2_max": cap if cap < 1 else None,
    }
    if args["weight_decay"] and not args["weight_decouple"]:
        group.leave_out("weight_decouple=False", L2)
        group.keywords["weight_decay"] = 0.0
    group.set_momentum_dtype(args["momentum_dtype"], ROUNDED_UPDATE)
    if group.step is not None:
        group.note(RELEASES)


TRANSFORMERS = Peer(
    "transformers' Adafactor",
    {
        **same(lr=None, weight_decay=0.0),
        "eps": Argument((1e-30, 1e-3), "eps", tuple),
        "clip_threshold": clipping(1.0),
        "decay_rate": negative(-0.8),
        "beta1": momentum(None),
        "scale_parameter": Argument(True, "relative"),
        "relative_step": Argument(True, "lr_decay", {True: "rsqrt"}.get, {"rsqrt": True, None: False}.get),
    },
    {"warmup_init": False},
    _express,
    fixed={"axes": (-2, -1), "weight_decay_by": "alpha"},
    format=Format(
        "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg", count=lambda step: {"step": step, "RMS": 0.0}
    ),
    signs=frozenset({"clip_threshold", "scale_parameter", "beta1"}),
    back=_back,
)
FAIRSEQ = replace(TRANSFORMERS, name="fairseq's Adafactor", express=_express_fairseq, signs=frozenset(), back=None)
PYTORCH_OPTIMIZER = Peer(
    "pytorch_optimizer's AdaFactor",
    {
        **same(maximize=False),
        "decay_rate": negative(-0.8),
        "clip_threshold": clipping(1.0),
        "scale_parameter": Argument(True, "relative"),
    },
    {
        **{"lr": 1e-3, "relative_step": True, "warmup_init": False},
        **{"weight_decay": 0.0, "weight_decouple": True, "fixed_decay": False},
        **{"betas": (0.9, 0.999), "momentum_dtype": torch.bfloat16, "eps1": 1e-30, "eps2": 1e-3},
    },
    _express_pytorch_optimizer,
    left_out={
        "ams_bound": "20 steps end 114 % of the distance travelled apart",
        "cautious": "20 steps end 22 % of the distance travelled apart",
    },
    ignored=("foreach",),
    fixed={"axes": (-2, -1)},
    signs=frozenset({"ams_bound", "scale_parameter"}),
    unsaved=("decay_rate", "clip_threshold", "momentum_dtype", "maximize"),
)
