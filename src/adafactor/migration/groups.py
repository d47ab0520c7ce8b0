"""Our groups: a peer's group for group, split where it treats parameters in different ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adafactor.core.factoring import STEP_DTYPE, find_factoring
from adafactor.core.settings import Settings
from adafactor.migration.form import Arguments, Axes, Moments, Peer, Shape, StateDict, Translation

Kind = tuple[str | bool, Axes | None]  # the keywords `factored` and `axes`
LAST_TWO: Kind = ("outer", (-2, -1))


@dataclass
class Member:
    """A parameter on its way into one of our groups."""

    where: str  # for messages
    item: Any  # what the new group holds: a number, a tensor, or a (name, tensor) pair
    shape: Shape | None
    name: str | None = None
    moments: Moments | None = None
    kind: Kind = LAST_TWO


@dataclass
class Group:
    """A peer's group, translated."""

    told: Translation
    members: list[Member]
    extras: dict[str, Any] = field(default_factory=dict)  # keys that are nobody's argument, such as a scheduler's


def ours(groups: list[Group]) -> StateDict:
    """Our state dict of these groups, parameters numbered anew; names that stand for numbers stay."""
    state: dict[int | str, dict[str, Tensor]] = {}
    saved, number = [], 0
    offsets = {id(m): group.told for group in groups for m in group.members}
    for keywords, members in split(groups):
        keys = [m.item if isinstance(m.item, str) else number + i for i, m in enumerate(members)]
        number += len(members)
        named = {"param_names": [m.name for m in members]} if all(m.name for m in members) else {}
        saved.append({**keywords, "params": keys, **named})
        for key, m in zip(keys, members, strict=True):
            if m.moments is not None:
                state[key] = _state(m, offsets[id(m)], keywords)
    return {"state": state, "param_groups": saved}


def _state(member: Member, told: Translation, keywords: Mapping[str, Any]) -> dict[str, Tensor]:
    moments = member.moments
    assert moments is not None
    step = moments.step - told.step_offset
    if step < 0:
        raise ValueError(f"{member.where} has taken {moments.step} steps, fewer than the offset {told.step_offset}")
    state = {"step": torch.tensor(float(step), dtype=STEP_DTYPE)}
    shapes = find_factoring(moments.shape, keywords["factored"], keywords["axes"])
    if shapes.row_axis is not None and shapes.col_axis is not None:
        state |= {"row": moments.mean(shapes.col_axis), "col": moments.mean(shapes.row_axis)}
    elif moments.whole is not None:
        state["full"] = moments.whole
    else:
        # one of the two axes has length 1: the mean over it is the second moment itself
        axis = next(axis for axis in sorted(moments.over, reverse=True) if moments.shape[axis] == 1)
        state["full"] = moments.over[axis].unsqueeze(axis)
    if keywords["beta1"]:
        if moments.momentum is None:
            raise ValueError(f"the state of {member.where} has no momentum, but its group has one")
        state["momentum"] = moments.momentum * told.momentum_scale
    return {key: value.to(torch.promote_types(value.dtype, torch.float32)).clone() for key, value in state.items()}


def split(groups: list[Group]) -> list[tuple[dict[str, Any], list[Member]]]:
    """Our groups: one of each, or of each kind of parameter where a peer treats some differently."""
    result = []
    for group in groups:
        kinds: dict[Kind, list[Member]] = {}
        for member in group.members:
            kinds.setdefault(member.kind, []).append(member)
        for (factored, axes), members in (kinds or {LAST_TWO: []}).items():
            keywords = {**settings(group.told, group.extras), "factored": factored, "axes": axes}
            result.append((keywords, members))
    return result


def kind(peer: Peer, theirs: Arguments, shape: Shape, where: str) -> Kind:
    """`factored` and `axes` that make ours treat a parameter as its peer does."""
    if peer.factored is None:
        return "outer", peer.axes
    axes = peer.factored(theirs, shape, where)
    return express(shape, axes, where)


def express(shape: Shape, axes: Axes | None, where: str) -> Kind:
    """The same for a tensor whose second moment the peer keeps whole (no axes) or factors over these axes."""
    options: list[Kind] = [("outer", None), (False, None)] if axes is None else [("outer", None), ("outer", axes)]
    for factored, named in options:
        shapes = find_factoring(shape, factored, named)
        if axes is None or 1 in (shape[axes[0]], shape[axes[1]]):
            fits = shapes.estimator == "full"
        else:
            fits = {shapes.row_axis, shapes.col_axis} == {axis % len(shape) for axis in axes}
        if fits:
            return factored, named
    raise ValueError(f"{where} of shape {shape} cannot be factored over the axes {axes}")


def settings(told: Translation, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Every keyword of a group, checked."""
    names = Settings.__dataclass_fields__
    given = {key: value for key, value in told.keywords.items() if key in names}
    try:
        checked = Settings(**given)
    except (TypeError, ValueError) as wrong:
        raise ValueError(f"the arguments cannot be expressed: {wrong}") from wrong
    kept = {k: v for k, v in extras.items() if k not in names and (told.keeps_lr or k != "initial_lr")}
    more = {key: value for key, value in told.keywords.items() if key not in names}
    return {**kept, **{name: getattr(checked, name) for name in names}, **more}
