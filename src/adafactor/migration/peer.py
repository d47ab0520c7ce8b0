"""What another implementation is to us: one declaration, from which its groups are put into our words and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

from torch import Tensor

from adafactor.core.settings import Settings
from adafactor.migration.state import (
    Arguments,
    Axes,
    Format,
    Member,
    Moments,
    Shape,
    count_steps,
    factored_axes,
    refuse_damage,
)

Keywords = dict[str, Any]  # of ours
Rule = Callable[[Arguments, str, Shape], Axes | None]  # the axes over which a parameter of this name is factored

SLICES = (
    "{peer} clips and scales the slices of {name} by themselves, ours only those along a first axis: 20 steps on "
    "slices whose RMS differ 10 times end 67 % of the distance travelled apart"
)
NOT_FINITE = "{peer} steps with NaN and infinite gradients too, which ruins the parameters; ours skips such steps"


class MigrationWarning(UserWarning):
    """A difference between the steps of the original and ours, in one sentence with its measured size."""


@dataclass(frozen=True)
class Argument:
    """An argument of a peer: its default, and the keyword of ours that says the same."""

    default: Any
    keyword: str | None = None  # None: `Peer.adjust` reads it, or it changes no step
    ours: Callable[[Any], Any] = lambda value: value  # makes our value of theirs
    theirs: Callable[[Any], Any] = lambda value: value  # makes their value of ours


def same(**defaults: Any) -> dict[str, Argument]:
    """Declare arguments with the name and the meaning of our keywords."""
    return {name: Argument(default, name) for name, default in defaults.items()}


def other(**defaults: Any) -> dict[str, Argument]:
    """Declare arguments that `Peer.adjust` reads, or that change no step."""
    return {name: Argument(default) for name, default in defaults.items()}


def negated(default: float, keyword: str) -> Argument:
    """Declare a number that has the other sign there."""
    return Argument(default, keyword, lambda value: -value, lambda value: -value)


def bound(default: float | None, keyword: str, top: float = math.inf) -> Argument:
    """Declare a bound that has no effect from `top` on; ours is None then."""
    return Argument(
        default,
        keyword,
        lambda value: None if value is None or value >= top else value,
        lambda value: top if value is None else value,
    )


def last_two(args: Arguments, name: str, shape: Shape) -> Axes | None:
    """Return the last two axes."""
    return (len(shape) - 2, len(shape) - 1) if len(shape) > 1 else None


def two_largest(args: Arguments, name: str, shape: Shape) -> Axes | None:
    """Return the two largest axes, of equals the later ones, if both reach the bound."""
    if len(shape) < 2 or not args.get("factored", True):
        return None
    first, second = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
    return (first, second) if shape[first] >= args["min_dim_size_to_factor"] else None


@dataclass(frozen=True)
class Peer:
    """One implementation: what its arguments and the keys of its state mean to us."""

    name: str
    arguments: dict[str, Argument]
    fixed: Arguments = field(default_factory=dict)  # keywords of ours for what it always does
    # returns the keywords that do not follow from one argument, and notes what differs
    adjust: Callable[[Group], Keywords] = lambda group: {}
    format: Format = Format("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg")
    rule: Rule = last_two
    varies: bool = False  # the rule says more than one group of ours can
    # the axes along which it steps the slices of a parameter of this name by themselves
    slices: Callable[[Arguments, str], tuple[int, ...]] = lambda args, name: ()
    step_offset: str | None = None  # the argument that its number of steps is counted from
    # moments that are not averages as ours are, made so with the arguments that they were made with
    correct: Callable[[Moments, Arguments], Moments] = lambda moments, args: moments
    signs: frozenset[str] = frozenset()  # keys of its groups by which it is known
    renewable: tuple[str, ...] = ("lr",)  # arguments that may be given although its state dicts hold them
    # for the way back: returns the arguments that do not follow from one keyword, and what will differ
    back: Callable[[Settings], tuple[Arguments, list[str]]] | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """All its arguments."""
        return {name: argument.default for name, argument in self.arguments.items()}

    def read(self, args: Arguments, member: Member, step: int) -> Moments:
        """Read the state of a parameter."""
        return self.format.read(member, partial(self.rule, args, member.name), step)


OURS = Peer(
    "this optimizer",
    {keyword.name: Argument(keyword.default, keyword.name) for keyword in fields(Settings)},
    format=Format("full", "row", "col", "momentum", keeps_axes=True),
    rule=lambda args, name, shape: factored_axes(shape, args),
    signs=frozenset({"lr_decay", "relative", "factored", "decay_rate"}),
    back=lambda settings: ({}, []),
)


@dataclass
class Group:
    """A group of a peer, in our words."""

    peer: Peer
    args: Arguments
    members: list[Member]
    saved: Arguments | None = None  # what its state holds of the arguments; None for a new optimizer
    given: Arguments = field(default_factory=dict)  # what the caller says of those of the optimizer
    extras: dict[str, Any] = field(default_factory=dict)  # keys that are nobody's argument, such as a scheduler's
    notes: list[str] = field(default_factory=list)  # what differs

    def __post_init__(self) -> None:
        """Translate the arguments."""
        self.args = {name: plain(value) for name, value in self.args.items()}
        with refuse_damage(f"the arguments of {self.peer.name}"):
            for member in self.members if self.saved is None else []:  # of a state, they are known by their paths
                member.slices = self.peer.slices(self.args, member.name)
            table = {a.keyword: a.ours(self.args[name]) for name, a in self.peer.arguments.items() if a.keyword}
            self.keywords: Keywords = {**self.peer.fixed, **table, **self.peer.adjust(self)}

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return max((self._count(member) for member in self.members if member.entry), default=0)

    @property
    def settings(self) -> Settings:
        """Every keyword of our group, checked."""
        try:
            return Settings(**self.keywords)
        except (TypeError, ValueError) as wrong:
            raise ValueError(f"the arguments cannot be expressed: {wrong}") from wrong

    def note(self, text: str, **values: Any) -> None:
        """Note a difference; the text may have places for the peer and for these values."""
        self.notes.append(text.format(peer=self.peer.name, **values))

    def leave_out(self, argument: str, is_on: Any, size: str) -> None:
        """Note that an argument has no counterpart, and what that amounts to, where it is on."""
        if is_on:
            self.notes.append(f"{argument} of {self.peer.name} has no counterpart and is left out: {size}")

    def momentum(self, beta1: float | None, dtype: Any, difference: str) -> Keywords:
        """Translate β₁, and the dtype of the momentum: torch's, NumPy's or its name; a float16 one becomes float32."""
        if beta1 and "float16" in str(dtype):
            self.note(difference)
            if "bfloat16" in str(dtype):
                return {"beta1": beta1, "momentum_dtype": "bfloat16", "momentum_rounding": "nearest"}
        return {"beta1": beta1 or 0.0}

    def split(self) -> Iterator[tuple[Keywords, list[Member]]]:
        """Read the moments, and yield our groups with their keywords: one, or one for each treatment of parameters."""
        keywords = asdict(self.settings)
        treatments: dict[tuple[tuple[str, Any], ...], list[Member]] = {} if self.members else {(): []}
        for member in self.members:
            self._read(member)
            change = self._treat(member, keywords) if self.peer.varies else {}
            if member.slices and not member.is_sliced:
                self.note(SLICES, name=member.name)
            treatments.setdefault(tuple(change.items()), []).append(member)
        for key, members in treatments.items():
            yield {**keywords, **dict(key)}, members

    def _count(self, member: Member) -> int:
        """Return the steps that a parameter has taken; some peers count them in the group."""
        return count_steps(member.entry.get("step", (self.saved or {}).get("step")), f"'step' of {member.name}")

    def _read(self, member: Member) -> None:
        """Read what our state will hold of a parameter."""
        name, settings = member.name, self.settings
        if member.entry:
            moments = self.peer.read(self.args, member, self._count(member))
            member.moments = self.peer.correct(moments, {**self.peer.defaults, **(self.saved or {})})
        if member.moments is None:
            return
        member.shape, momentum = member.moments.shape, member.moments.momentum if settings.beta1 else None
        offset = self.args[self.peer.step_offset] if self.peer.step_offset else 0
        if member.moments.step < offset:
            raise ValueError(f"{name} has taken {member.moments.step} steps, fewer than the offset {offset}")
        if settings.beta1 and momentum is None:
            raise ValueError(f"the state of {name} has no {self.peer.format.momentum!r}, but its group has momentum")
        if momentum is not None and settings.momentum_dtype == "bfloat16":
            momentum = momentum.bfloat16()
        member.moments = replace(member.moments, step=member.moments.step - offset, momentum=momentum)

    def _treat(self, member: Member, keywords: Keywords) -> Keywords:
        """Return what must change of our keywords so that ours factors a parameter as the peer does."""
        shape, name = member.shape, member.name
        if shape is None:
            raise ValueError(f"{name} has no state, so that its shape is unknown: pass params")
        axes = self.peer.rule(self.args, name, shape) if member.moments is None else member.moments.axes
        if axes and 1 in (shape[axes[0]], shape[axes[1]]):  # ours does not factor it: the same, for less
            axes = None
        sliced: Keywords = {"per_slice": True} if member.is_sliced else {}
        if set(factored_axes(shape, {**keywords, **sliced}) or ()) == set(axes or ()):
            return sliced
        if not axes:
            return {"factored": False, **sliced}
        first = 1 if member.is_sliced else 0  # the axes that we name are those of a slice
        return {"axes": (axes[0] - first, axes[1] - first), "min_factored": 0, **sliced}


def translate(settings: Settings, peer: Peer) -> tuple[dict[str, Any], list[str]]:
    """Return the peer's arguments for a group of ours, and what will differ; refuse keywords that would be lost."""
    assert peer.back is not None
    table = {name: a.theirs(getattr(settings, a.keyword)) for name, a in peer.arguments.items() if a.keyword}
    own, notes = peer.back(settings)
    args = {**peer.defaults, **table, **own}
    back_again = Group(peer, args, []).keywords
    lost = [
        f"{keyword.name}={value!r}"
        for keyword in fields(settings)
        if (value := getattr(settings, keyword.name)) != back_again.get(keyword.name, keyword.default)
        and keyword.name not in _without_effect(settings, peer)
    ]
    if lost:
        raise ValueError(f"{peer.name} has nothing like {', '.join(lost)}")
    if settings.on_nonfinite == "skip" and "on_nonfinite" not in back_again:
        notes = [*notes, NOT_FINITE.format(peer=peer.name)]
    return args, notes


def _without_effect(settings: Settings, peer: Peer) -> set[str]:
    """Return keywords that the peer does not need to have for the same steps."""
    unused = {"axes", "min_factored"}  # the shapes of the statistics say which
    unused.add("eps")  # ε₂ is the same, and how ε₁ differs is in the notes
    if not settings.beta1:
        unused |= {"momentum_of", "momentum_dtype"}
    if not settings.beta1 or settings.momentum_dtype == "float32":
        unused.add("momentum_rounding")
    if not settings.weight_decay or _decay(settings) == _decay(replace(settings, **peer.fixed)):
        unused.add("weight_decay_by")
    if settings.rounding != "stochastic":
        unused.add("seed")
    if settings.on_nonfinite == "ignore":  # what all others do
        unused.add("on_nonfinite")
    return unused


def _decay(s: Settings) -> str | float:
    """Return what weight decay is by, "rho" for all that is the same as it."""
    is_rho = (s.weight_decay_by == "alpha" and not s.relative) or (s.weight_decay_by == "lr" and s.lr_decay is None)
    return "rho" if is_rho else s.weight_decay_by


def plain(value: Any) -> Any:
    """Return a number for a tensor of one element, as a learning rate may be, and a tuple for a list."""
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
