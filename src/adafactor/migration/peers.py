"""The declarations: torch.optim's Adafactor and AdamW, and transformers' Adafactor, whose state many others share."""

from __future__ import annotations

from dataclasses import fields, replace

from adafactor.core import momentum
from adafactor.core.factoring import Factored, find_factoring
from adafactor.core.settings import Settings
from adafactor.migration.peer import Argument, Group, Keywords, Peer, clipping, negated, other, same
from adafactor.migration.state import Arguments, Axes, Format, Moments, Shape, count_steps
from adafactor.schedules import with_warmup

EPS1 = (
    "torch.optim.Adafactor bounds mean(R) and V̂ from below by its ε₁, ours adds the paper's 1e-30 to G²: the steps are "
    "the same to rounding while gradients have an RMS of {bound} or more; below it torch's are shorter or longer"
)
EPS1_BACK = (
    "torch.optim.Adafactor has its ε₁ in other places; at the 1e-18 set here its float32 steps are ours to rounding "
    "while gradients have an RMS of {bound:.2g} or more"
)
WARMUP = (
    "warmup_init is a schedule here: without `scheduler = adafactor.schedules.warmup(optimizer{last})`{after} and its "
    "`step()` after each step of the optimizer, the step size stays {lr:.3g}"
)
UNFACTORED = (
    "AdamW keeps V whole, ours its row and column means: what is not factored takes the same steps, single weights of "
    "matrices take others"
)
L2 = "decoupled_weight_decay=False of Adam has no counterpart: weight_decay is left out"
AMSGRAD = "amsgrad of Adam or AdamW has no counterpart and is left out"
ADAM_OR_ADAMW = (
    "state dicts of torch before 2.7 do not say whether they are Adam's or AdamW's: weight_decay is taken as AdamW's, "
    "decoupled from the gradient; pass decoupled_weight_decay=False in arguments for Adam's"
)


# ---- this optimizer


def _our_axes(args: Arguments, shape: Shape) -> Axes | None:
    factoring = find_factoring(shape, *(args[name] for name in ("factored", "axes", "min_factored", "per_slice")))
    return (factoring.row_axis, factoring.col_axis) if isinstance(factoring, Factored) else None


OURS = Peer(
    "adafactor.Adafactor",
    {keyword.name: Argument(keyword.default, keyword.name) for keyword in fields(Settings)},
    fixed={},
    format=lambda settings: Format("full", "row", "col", momentum.key(settings.momentum_of)),
    signs=frozenset({"lr_decay", "relative", "factored", "decay_rate"}),
    rule=_our_axes,
    back=lambda settings: ({}, []),
)


# ---- torch.optim.Adafactor


def _adjust_torch(group: Group) -> Keywords:
    """Give ε₁ the paper's place and value."""
    eps1, eps2 = group.args["eps"]
    bound = "3.4e-4 (0.09 in bfloat16)" if eps1 is None else f"{eps1**0.5:.2g}"  # √ε₁
    group.notes.append(EPS1.format(bound=bound))
    return {"eps": (1e-30, eps2)}


def _torch_back(s: Settings) -> tuple[Keywords, list[str]]:
    if s.clip is not None and s.clip < 1:
        raise ValueError(f"torch.optim.Adafactor takes no clip={s.clip!r} below 1")
    # ε₁ changes 1/√(G² + ε₁) by less than half a unit in the last place of a float32 if G² is 2²³ times as large
    note = EPS1_BACK.format(bound=max(1e-8, (2**23 * s.eps[0]) ** 0.5))
    return {"eps": (1e-18, s.eps[1])}, [note]  # 1e-18: its square is a normal float32, a row of zeros gives no NaN


TORCH = Peer(
    "torch.optim.Adafactor",
    {
        **same(lr=1e-2, weight_decay=0.0, maximize=False),
        "beta2_decay": negated(-0.8, "decay_rate"),
        "d": clipping(1.0),
        **other(eps=(None, 1e-3), foreach=None),
    },
    fixed={"axes": (-2, -1), "weight_decay_by": "lr"},
    format=lambda settings: Format("variance", "row_var", "col_var", "exp_avg"),
    signs=frozenset({"beta2_decay", "d"}),
    adjust=_adjust_torch,
    back=_torch_back,
)


# ---- transformers' Adafactor


def _adjust_transformers(group: Group) -> Keywords:
    """Translate lr, or the min(0.01, 1/√t) and min(10⁻⁶·t, 1/√t) that relative steps have instead."""
    args = group.args
    if not args["relative_step"]:
        if args["lr"] is None:
            raise ValueError("transformers' Adafactor: lr=None with relative_step=False is no step size")
        return {"lr_decay": None}
    if group.saved is None and args["lr"] is not None:
        raise ValueError(f"transformers' Adafactor takes lr={args['lr']!r} only with relative_step=False")
    group.extras.pop("initial_lr", None)  # a scheduler's, which is no bound of ours
    return _warmup(group) if args["warmup_init"] else {"lr": 1e-2, "lr_decay": "rsqrt"}


def _warmup(group: Group) -> Keywords:
    counts = [count_steps(m.entry.get("step"), f"'step' of {m.name}") for m in group.members if m.entry]
    t = max(counts, default=0)
    lr = with_warmup(t + 1)
    last, after = (f", last_epoch={t - 1}", " after `load_state_dict`") if group.saved is not None else ("", "")
    group.notes.append(WARMUP.format(last=last, after=after, lr=lr))
    group.extras["initial_lr"] = 1.0
    return {"lr": lr, "lr_decay": None}


def _transformers_back(s: Settings) -> tuple[Keywords, list[str]]:
    relative_step = s.lr_decay == "rsqrt"
    if relative_step and s.lr != 1e-2:
        raise ValueError(
            f"transformers' Adafactor has min(0.01, 1/√t) and nothing like lr={s.lr!r} with lr_decay='rsqrt'"
        )
    return {"lr": None if relative_step else s.lr, "relative_step": relative_step}, []


TRANSFORMERS = Peer(
    "transformers' Adafactor",
    {
        **same(lr=None, eps=(1e-30, 1e-3), weight_decay=0.0),
        "clip_threshold": clipping(1.0),
        "decay_rate": negated(-0.8, "decay_rate"),
        "beta1": Argument(None, "beta1", lambda beta1: beta1 or 0.0, lambda beta1: beta1 or None),
        "scale_parameter": Argument(True, "relative"),
        **other(relative_step=True, warmup_init=False),
    },
    fixed={"axes": (-2, -1), "weight_decay_by": "alpha"},
    format=lambda settings: Format(
        "exp_avg_sq",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
        "exp_avg",
        keeps_axes=False,
        count=lambda step: {"step": step, "RMS": 0.0},
    ),
    signs=frozenset({"clip_threshold", "scale_parameter", "beta1"}),
    adjust=_adjust_transformers,
    back=_transformers_back,
)


# ---- AdamW, whose V we factor


def _adjust_adamw(group: Group) -> Keywords:
    """Take Adam's averages with its correction in them; leave out what is not decoupled."""
    args, (beta1, beta2) = group.args, group.args["betas"]
    clip = None if beta1 else 1.0  # without momentum U is an average no longer, and the clipping stands in for it
    keywords = {"beta1": beta1, "beta2": beta2, "clip": clip, "eps": (_eps1(args), 1e-3)}
    group.notes.append(UNFACTORED)
    if args["weight_decay"] and "decoupled_weight_decay" not in {**(group.saved or {}), **group.given}:
        group.notes.append(ADAM_OR_ADAMW)
    if args["weight_decay"] and not args["decoupled_weight_decay"]:
        group.notes.append(L2)
        keywords["weight_decay"] = 0.0
    if args["amsgrad"]:
        group.notes.append(AMSGRAD)
    return keywords


def _eps1(args: Arguments) -> float:
    """√(V + ε²) stands for their √V + ε: the same where one of the two is small, at most √2 apart between."""
    return max(float(args["eps"]) ** 2, 1e-30)


def _correct_adamw(moments: Moments, args: Arguments) -> Moments:
    """`exp_avg` and `exp_avg_sq` are divided by 1 − βᵗ: ours have the correction in them, and ε₁ in V."""
    beta1, beta2 = (1 - float(beta) ** moments.step if moments.step else 1.0 for beta in args["betas"])
    sign = -1 if args["maximize"] else 1  # theirs averages −G
    average = None if moments.momentum is None else sign * moments.momentum / beta1
    return replace(moments, means={None: moments.mean(None) / beta2 + _eps1(args)}, momentum=average)


ADAMW = Peer(
    "Adam or AdamW",
    {
        **same(lr=1e-3, weight_decay=1e-2, maximize=False),
        **other(betas=(0.9, 0.999), eps=1e-8, decoupled_weight_decay=True, amsgrad=False),
        **other(foreach=None, capturable=None, differentiable=None, fused=None),
    },
    fixed={"lr_decay": None, "relative": False, "momentum_of": "gradient"},
    format=lambda settings: Format("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg"),
    signs=frozenset({"betas", "amsgrad"}),
    rule=lambda args, shape: None,
    adjust=_adjust_adamw,
    correct=_correct_adamw,
    renewable=("lr", "betas"),
)

PEERS = {"torch": TORCH, "transformers": TRANSFORMERS, "adamw": ADAMW, "adafactor": OURS}
TARGETS = tuple(name for name, peer in PEERS.items() if peer.back is not None)
