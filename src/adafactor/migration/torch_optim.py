"""torch.optim: its Adafactor, with ε₁ in another place and relative steps always, and AdamW, whose V we factor."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from adafactor.migration.state import Arguments, Axes, Entry, Moments, Shape, read_moments, read_step, read_tensor
from adafactor.migration.translate import Peer, Translation, clip, number

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


def _express(translation: Translation, args: Arguments, step: int | None) -> None:
    lr, eps1 = float(number(args["lr"])), args["eps"][0]
    translation.note(EPS1, bound="3.4e-4 (0.09 in bfloat16)" if eps1 is None else f"{eps1**0.5:.2g}")  # √ε₁
    if args["weight_decay"] and lr:
        translation.note(DECAY, last=lr**-2)
    translation.keywords |= {
        "lr": lr,
        "decay_rate": -args["beta2_decay"],
        "eps": (1e-30, args["eps"][1]),
        "clip": clip(args["d"]),
        "weight_decay": args["weight_decay"],
        "maximize": args["maximize"],
    }


def _locate(args: Arguments, row: Tensor, col: Tensor, name: str) -> tuple[Shape, Axes, Tensor, Tensor]:
    """Rows are (…, n, 1), columns (…, 1, m), both means of G² without ε₁."""
    if row.dim() < 2 or col.dim() < 2 or row.shape[-1] != 1 or col.shape[-2] != 1:
        raise ValueError(
            f"'row_var' and 'col_var' of {name} are {tuple(row.shape)} and {tuple(col.shape)}, not n×1, 1×m"
        )
    return (*row.shape[:-1], col.shape[-1]), (-2, -1), row.squeeze(-1), col.squeeze(-2)


UNFACTORED = (
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


def _express_adamw(translation: Translation, args: Arguments, step: int | None) -> None:
    """Steps are absolute and not clipped, and averages have Adam's correction in them."""
    beta1, beta2 = (float(number(beta)) for beta in args["betas"])
    translation.momentum_scale = -1.0 if args["maximize"] else 1.0  # theirs averages −G
    translation.keywords |= {
        "lr": float(number(args["lr"])),
        "lr_decay": None,
        "relative": False,
        "beta1": beta1,
        "momentum_of": "gradient",
        "beta2": beta2,
        "clip": None if beta1 else 1.0,  # U is an average no longer, and the clipping stands in for it
        "eps": (_eps1(args), 1e-3),
        "weight_decay": args["weight_decay"],
        "maximize": args["maximize"],
    }
    translation.note(UNFACTORED)
    if args["weight_decay"] and "decoupled_weight_decay" not in {
        **args.get("group", args),
        **args.get("overrides", {}),
    }:
        translation.note(DOUBT)
    if args["weight_decay"] and not args["decoupled_weight_decay"]:
        translation.keywords["weight_decay"] = 0.0
        translation.leave_out("Adam's weight_decay", L2)
    if args["amsgrad"]:
        translation.leave_out("AdamW's amsgrad", AMSGRAD)


def _eps1(args: Arguments) -> float:
    """√(V + ε²) stands for their √V + ε: the same where one of the two is small, at most √2 apart between."""
    return max(float(number(args["eps"])) ** 2, 1e-30)


def _read_adamw(args: Arguments, entry: Entry, name: str) -> Moments:
    """`exp_avg` and `exp_avg_sq` are divided by 1 − βᵗ: ours have the correction in them, and ε₁ in V."""
    step = read_step(args, entry, name)
    beta1, beta2 = (1 - float(number(beta)) ** step if step else 1.0 for beta in args["group"]["betas"])
    second = read_tensor(entry, "exp_avg_sq", name) / beta2 + _eps1(args)
    return Moments(tuple(second.shape), step, second, momentum=read_tensor(entry, "exp_avg", name) / beta1)


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
    _express_adamw,
    _read_adamw,
    axes=None,
    internal=frozenset({"step"}),
    renewable=("lr", "betas"),
)
ADAFACTOR = Peer(
    "torch.optim.Adafactor",
    {
        "lr": 1e-2,
        "beta2_decay": -0.8,
        "eps": (None, 1e-3),
        "d": 1.0,
        "weight_decay": 0.0,
        "foreach": None,
        "maximize": False,
    },
    _express,
    partial(read_moments, keys=("variance", "row_var", "col_var"), locate=_locate),
)
