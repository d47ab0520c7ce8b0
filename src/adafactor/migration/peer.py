"""What another implementation is to us: one declaration, from which its groups are put into our words and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from adafactor.core.settings import Settings
from adafactor.migration.state import Arguments, Axes, Format, Member, Moments, Shape, refuse_damage

Keywords = dict[str, Any]  # of ours

NOT_FINITE = "{peer} steps with NaN and infinite gradients too, which ruins the parameters; ours skips such steps"


class MigrationWarning(UserWarning):
    """A difference between the steps of the original and ours, in one sentence."""


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


def clipping(default: float) -> Argument:
    """Declare a threshold, which is infinite where our `clip` is None."""
    return Argument(
        default,
        "clip",
        lambda value: None if value == math.inf else value,
        lambda value: math.inf if value is None else value,
    )


def last_two(args: Arguments, shape: Shape) -> Axes | None:
    """Return the last two axes."""
    return (len(shape) - 2, len(shape) - 1) if len(shape) > 1 else None


@dataclass(frozen=True)
class Peer:
    """One implementation: what its arguments and the keys of its state mean to us."""

    name: str
    arguments: dict[str, Argument]
    fixed: Arguments  # keywords of ours for what it always does
    format: Callable[[Settings], Format]
    signs: frozenset[str]  # keys of its groups by which it is known
    # the axes over which it factors a parameter, from its arguments and the shape
    rule: Callable[[Arguments, Shape], Axes | None] = last_two
    # returns the keywords that do not follow from one argument, and notes what differs
    adjust: Callable[[Group], Keywords] = lambda group: {}
    # moments that are not averages as ours are, made so with the arguments that they were made with
    correct: Callable[[Moments, Arguments], Moments] = lambda moments, args: moments
    renewable: tuple[str, ...] = ("lr",)  # arguments that may be given although its state dicts hold them
    # for the way back: returns the arguments that do not follow from one keyword, and what will differ
    back: Callable[[Settings], tuple[Keywords, list[str]]] | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """All its arguments."""
        return {name: argument.default for name, argument in self.arguments.items()}


@dataclass
class Group:
    """A group of a peer, in our words."""

    peer: Peer
    args: Arguments
    members: list[Member] = field(default_factory=list)
    saved: Arguments | None = None  # what its state holds of the arguments; None for a new optimizer
    given: Arguments = field(default_factory=dict)  # what the caller says of those of the optimizer
    extras: dict[str, Any] = field(default_factory=dict)  # keys that are nobody's argument, such as a scheduler's
    notes: list[str] = field(default_factory=list)  # what differs

    def __post_init__(self) -> None:
        """Translate the arguments."""
        self.args = {name: plain(value) for name, value in self.args.items()}
        with refuse_damage(f"the arguments of {self.peer.name}"):
            table = {a.keyword: a.ours(self.args[name]) for name, a in self.peer.arguments.items() if a.keyword}
            self.keywords: Keywords = {**self.peer.fixed, **table, **self.peer.adjust(self)}

    @property
    def settings(self) -> Settings:
        """Every keyword of our group, checked."""
        try:
            return Settings(**self.keywords)
        except (TypeError, ValueError) as wrong:
            raise ValueError(f"the arguments of {self.peer.name} cannot be expressed: {wrong}") from wrong

    def read(self) -> None:
        """Read what our state will hold of each parameter that has been stepped."""
        settings, form = self.settings, self.peer.format(self.settings)
        for member in self.members:
            if not member.entry:
                continue
            moments = form.read(member, lambda shape: self.peer.rule(self.args, shape))
            if settings.beta1 and moments.momentum is None:
                raise ValueError(f"the state of {member.name} has no {form.momentum!r}, but its group has momentum")
            moments = self.peer.correct(moments, {**self.peer.defaults, **(self.saved or {})})
            member.shape = moments.shape
            member.moments = moments if settings.beta1 else replace(moments, momentum=None)


def translate(settings: Settings, peer: Peer) -> tuple[dict[str, Any], list[str]]:
    """Return the peer's arguments for a group of ours, and what will differ; refuse keywords that would be lost."""
    assert peer.back is not None
    table = {name: a.theirs(getattr(settings, a.keyword)) for name, a in peer.arguments.items() if a.keyword}
    own, notes = peer.back(settings)
    args = {**peer.defaults, **table, **own}
    back_again = Group(peer, args).keywords
    unused = _without_effect(settings, peer)
    lost = [
        f"{keyword.name}={value!r}"
        for keyword in fields(settings)
        if (value := getattr(settings, keyword.name)) != back_again.get(keyword.name, keyword.default)
        and keyword.name not in unused
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
