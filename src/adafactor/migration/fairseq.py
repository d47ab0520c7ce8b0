"""fairseq's Adafactor, transformers' copy of it, and pytorch_optimizer's AdaFactor as releases from 4.0 on read it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from adafactor.core.settings import Settings
from adafactor.migration.peer import ROUNDED_UPDATE, Group, Keywords, Peer, finite
from adafactor.migration.state import Arguments, Format
from adafactor.schedules import with_warmup

WARMUP = (
    "warmup_init is a schedule here: without `scheduler = adafactor.schedules.warmup(optimizer{last})`{after} and its "
    "`step()` after each step of the optimizer, the step size stays {lr:.3g}"
)
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
UNSAVED = "state dicts of {peer} do not hold {names}: taken as its defaults, pass others in arguments"


def express_common(group: Group, relative_step: bool) -> Keywords:
    """Translate what fairseq and its descendants have in common: the step size, clipping, c and weight decay."""
    args, group.keeps_lr = group.args, not relative_step
    keywords = {
        "lr": args["lr"],
        "lr_decay": None,
        "clip": finite(args["clip_threshold"]),
        "decay_rate": -args["decay_rate"],
        "weight_decay": args["weight_decay"],
    }
    if relative_step and args["warmup_init"]:
        lr = with_warmup(1 if group.step is None else group.step + 1)
        last, after = "", ""
        if group.step is not None:
            last, after = f", last_epoch={group.step - 1}", " after `load_state_dict`"
        group.note(WARMUP, last=last, after=after, lr=lr)
        return {**keywords, "lr": lr, "initial_lr": 1.0}
    if relative_step:
        return {**keywords, "lr": 1e-2, "lr_decay": "rsqrt"}
    if args["lr"] is None:
        raise ValueError(f"{group.peer.name}: lr=None with relative_step=False is no step size")
    return keywords


def _express(group: Group) -> Keywords:
    args = group.args
    if group.step is None and args["lr"] is not None and args["relative_step"]:
        raise ValueError(f"{group.peer.name} takes lr={args['lr']!r} only with relative_step=False")
    return {
        **express_common(group, args["relative_step"]),
        "eps": tuple(args["eps"]),
        "beta1": args["beta1"] or 0.0,
        "relative": args["scale_parameter"],
    }


def _back(s: Settings) -> tuple[Arguments, list[str]]:
    if s.lr_decay == "rsqrt" and s.lr != 1e-2:
        raise ValueError(
            f"transformers' Adafactor has min(0.01, 1/√t) and nothing like lr={s.lr!r} with lr_decay='rsqrt'"
        )
    args = {
        "lr": s.lr if s.lr_decay is None else None,
        "eps": s.eps,
        "clip_threshold": math.inf if s.clip is None else s.clip,
        "decay_rate": -s.decay_rate,
        "beta1": s.beta1 or None,
        "weight_decay": s.weight_decay,
        "scale_parameter": s.relative,
        "relative_step": s.lr_decay == "rsqrt",
    }
    return args, []


def _express_fairseq(group: Group) -> Keywords:
    """As transformers', but for an lr that the optimizer itself overwrites."""
    keywords, args = _express(group), group.args
    if args["scale_parameter"] and not args["relative_step"]:
        if group.step is not None and "lr" not in group.given:
            raise ValueError(
                f"lr={args['lr']!r} in the groups is not the one that fairseq was given but that of the last "
                "parameter's last step: pass the real one in arguments={'lr': …}"
            )
        group.note(COMPOUNDS)
    return keywords


def _express_pytorch_optimizer(group: Group) -> Keywords:
    args, (beta1, cap) = group.args, group.args["betas"]
    is_l2 = args["weight_decay"] and not args["weight_decouple"]
    group.leave_out("weight_decouple=False", is_l2, L2)
    keywords = {
        **express_common(group, args["relative_step"]),
        **group.momentum(beta1, args["momentum_dtype"], ROUNDED_UPDATE),
        "beta2_max": cap if cap < 1 else None,
        "eps": (1e-7 if args["momentum_dtype"] == torch.float16 else args["eps1"], args["eps2"]),
        "weight_decay": 0.0 if is_l2 else args["weight_decay"] or 0.0,
        "weight_decay_by": "constant" if args["fixed_decay"] else "alpha",
        "relative": args["scale_parameter"],
        "maximize": args["maximize"],
    }
    if group.step is not None:
        group.note(RELEASES)
    group.leave_out("ams_bound", args["ams_bound"], "20 steps end 114 % of the distance travelled apart")
    group.leave_out("cautious", args["cautious"], "20 steps end 22 % of the distance travelled apart")
    names = ("decay_rate", "clip_threshold", "momentum_dtype", "maximize")
    if missing := [name for name in names if name not in group.given]:
        group.note(UNSAVED, names=", ".join(missing))
    return keywords


TRANSFORMERS = Peer(
    "transformers' Adafactor",
    {
        **{"lr": None, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None},
        **{"weight_decay": 0.0, "scale_parameter": True, "relative_step": True, "warmup_init": False},
    },
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
        **{"lr": 1e-3, "betas": (0.9, 0.999), "decay_rate": -0.8, "weight_decay": 0.0, "weight_decouple": True},
        **{"fixed_decay": False, "clip_threshold": 1.0, "ams_bound": False, "scale_parameter": True},
        **{"relative_step": True, "warmup_init": False, "eps1": 1e-30, "eps2": 1e-3, "cautious": False},
        **{"momentum_dtype": torch.bfloat16, "maximize": False, "foreach": None},
    },
    _express_pytorch_optimizer,
    fixed={"axes": (-2, -1)},
    signs=frozenset({"ams_bound", "scale_parameter"}),
)
