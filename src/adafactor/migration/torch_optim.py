"""torch.optim.Adafactor: ε₁ in another place, no momentum, relative steps always."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adafactor.migration.arguments import clip, number
from adafactor.migration.form import Arguments, Moments, Peer, Shape, Translation, count, factors, statistics

NAME = "torch.optim.Adafactor"
EPS1 = (
    "torch.optim.Adafactor has its ε₁ in other places, ours is the paper's 1e-30: in float32 the steps are the same to "
    "rounding while gradients have an RMS of 1e-3 or more, and 20 steps end 0.4 % of the distance travelled apart at "
    "1e-5, 5 % at 1e-6, 15 % at 1e-8"
)
DECAY = (
    "torch.optim.Adafactor decays weights by lr·weight_decay, ours by ρₜ·weight_decay with ρₜ = min(lr, 1/√t): the "
    "same up to step 1/lr² = {last:.0f}, less from there on"
)


def translate(theirs: Arguments, step: int | None) -> Translation:
    """Their keywords in ours."""
    lr, notes = float(number(theirs["lr"])), [EPS1]
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


PEER = Peer(
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
