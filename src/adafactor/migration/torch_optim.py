"""torch.optim: its Adafactor, with ε₁ in another place and relative steps always, and AdamW, whose V we factor."""

from __future__ import annotations

from dataclasses import replace

from adafactor.core.settings import Settings
from adafactor.migration.peer import Group, Keywords, Peer, bound, negated, other, same
from adafactor.migration.state import Arguments, Format, Moments

EPS1 = (
    "torch.optim.Adafactor bounds mean(R) and V̂ from below by its ε₁, ours adds the paper's 1e-30 to G²: the steps are "
    "the same to rounding while gradients have an RMS of {bound} or more; below it torch drives U up to RMS d and ours "
    "does not (20 steps of small models end 2 to 32 % of the distance travelled apart in matrices, 70 to 93 % below "
    "1e-5, and 50 to 150 % in convolutions)"
)
EPS1_BACK = (
    "torch.optim.Adafactor has its ε₁ in other places; at the 1e-18 set here its float32 steps are ours to rounding "
    "while gradients have an RMS of {bound:.2g} or more"
)
UNFACTORED = (
    "AdamW keeps V whole, ours its row and column means: what is not factored takes the same steps, single weights of "
    "matrices others (20 steps of small models mostly end 24 to 370 % of the distance travelled apart, up to 780 % in "
    "convolutions), while the loss of the next 20 steps stayed within 0.005 of AdamW's"
)
L2 = "20 steps with weight_decay=0.01 and gradients of RMS 1 end 3 % of the distance travelled apart, of RMS 0.01 106 %"
AMSGRAD = "20 steps with betas=(0.9, 0.95) end 6 % of the distance travelled apart, more where gradients shrink"
ADAM_OR_ADAMW = (
    "state dicts of torch before 2.7 do not say whether they are Adam's or AdamW's: weight_decay is taken as AdamW's, "
    "decoupled from the gradient; pass decoupled_weight_decay=False in arguments for Adam's"
)


def _adjust(group: Group) -> Keywords:
    """Give ε₁ the paper's place and value."""
    eps1, eps2 = group.args["eps"]
    group.note(EPS1, bound="3.4e-4 (0.09 in bfloat16)" if eps1 is None else f"{eps1**0.5:.2g}")  # √ε₁
    return {"eps": (1e-30, eps2)}


def _back(s: Settings) -> tuple[Arguments, list[str]]:
    if s.clip is not None and s.clip < 1:
        raise ValueError(f"torch.optim.Adafactor takes no clip={s.clip!r} below 1")
    # ε₁ changes 1/√(G² + ε₁) by less than half a unit in the last place of a float32 if G² is 2²³ times as large
    note = EPS1_BACK.format(bound=max(1e-8, (2**23 * s.eps[0]) ** 0.5))
    return {"eps": (1e-18, s.eps[1])}, [note]  # 1e-18: its square is a normal float32, a row of zeros gives no NaN


ADAFACTOR = Peer(
    "torch.optim.Adafactor",
    {
        **same(lr=1e-2, weight_decay=0.0, maximize=False),
        "beta2_decay": negated(-0.8, "decay_rate"),
        "d": bound(1.0, "clip"),
        **other(eps=(None, 1e-3), foreach=None),
    },
    fixed={"axes": (-2, -1), "weight_decay_by": "lr"},
    adjust=_adjust,
    format=Format("variance", "row_var", "col_var", "exp_avg", keeps_axes=True),
    signs=frozenset({"beta2_decay", "d"}),
    back=_back,
)


def _adjust_adamw(group: Group) -> Keywords:
    """Take Adam's averages with its correction in them; leave out what is not decoupled."""
    args, (beta1, beta2) = group.args, group.args["betas"]
    clip = None if beta1 else 1.0  # without momentum U is an average no longer, and the clipping stands in for it
    keywords = {"beta1": beta1, "beta2": beta2, "clip": clip, "eps": (_eps1(args), 1e-3)}
    group.note(UNFACTORED)
    if args["weight_decay"] and "decoupled_weight_decay" not in {**(group.saved or {}), **group.given}:
        group.note(ADAM_OR_ADAMW)
    is_l2 = args["weight_decay"] and not args["decoupled_weight_decay"]
    group.leave_out("decoupled_weight_decay=False", is_l2, L2)
    if is_l2:
        keywords["weight_decay"] = 0.0
    group.leave_out("amsgrad", args["amsgrad"], AMSGRAD)
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
    adjust=_adjust_adamw,
    rule=lambda args, name, shape: None,
    correct=_correct_adamw,
    signs=frozenset({"betas", "amsgrad"}),
    renewable=("lr", "betas"),
)
