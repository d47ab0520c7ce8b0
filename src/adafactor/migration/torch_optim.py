"""torch.optim: its Adafactor, with ε₁ in another place and relative steps always, and AdamW, whose V we factor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adafactor.migration.arguments import NO_COUNTERPART, clip, number
from adafactor.migration.form import Arguments, Moments, Peer, Shape, Translation, count, factors, statistics, tensor

NAME = "torch.optim.Adafactor"
EPS1 = (
    "torch.optim.Adafactor bounds mean(R) and V̂ from below by its ε₁, ours adds the paper's 1e-30 to G²: the steps are "
    "the same to rounding while gradients have an RMS of {bound} or more; below it torch drives U up to RMS d and ours "
    "does not (20 steps of small models end 2 to 32 % of the distance travelled apart in matrices, 70 to 93 % below "
    "1e-5, and 50 to 150 % in convolutions)"
)
DECAY = (
    "torch.optim.Adafactor decays weights by lr·weight_decay, ours by ρₜ·weight_decay with ρₜ = min(lr, 1/√t): the "
    "same up to step 1/lr² = {last:.0f}, less from there on"
)


def translate(theirs: Arguments, step: int | None) -> Translation:
    """Their keywords in ours."""
    lr, eps1 = float(number(theirs["lr"])), theirs["eps"][0]
    bound = "3.4e-4 (0.09 in bfloat16)" if eps1 is None else f"{eps1**0.5:.2g}"  # √ε₁
    notes = [EPS1.format(bound=bound)]
    if theirs["weight_decay"] and lr:
        notes.append(DECAY.format(last=lr**-2))
    keywords = {
        "lr": lr,
        "decay_rate": -theirs["beta2_decay"],
        "eps": (1e-30, theirs["eps"][1]),
        "clip": clip(theirs["d"]),
        "weight_decay": theirs["weight_decay"],
        "maximize": theirs["maximize"],
    }
    return Translation(keywords, notes)


def read(theirs: Arguments, entry: Mapping[str, Any], shape: Shape | None, where: str) -> Moments:
    """`row_var` (…, n, 1) and `col_var` (…, 1, m), or `variance`; means of G² without ε₁."""
    step = count(entry, "step", where)
    found = statistics(entry, ("variance", "row_var", "col_var"), where)
    if len(found) == 1:
        return Moments(tuple(found[0].shape), step, whole=found[0])
    row, col = found
    if row.dim() < 2 or col.dim() < 2 or row.shape[-1] != 1 or col.shape[-2] != 1:
        raise ValueError(
            f"'row_var' and 'col_var' of {where} are {tuple(row.shape)} and {tuple(col.shape)}, not n×1, 1×m"
        )
    full = (*row.shape[:-1], col.shape[-1])
    return Moments(full, step, over=factors(full, (-2, -1), row.squeeze(-1), col.squeeze(-2), where))


WHOLE = (
    "AdamW keeps V whole, ours its row and column means: what is not factored takes the same steps, single weights of "
    "matrices others (20 steps of small models end 24 to 780 % of the distance travelled apart), while the loss of the "
    "next 20 steps stayed within 0.005 of AdamW's"
)
L2 = "20 steps with weight_decay=0.01 and gradients of RMS 1 end 3 % of the distance travelled apart, of RMS 0.01 106 %"
AMSGRAD = "20 steps with betas=(0.9, 0.95) end 6 % of the distance travelled apart, more where gradients shrink"
DOUBT = (
    "state dicts of torch before 2.7 do not say whether they are Adam's or AdamW's: weight_decay is taken as AdamW's, "
    "decoupled from the gradient; pass decoupled_weight_decay=False in arguments for Adam's"
)


def translate_adamw(theirs: Arguments, step: int | None) -> Translation:
    """Their keywords in ours: absolute steps, no clipping, and averages that have Adam's correction in them."""
    (beta1, beta2), decay, notes = theirs["betas"], theirs["weight_decay"], [WHOLE]
    if decay and "decoupled_weight_decay" not in {**theirs.get("saved", theirs), **theirs.get("given", {})}:
        notes.append(DOUBT)
    if decay and not theirs["decoupled_weight_decay"]:
        notes.append(NO_COUNTERPART.format(peer="Adam", argument="weight_decay", size=L2))
        decay = 0.0
    if theirs["amsgrad"]:
        notes.append(NO_COUNTERPART.format(peer="AdamW", argument="amsgrad", size=AMSGRAD))
    keywords = {
        "lr": float(number(theirs["lr"])),
        "lr_decay": None,
        "relative": False,
        "beta1": float(number(beta1)),
        "momentum_of": "gradient",
        "beta2": float(number(beta2)),
        "clip": None if beta1 else 1.0,  # U is an average no longer, and the clipping stands in for it
        "eps": (_eps1(theirs), 1e-3),
        "weight_decay": decay,
        "maximize": theirs["maximize"],
    }
    return Translation(keywords, notes, momentum_scale=-1.0 if theirs["maximize"] else 1.0)  # theirs averages −G


def _eps1(theirs: Arguments) -> float:
    """√(V + ε²) for their √V + ε: the same where one of the two is small, at most √2 apart between."""
    return max(float(number(theirs["eps"])) ** 2, 1e-30)


def read_adamw(theirs: Arguments, entry: Mapping[str, Any], shape: Shape | None, where: str) -> Moments:
    """`exp_avg` and `exp_avg_sq`, divided by 1 − βᵗ: ours have the correction in them, and ε₁ in V."""
    step = count(entry if "step" in entry else theirs, "step", where)  # some fused ones count in the group
    beta1, beta2 = (1 - float(number(beta)) ** step if step else 1.0 for beta in theirs["saved"]["betas"])
    second = tensor(entry, "exp_avg_sq", where) / beta2 + _eps1(theirs)
    return Moments(tuple(second.shape), step, whole=second, momentum=tensor(entry, "exp_avg", where) / beta1)


ADAMW = Peer(
    "torch.optim.AdamW",
    {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    },
    translate_adamw,
    read_adamw,
    axes=None,
    internal=frozenset({"step"}),
    anew=("lr", "betas"),
)
ADAFACTOR = Peer(
    name=NAME,
    defaults={
        "lr": 1e-2,
        "beta2_decay": -0.8,
        "eps": (None, 1e-3),
        "d": 1.0,
        "weight_decay": 0.0,
        "foreach": None,
        "maximize": False,
    },
    translate=translate,
    read=read,
)
