"""What several peers' arguments have in common."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from adafactor.migration.form import Arguments, Translation
from adafactor.schedules import with_warmup

DECAY_BY_ALPHA = (
    "{peer} multiplies weight_decay by α = max(ε₂, RMS(X))·ρ, ours by ρ: ours decays 1/max(ε₂, RMS(X)) times as fast "
    "(at RMS(X) = 0.05 and weight_decay 0.01, 20 steps end 5 % of the distance travelled apart); scale weight_decay "
    "by the parameters' RMS to come closer"
)
WARMUP = (
    "warmup_init is a schedule here: without `scheduler = adafactor.schedules.warmup(optimizer{last})`{after} and its "
    "`step()` after each step of the optimizer, the step size stays {lr:.3g}"
)
CAP = (
    "β₂ of {peer} stops rising at {cap:g}, from step {first} on; ours goes on: set beta2={cap:g} in every group then "
    "(or, with a cap of 0.999, the next 1000 steps end 0.6 % of the distance travelled apart)"
)
HALF_MOMENTUM = (
    "{peer} rounds its momentum to {dtype}, ours is float32: in bfloat16, 20 steps end 0.8 % of the distance travelled "
    "apart"
)
NO_COUNTERPART = "{peer}'s {argument} has no counterpart and is left out: {size}"


def number(value: Any) -> Any:
    """A learning rate that may be a tensor, as a number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def step_size(theirs: Arguments, step: int | None, peer: str) -> Translation:
    """lr, relative_step and warmup_init of fairseq and its descendants."""
    if theirs["relative_step"] and theirs["warmup_init"]:
        t = 1 if step is None else step + 1
        keywords = {"lr": with_warmup(t), "lr_decay": None, "initial_lr": 1.0}
        last, after = ("", "") if step is None else (f", last_epoch={step - 1}", " after `load_state_dict`")
        return Translation(keywords, [WARMUP.format(last=last, after=after, lr=with_warmup(t))], keeps_lr=False)
    if theirs["relative_step"]:
        return Translation({"lr": 1e-2, "lr_decay": "rsqrt"}, keeps_lr=False)
    if theirs["lr"] is None:
        raise ValueError(f"{peer}: lr=None with relative_step=False is no step size")
    return Translation({"lr": number(theirs["lr"]), "lr_decay": None})


def clip(threshold: float | None) -> float | None:
    """No clipping may be written as infinity."""
    return None if threshold is None or math.isinf(threshold) else threshold


def raw_decay(rate: float | None, lr: float, peer: str, notes: list[str]) -> float:
    """X·(1 − rate) as our X·(1 − ρ·λ): λ = rate/lr, as long as lr stays what it is."""
    if not rate:
        return 0.0
    if not lr:
        raise ValueError(f"{peer} decays weights also at a learning rate of 0; ours does not")
    notes.append(
        f"{peer} decays weights by {rate:g} whatever the learning rate; ours by lr·weight_decay, which is the same "
        f"while lr is {lr:g}: when it changes, set weight_decay to {rate:g}/lr"
    )
    return rate / lr


def capped(decay_rate: float, cap: float, step: int | None, peer: str, notes: list[str]) -> dict[str, Any]:
    """β̂₂ₜ = min(cap, 1 − t^−c): the rise before the cap is reached, the constant from there on."""
    if cap >= 1:
        return {"decay_rate": decay_rate}
    first = math.ceil((1 - cap) ** (-1 / decay_rate))
    if (step or 0) + 1 < first:
        notes.append(CAP.format(peer=peer, cap=cap, first=first))
        return {"decay_rate": decay_rate}
    if cap ** (step or 0) > 1e-6:
        notes.append(
            f"β₂ of {peer} is {cap:g}; ours has Adam's correction, so that the weight of a new gradient is "
            f"{cap ** (step or 0):.1g} larger at this step, and less and less"
        )
    return {"decay_rate": decay_rate, "beta2": cap}
