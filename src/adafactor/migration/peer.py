"""Other implementations, each declared as a table, and their groups in our words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from adafactor.core.settings import Settings
from adafactor.migration import state
from adafactor.migration.state import (
    Arguments,
    Axes,
    Format,
    Member,
    Moments,
    Shape,
    StateDict,
    factored_axes,
    refuse_damage,
)

KEYWORDS = tuple(keyword.name for keyword in fields(Settings))
Keywords = dict[str, Any]  # of ours
Rule = Callable[[Arguments, Shape, str], Axes | None]  # the axes over which a parameter of this name is factored

ROUNDED_UPDATE = (
    "{peer} rounds updates to half precision before it averages them, and steps with the rounded average; ours "
    "averages in float32 and rounds what it keeps: 20 steps end 0.8 % of the distance travelled apart (0.07 % in "
    "float16)"
)
SLICES = (
    "{peer} clips and scales the slices of {name} by themselves, ours only those along a first axis: 20 steps on "
    "slices whose RMS differ 10 times end 67 % of the distance travelled apart"
)


class MigrationWarning(UserWarning):
    """A difference between the steps of the original and ours, in one sentence with its measured size."""


def last_two(args: Arguments, shape: Shape, name: str) -> Axes | None:
    """Return the last two axes."""
    return (len(shape) - 2, len(shape) - 1) if len(shape) > 1 else None


def two_largest(args: Arguments, shape: Shape, name: str) -> Axes | None:
    """Return the two largest axes, of equals the later ones, if both reach the bound."""
    if len(shape) < 2 or not args.get("factored", True):
        return None
    first, second = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
    return (first, second) if shape[first] >= args["min_dim_size_to_factor"] else None


def finite(d: float | None) -> float | None:
    """Return a bound of RMS(U) as our `clip`: infinity is no clipping."""
    return None if d is None or math.isinf(d) else d


@dataclass(frozen=True)
class Peer:
    """One other implementation: what its arguments and the keys of its state mean to us."""

    name: str
    defaults: Arguments  # of all its arguments
    express: Callable[[Group], Keywords]  # returns our keywords for a group of it, and notes what differs
    fixed: Arguments = field(default_factory=dict)  # keywords of ours for what it always does
    format: Format = Format("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg")
    rule: Rule = last_two
    varies: bool = False  # the rule says more than one group of ours can
    # the axes along which it steps the slices of a parameter of this name by themselves
    slices: Callable[[Arguments, str], tuple[int, ...]] = lambda args, name: ()
    # moments that are not averages as ours are, made so with the arguments that they were made with
    correct: Callable[[Moments, Arguments], Moments] = lambda moments, args: moments
    signs: frozenset[str] = frozenset()  # keys of its groups by which it is known
    renewable: tuple[str, ...] = ("lr",)  # arguments that may be given although its state dicts hold them
    # for the way back: returns its arguments for a group of ours, and what will differ
    back: Callable[[Settings], tuple[Arguments, list[str]]] | None = None

    def read(self, args: Arguments, member: Member, step: Any) -> Moments:
        """Read the moments of a parameter; the number of steps is for an entry that lacks it."""
        return self.format.read(member, lambda shape: self.rule(args, shape, member.name), step)


@dataclass
class Group:
    """A group of a peer, in our words."""

    peer: Peer
    args: Arguments
    members: list[Member]
    saved: Arguments | None = None  # what its state holds of the arguments; None for a new optimizer
    given: Arguments = field(default_factory=dict)  # what the caller says of those of the optimizer
    extras: Arguments = field(default_factory=dict)  # keys that are nobody's argument, such as a scheduler's
    notes: list[str] = field(default_factory=list)
    keeps_lr: bool = True  # our lr is theirs, so that a scheduler's `initial_lr` stays
    step_offset: int = 0  # our step is theirs minus this

    def __post_init__(self) -> None:
        """Translate the arguments."""
        steps = [m.moments.step for m in self.members if m.moments is not None]
        self.step = None if self.saved is None else max(steps, default=0)
        self.args = {name: _plain(value) for name, value in self.args.items()}
        with refuse_damage(f"the arguments of {self.peer.name}"):
            for member in self.members if self.saved is None else []:  # of a state, they are known by their paths
                member.slices = self.peer.slices(self.args, member.name)
            self.keywords = {**self.peer.fixed, **self.peer.express(self)}

    def note(self, text: str, **values: Any) -> None:
        """Note a difference; the text may have places for the peer and for these values."""
        self.notes.append(text.format(peer=self.peer.name, **values))

    def leave_out(self, argument: str, is_on: Any, size: str) -> None:
        """Note that an argument has no counterpart, and what that amounts to, where it is on."""
        if is_on:
            self.note("{argument} of {peer} has no counterpart and is left out: {size}", argument=argument, size=size)

    def momentum(self, beta1: float | None, dtype: Any, difference: str) -> Keywords:
        """Translate β₁, and the dtype of the momentum: torch's, NumPy's or its name; a float16 one becomes float32."""
        if beta1 and "float16" in str(dtype):
            self.note(difference)
            if "bfloat16" in str(dtype):
                return {"beta1": beta1, "momentum_dtype": "bfloat16", "momentum_rounding": "nearest"}
        return {"beta1": beta1 or 0.0}

    def checked_keywords(self) -> Keywords:
        """Return every keyword of our group, checked, and keys that are nobody's argument."""
        ours = {key: value for key, value in self.keywords.items() if key in KEYWORDS}
        try:
            settings = Settings(**ours)
        except (TypeError, ValueError) as wrong:
            raise ValueError(f"the arguments cannot be expressed: {wrong}") from wrong
        extras = {k: v for k, v in self.extras.items() if k not in KEYWORDS and (self.keeps_lr or k != "initial_lr")}
        return {**extras, **self.keywords, **{name: getattr(settings, name) for name in KEYWORDS}}

    def split(self) -> list[tuple[Keywords, list[Member]]]:
        """Return our groups: one, or one for each treatment of parameters; each with its keywords."""
        keywords = self.checked_keywords()
        treatments: dict[tuple[tuple[str, Any], ...], list[Member]] = {}
        for member in self.members:
            change = self._treat(member, keywords) if self.peer.varies else {}
            if member.slices and not member.is_sliced:
                self.note(SLICES, name=member.name)
            treatments.setdefault(tuple(change.items()), []).append(member)
        return [({**keywords, **dict(change)}, members) for change, members in (treatments or {(): []}).items()]

    def _treat(self, member: Member, keywords: Keywords) -> Keywords:
        """Return what must change of our keywords so that ours factors a parameter as the peer does."""
        shape, name = member.shape, member.name
        if shape is None:
            raise ValueError(f"{name} has no state, so that its shape is unknown: pass params")
        axes = self.peer.rule(self.args, shape, name) if member.moments is None else member.moments.axes
        if axes and 1 in (shape[axes[0]], shape[axes[1]]):  # ours does not factor it: the same, for less
            axes = None
        sliced: Keywords = {"per_slice": True} if member.is_sliced else {}
        if set(factored_axes(shape, {**keywords, **sliced}) or ()) == set(axes or ()):
            return sliced
        if not axes:
            return {"factored": False, **sliced}
        first = 1 if member.is_sliced else 0  # the axes that we name are those of a slice
        return {"axes": (axes[0] - first, axes[1] - first), "min_factored": 0, **sliced}

    def our_moments(self, member: Member, keywords: Arguments) -> Moments:
        """Return what our state holds of a parameter."""
        moments = member.moments
        assert moments is not None
        step, average = moments.step - self.step_offset, None
        if step < 0:
            raise ValueError(f"{member.name} has taken {moments.step} steps, fewer than the offset {self.step_offset}")
        if keywords["beta1"]:
            if moments.momentum is None:
                raise ValueError(
                    f"the state of {member.name} has no {self.peer.format.momentum!r}, but its group has momentum"
                )
            average = moments.momentum.bfloat16() if keywords["momentum_dtype"] == "bfloat16" else moments.momentum
        return replace(moments, step=step, momentum=average)


def our_state_dict(groups: Iterable[Group]) -> StateDict:
    """Make our state dict of these groups, parameters numbered anew; names that stand for numbers stay."""
    entries: dict[int | str, dict[str, Tensor]] = {}
    param_groups: list[dict[str, Any]] = []
    number = 0
    for group, keywords, members in ((g, *part) for g in groups for part in g.split()):
        keys = [m.item if isinstance(m.item, str) else number + i for i, m in enumerate(members)]
        number += len(members)
        named = {"param_names": [m.name for m in members]} if all(m.is_named for m in members) else {}
        param_groups.append({**keywords, "params": keys, **named})
        for key, member in zip(keys, members, strict=True):
            if member.moments is not None:
                moments = group.our_moments(member, keywords)
                entries[key] = state.OURS.write(moments, factored_axes(moments.shape, keywords))
                if member.is_sliced:
                    entries[key]["step"] = entries[key]["step"].repeat(moments.shape[0])
    return {"state": entries, "param_groups": param_groups}


def _plain(value: Any) -> Any:
    """Return a number for a tensor of one element, as a learning rate may be."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
