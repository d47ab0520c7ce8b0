"""Ours back to the peers that can go on with the same steps."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from adafactor.core.settings import Settings
from adafactor.migration import state
from adafactor.migration.peer import KEYWORDS, Group, Peer, last_two
from adafactor.migration.state import Arguments, Member, StateDict, factored_axes, read_groups

NOT_FINITE = "{peer} steps with NaN and infinite gradients too, which ruins the parameters; ours skips such steps"


def convert(state_dict: Any, peer: Peer, params: list[Member] | None) -> tuple[StateDict, list[str]]:
    """Return the peer's state dict of ours, and what will differ."""
    groups, notes = [], []
    converted: dict[Any, dict[str, Any]] = {}
    for group, members in read_groups(state_dict, params):
        try:
            settings = Settings.of(group)
        except (KeyError, TypeError, ValueError) as wrong:
            raise ValueError(f"the state dict is not of this optimizer: {wrong}") from wrong
        args, differences = translate(settings, peer)
        groups.append({**{k: v for k, v in group.items() if k not in KEYWORDS}, **args})
        notes += differences
        converted |= {m.item: _write_entry(m, vars(settings), peer) for m in members if m.entry}
    return {"state": converted, "param_groups": groups}, notes


def _write_entry(member: Member, keywords: Arguments, peer: Peer) -> dict[str, Any]:
    """Return the peer's state of a parameter, which it factors over the last two axes."""
    moments, name = state.OURS.read(member, lambda shape: factored_axes(shape, keywords)), member.name
    axes = last_two({}, moments.shape, name)
    if axes and moments.axes and set(moments.axes) != set(axes):
        raise ValueError(
            f"{name} of shape {moments.shape} is factored over the axes {moments.axes}; {peer.name} would factor it "
            "over the last two axes"
        )
    if axes and not moments.axes and 1 not in moments.shape[-2:]:
        raise ValueError(f"{name} of shape {moments.shape} has its second moment whole; {peer.name} would factor it")
    return peer.format.write(moments, axes)


def translate(settings: Settings, peer: Peer) -> tuple[dict[str, Any], list[str]]:
    """Return the peer's arguments for a group of ours, and what will differ; refuse keywords that would be lost."""
    assert peer.back is not None
    own, notes = peer.back(settings)
    args = {**peer.defaults, **own}
    back_again = Group(peer, args, []).keywords
    lost = [
        f"{keyword.name}={value!r}"
        for keyword in fields(settings)
        if (value := getattr(settings, keyword.name)) != back_again.get(keyword.name, keyword.default)
        and keyword.name not in _without_effect(settings, peer)
    ]
    if lost:
        raise ValueError(f"{peer.name} has nothing like {', '.join(lost)}")
    notes = [*notes, *([NOT_FINITE] if settings.on_nonfinite == "skip" else [])]
    return args, [note.format(peer=peer.name) for note in notes]


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
