"""Another optimizer's arguments in our words, and our groups: split where it treats parameters in different ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from adafactor.core.settings import Settings
from adafactor.migration.state import Arguments, Axes, Entry, Moments, Shape, StateDict, factored_axes, our_state
from adafactor.schedules import with_warmup

KEYWORDS = tuple(keyword.name for keyword in fields(Settings))

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
RAW_DECAY = (
    "{peer} decays weights by {rate:g} whatever the learning rate; ours by lr·weight_decay, which is the same while lr "
    "is {lr:g}: when it changes, set weight_decay to {rate:g}/lr"
)
CORRECTION = (
    "β₂ of {peer} is {cap:g}; ours has Adam's correction, so that the weight of a new gradient is {excess:.1g} larger "
    "at this step, and less and less"
)


class MigrationWarning(UserWarning):
    """A difference between the steps of the original and ours, in one sentence with its measured size."""


@dataclass
class Translation:
    """A group's arguments in our words."""

    peer: str
    keywords: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    keeps_lr: bool = True  # our lr is theirs, so that a scheduler's `initial_lr` stays
    momentum_scale: float = 1.0  # our momentum is theirs times this
    step_offset: int = 0  # our step is theirs minus this

    def note(self, text: str, **values: Any) -> None:
        """Note a difference; the text may have places for the peer and for these values."""
        self.notes.append(text.format(peer=self.peer, **values))

    def leave_out(self, argument: str, size: str) -> None:
        """Note that an argument has no counterpart, and what that amounts to."""
        self.notes.append(f"{argument} has no counterpart and is left out: {size}")

    def set_step_size(self, args: Arguments, step: int | None) -> None:
        """Translate lr, relative_step and warmup_init of fairseq and its descendants."""
        self.keeps_lr = not args["relative_step"]
        if args["relative_step"] and args["warmup_init"]:
            lr = with_warmup(1 if step is None else step + 1)
            self.keywords |= {"lr": lr, "lr_decay": None, "initial_lr": 1.0}
            last, after = ("", "") if step is None else (f", last_epoch={step - 1}", " after `load_state_dict`")
            self.note(WARMUP, last=last, after=after, lr=lr)
        elif args["relative_step"]:
            self.keywords |= {"lr": 1e-2, "lr_decay": "rsqrt"}
        elif args["lr"] is None:
            raise ValueError(f"{self.peer}: lr=None with relative_step=False is no step size")
        else:
            self.keywords |= {"lr": number(args["lr"]), "lr_decay": None}

    def set_raw_decay(self, rate: float | None) -> None:
        """Translate X·(1 − rate) to our X·(1 − ρ·λ): λ = rate/lr, as long as lr stays what it is."""
        lr = self.keywords["lr"]
        if rate and not lr:
            raise ValueError(f"{self.peer} decays weights also at a learning rate of 0; ours does not")
        if rate:
            self.note(RAW_DECAY, rate=rate, lr=lr)
        self.keywords["weight_decay"] = rate / lr if rate else 0.0

    def set_capped_beta2(self, decay_rate: float, cap: float, step: int | None) -> None:
        """Translate β̂₂ₜ = min(cap, 1 − t^−c): the rise before the cap is reached, the constant from there on."""
        self.keywords["decay_rate"] = decay_rate
        if cap >= 1:
            return
        first, excess = math.ceil((1 - cap) ** (-1 / decay_rate)), cap ** (step or 0)
        if (step or 0) + 1 < first:
            self.note(CAP, cap=cap, first=first)
            return
        if excess > 1e-6:
            self.note(CORRECTION, cap=cap, excess=excess)
        self.keywords["beta2"] = cap

    def group(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return every keyword of a group, checked, and keys that are nobody's argument."""
        ours = {key: value for key, value in self.keywords.items() if key in KEYWORDS}
        try:
            settings = Settings(**ours)
        except (TypeError, ValueError) as wrong:
            raise ValueError(f"the arguments cannot be expressed: {wrong}") from wrong
        extras = {k: v for k, v in extras.items() if k not in KEYWORDS and (self.keeps_lr or k != "initial_lr")}
        more = {key: value for key, value in self.keywords.items() if key not in KEYWORDS}
        return {**extras, **{name: getattr(settings, name) for name in KEYWORDS}, **more}


@dataclass(frozen=True)
class Peer:
    """One other implementation. `factored` is None where every tensor of two axes or more is factored over `axes`."""

    name: str
    defaults: Arguments
    express: Callable[[Translation, Arguments, int | None], None]  # a group's; the step, or None for a new optimizer
    read: Callable[[Arguments, Entry, str], Moments] | None = None
    factored: Callable[[Arguments, Shape, str], Axes | None] | None = None
    axes: Axes | None = (-2, -1)  # None: as ours does by itself
    internal: frozenset[str] = frozenset()  # what its groups hold besides its arguments
    unsaved: tuple[str, ...] = ()  # arguments that its state dicts do not hold
    renewable: tuple[str, ...] = ("lr",)  # arguments that may be given although its state dicts hold them
    doubt: str = ""  # what no state dict can tell

    def translate(self, args: Arguments, step: int | None) -> Translation:
        """Translate the arguments of a group."""
        translation = Translation(self.name)
        self.express(translation, args, step)
        return translation

    def treatment(self, args: Arguments, shape: Shape | None, name: str) -> Treatment:
        """Return `factored` and `axes` that make ours treat a parameter as this peer does."""
        if self.factored is None:
            return "outer", self.axes
        if shape is None:
            raise ValueError(f"{name} has no state, so that its shape is unknown: pass params")
        return treat(shape, self.factored(args, shape, name), name)


Treatment = tuple[str | bool, Axes | None]  # the keywords `factored` and `axes`


def treat(shape: Shape, axes: Axes | None, name: str) -> Treatment:
    """Return `factored` and `axes` for a tensor that the peer factors over these axes, or not at all."""
    options: list[Treatment] = [("outer", None), (False, None)] if axes is None else [("outer", None), ("outer", axes)]
    is_factored = axes is not None and 1 not in (shape[axes[0]], shape[axes[1]])
    goal = {axis % len(shape) for axis in axes} if is_factored and axes else set()
    for option in options:
        if set(factored_axes(shape, *option) or ()) == goal:
            return option
    raise ValueError(f"{name} of shape {shape} cannot be factored over the axes {axes}")


@dataclass
class Member:
    """A parameter on its way into one of our groups."""

    name: str  # for messages; its own if it is named
    item: Any  # what the new group holds: a number, a tensor, or a (name, tensor) pair
    is_named: bool
    treatment: Treatment
    moments: Moments | None = None


@dataclass
class Group:
    """A peer's group, translated."""

    translation: Translation
    members: list[Member]
    extras: dict[str, Any] = field(default_factory=dict)  # keys that are nobody's argument, such as a scheduler's

    def split(self) -> list[tuple[dict[str, Any], list[Member]]]:
        """Return our groups: one, or one for each treatment of parameters; each with its keywords."""
        treatments: dict[Treatment, list[Member]] = {}
        for member in self.members:
            treatments.setdefault(member.treatment, []).append(member)
        return [
            ({**self.translation.group(self.extras), "factored": factored, "axes": axes}, members)
            for (factored, axes), members in (treatments or {("outer", (-2, -1)): []}).items()
        ]


def our_state_dict(groups: list[Group]) -> StateDict:
    """Make our state dict of these groups, parameters numbered anew; names that stand for numbers stay."""
    state: dict[int | str, dict[str, Tensor]] = {}
    param_groups: list[dict[str, Any]] = []
    number = 0
    for translation, keywords, members in ((g.translation, *part) for g in groups for part in g.split()):
        keys = [m.item if isinstance(m.item, str) else number + i for i, m in enumerate(members)]
        number += len(members)
        named = {"param_names": [m.name for m in members]} if all(m.is_named for m in members) else {}
        param_groups.append({**keywords, "params": keys, **named})
        for key, m in zip(keys, members, strict=True):
            if m.moments is None:
                continue
            step = m.moments.step - translation.step_offset
            if step < 0:
                raise ValueError(
                    f"{m.name} has taken {m.moments.step} steps, fewer than the offset {translation.step_offset}"
                )
            state[key] = our_state(m.moments, keywords, step, translation.momentum_scale, m.name)
    return {"state": state, "param_groups": param_groups}


def number(value: Any) -> Any:
    """Return a learning rate that may be a tensor as a number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def clip(threshold: float | None) -> float | None:
    """Return None for no clipping, which may be written as infinity."""
    return None if threshold is None or math.isinf(threshold) else threshold


def two_largest(args: Arguments, shape: Shape, name: str) -> Axes | None:
    """Return the two largest axes, of equals the later ones, if both reach the bound."""
    if len(shape) < 2 or not args.get("factored", True):
        return None
    first, second = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
    return (first, second) if shape[first] >= args["min_dim_size_to_factor"] else None
