"""fairseq's Adafactor and its descendants: transformers', timm's two, and pytorch_optimizer's from release 4.0 on."""

from __future__ import annotations

from dataclasses import replace

import torch

from adafactor.core.settings import Settings
from adafactor.migration.peer import Argument, Group, Keywords, Peer, bound, negated, other, plain, same, two_largest
from adafactor.migration.state import Arguments, Axes, Format, Shape
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
COMMON = {
    **same(lr=None, weight_decay=0.0),
    "clip_threshold": bound(1.0, "clip"),
    "decay_rate": negated(-0.8, "decay_rate"),
    "scale_parameter": Argument(True, "relative"),
    **other(warmup_init=False),
}


def _step_size(group: Group, relative_step: bool) -> Keywords:
    """Translate lr, or the min(0.01, 1/√t) and min(10⁻⁶·t, 1/√t) that relative steps have instead."""
    if not relative_step:
        if group.args["lr"] is None:
            raise ValueError(f"{group.peer.name}: lr=None with relative_step=False is no step size")
        return {"lr_decay": None}
    group.extras.pop("initial_lr", None)  # a scheduler's, which is no bound of ours
    if not group.args["warmup_init"]:
        return {"lr": 1e-2, "lr_decay": "rsqrt"}
    t = group.steps
    lr = with_warmup(t + 1)
    last, after = (f", last_epoch={t - 1}", " after `load_state_dict`") if group.saved is not None else ("", "")
    group.note(WARMUP, last=last, after=after, lr=lr)
    group.extras["initial_lr"] = 1.0
    return {"lr": lr, "lr_decay": None}


def _adjust_transformers(group: Group) -> Keywords:
    args = group.args
    if group.saved is None and args["lr"] is not None and args["relative_step"]:
        raise ValueError(f"{group.peer.name} takes lr={args['lr']!r} only with relative_step=False")
    return _step_size(group, args["relative_step"])


def _transformers_back(s: Settings) -> tuple[Arguments, list[str]]:
    relative_step = s.lr_decay == "rsqrt"
    if relative_step and s.lr != 1e-2:
        raise ValueError(
            f"transformers' Adafactor has min(0.01, 1/√t) and nothing like lr={s.lr!r} with lr_decay='rsqrt'"
        )
    return {"lr": None if relative_step else s.lr, "relative_step": relative_step}, []


def _adjust_fairseq(group: Group) -> Keywords:
    """As transformers', but for an lr that the optimizer itself overwrites."""
    keywords, args = _adjust_transformers(group), group.args
    if args["scale_parameter"] and not args["relative_step"]:
        if group.saved is not None and "lr" not in group.given:
            raise ValueError(
                f"lr={args['lr']!r} in the groups is not the one that fairseq was given but that of the last "
                "parameter's last step: pass the real one in arguments={'lr': …}"
            )
        group.note(COMPOUNDS)
    return keywords


TRANSFORMERS = Peer(
    "transformers' Adafactor",
    {
        **COMMON,
        **same(eps=(1e-30, 1e-3)),
        **other(relative_step=True),
        "beta1": Argument(None, "beta1", lambda beta1: beta1 or 0.0, lambda beta1: beta1 or None),
    },
    fixed={"axes": (-2, -1), "weight_decay_by": "alpha"},
    adjust=_adjust_transformers,
    format=Format(
        "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg", count=lambda step: {"step": step, "RMS": 0.0}
    ),
    signs=frozenset({"clip_threshold", "scale_parameter", "beta1"}),
    back=_transformers_back,
)
FAIRSEQ = replace(TRANSFORMERS, name="fairseq's Adafactor", adjust=_adjust_fairseq, signs=frozenset(), back=None)

ROUNDED_UPDATE = (
    "{peer} rounds updates to half precision before it averages them, and steps with the rounded average; ours "
    "averages in float32 and rounds what it keeps: 20 steps end 0.8 % of the distance travelled apart (0.07 % in "
    "float16)"
)
RELEASES = (
    "the state is taken to be of pytorch_optimizer 4.0 or later: 3.10 scaled small updates up to RMS 1 instead of "
    "clipping large ones (20 steps end 10 % of the distance travelled apart), and releases up to 3.9 read "
    "scale_parameter the other way round"
)
UNSAVED = "state dicts of {peer} do not hold {names}: taken as its defaults, pass others in arguments"
L2 = "20 steps with weight_decay=0.01 and gradients of RMS 1 end 9 % of the distance travelled apart, of RMS 0.01 81 %"


def _adjust_pytorch_optimizer(group: Group) -> Keywords:
    args, (beta1, cap) = group.args, group.args["betas"]
    keywords = {
        **_step_size(group, args["relative_step"]),
        **group.momentum(beta1, args["momentum_dtype"], ROUNDED_UPDATE),
        "beta2_max": cap if cap < 1 else None,
        "eps": (1e-7 if args["momentum_dtype"] == torch.float16 else args["eps1"], args["eps2"]),
    }
    is_l2 = args["weight_decay"] and not args["weight_decouple"]
    group.leave_out("weight_decouple=False", is_l2, L2)
    if is_l2:
        keywords["weight_decay"] = 0.0
    if group.saved is not None:
        group.note(RELEASES)
    group.leave_out("ams_bound", args["ams_bound"], "20 steps end 114 % of the distance travelled apart")
    group.leave_out("cautious", args["cautious"], "20 steps end 22 % of the distance travelled apart")
    names = ("decay_rate", "clip_threshold", "momentum_dtype", "maximize")
    if missing := [name for name in names if name not in group.given]:
        group.note(UNSAVED, names=", ".join(missing))
    return keywords


PYTORCH_OPTIMIZER = Peer(
    "pytorch_optimizer's AdaFactor",
    {
        **COMMON,
        **same(lr=1e-3, maximize=False),
        "weight_decay": Argument(0.0, "weight_decay", lambda decay: decay or 0.0),
        "fixed_decay": Argument(False, "weight_decay_by", lambda fixed: "constant" if fixed else "alpha"),
        **other(betas=(0.9, 0.999), momentum_dtype=torch.bfloat16, eps1=1e-30, eps2=1e-3, relative_step=True),
        **other(weight_decouple=True, ams_bound=False, cautious=False, foreach=None),
    },
    fixed={"axes": (-2, -1)},
    adjust=_adjust_pytorch_optimizer,
    signs=frozenset({"ams_bound", "scale_parameter"}),
)

CAUTION = "20 steps end 24 % of the distance travelled apart"
FIRST_LR = (
    "state dicts of {peer} do not hold the lr that it was made with, by which corrected_weight_decay divides: taken as "
    "{lr:g}, pass another in arguments"
)


def _adjust_timm(group: Group) -> Keywords:
    """Without lr it takes relative steps, and only then does it scale by the parameter."""
    args = group.args
    relative_step = args.get("relative_step", not args["lr"])
    if args["warmup_init"] and not relative_step:
        raise ValueError(f"{group.peer.name} takes warmup_init=True only without lr")
    beta1 = args["beta1"] if "beta1" in args else (args["betas"] or (None,))[0]
    group.leave_out("caution", args["caution"] and beta1 is not None, CAUTION)
    return {
        **_step_size(group, relative_step),
        "eps": (args["eps"], args["eps_scale"]),
        "beta1": beta1 or 0.0,
        "relative": bool(relative_step and args["scale_parameter"]),
    }


def _timm_axes(args: Arguments, name: str, shape: Shape) -> Axes | None:
    """The first two axes of a convolution, else the last two, if both are larger than the bound."""
    least = args["min_dim_size_to_factor"]
    if len(shape) > 2 and min(shape[:2]) > least:
        return 0, 1
    return (len(shape) - 2, len(shape) - 1) if len(shape) >= 2 and min(shape[-2:]) > least else None


TIMM = Peer(
    "timm's Adafactor",
    {
        **COMMON,
        "min_dim_size_to_factor": Argument(16, "min_factored", lambda least: least + 1),
        **other(eps=1e-30, eps_scale=1e-3, betas=None, caution=False),
    },
    fixed={"weight_decay_by": "alpha"},
    adjust=_adjust_timm,
    rule=_timm_axes,
    varies=True,
    signs=frozenset({"eps_scale", "scale_parameter"}),
)


def _adjust_timm_bv(group: Group) -> Keywords:
    """Take the momentum, and the decay λ·lr²/lr₀, or λ·lr/lr₀ with `unscaled_wd`.

    lr₀ is that of the optimizer, whatever its groups have.
    """
    args = group.args
    keywords = group.momentum(args["momentum"], args["momentum_dtype"], ROUNDED_UPDATE)
    group.leave_out("caution", args["momentum"] and args["caution"], CAUTION)
    if args["weight_decay"] and args["corrected_weight_decay"]:
        first = plain(group.given.get("lr", group.extras.get("initial_lr", args["lr"])))
        if group.saved is not None and "lr" not in group.given:
            group.note(FIRST_LR, lr=first)
        if args["unscaled_wd"]:
            return {**keywords, "weight_decay": args["weight_decay"] / first, "weight_decay_by": "rho"}
        return {**keywords, "weight_decay_by": first}
    return keywords


TIMM_BV = Peer(
    "timm's AdafactorBigVision",
    {
        **same(lr=1.0, decay_rate=0.8, weight_decay=0.0),
        "min_dim_size_to_factor": Argument(16, "min_factored"),
        "beta2_cap": bound(0.999, "beta2_max", 1),
        "eps": Argument(None, "eps", lambda eps1: (1e-30 if eps1 is None else eps1, 1e-3)),
        "clipping_threshold": bound(None, "clip"),
        "unscaled_wd": Argument(False, "weight_decay_by", lambda unscaled: "constant" if unscaled else "rho"),
        **other(momentum=0.9, momentum_dtype=torch.bfloat16, corrected_weight_decay=False, caution=False),
        **other(foreach=None, decay_offset=None),
    },
    fixed={"lr_decay": None, "relative": False, "momentum_of": "direction"},
    adjust=_adjust_timm_bv,
    format=Format("exp_avg_sq", "exp_avg_sq_r", "exp_avg_sq_c", "exp_avg", keeps_axes=True),
    rule=two_largest,
    signs=frozenset({"beta2_cap", "clipping_threshold"}),
)
