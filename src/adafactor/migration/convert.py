"""`migrate` and `like`: from another's groups and state to ours, and back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from adafactor.migration.peer import Group, MigrationWarning, Peer, translate
from adafactor.migration.peers import OURS, PEERS, TARGETS
from adafactor.migration.state import Arguments, Member, StateDict, read_groups, refuse_damage
from adafactor.optimizer import Adafactor

INTERNAL = ("params", "param_names", "relative_step")  # what groups may hold besides arguments


def migrate(
    state_dict: Any,
    source: str | None = None,
    target: str = "adafactor",
    *,
    params: Any = None,
    arguments: Mapping[str, Any] | None = None,
) -> StateDict:
    """Convert an optimizer's state dict, arguments and statistics, from `source` to `target`.

    Load the result into the optimizer that `like` makes of the same arguments. Where our steps will differ from the
    original's, a `MigrationWarning` says how; what cannot be converted is a ValueError.

    Args:
        state_dict: what the other optimizer's `state_dict()` gave.
        source: "torch", "transformers", "adamw" (torch.optim's AdamW or Adam), or "adafactor"; None: found by the keys.
        target: "adafactor", "torch" or "transformers".
        params: the parameters in the optimizer's order (tensors, named tensors, groups, or a mapping from names to
            tensors or shapes): their number, names and shapes are checked.
        arguments: the other optimizer's arguments that its state dict does not hold; `lr`, and of AdamW `betas`, may
            be given anew, for the steps to come.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(4, 2))
        >>> theirs = torch.optim.Adafactor([weight])
        >>> weight.grad = torch.ones(4, 2)
        >>> theirs.step()
        >>> ours = like("torch", [weight])
        >>> ours.load_state_dict(migrate(theirs.state_dict(), source="torch"))
    """
    source = guess(state_dict) if source is None else source
    _check_names(source, target)
    _check_owner(state_dict, source)
    peer, given = PEERS[source], dict(arguments or {})
    own = None if params is None else [member for _, members in _read_params(params) for member in members]
    _check_arguments(peer, given)
    with refuse_damage(f"the state or the arguments of {peer.name}"):
        groups = [_read_group(peer, *group, given) for group in read_groups(state_dict, own)]
        converted, notes = _write(groups, PEERS[target])
    _warn(notes)
    return converted


def like(source: str, params: Any, **arguments: Any) -> Adafactor:
    """Make our optimizer with another's arguments, so that a training script changes one line.

    Args:
        source: "torch", "transformers" or "adamw".
        params: as for the other optimizer: parameters, named parameters, or groups with arguments of their own.
        arguments: the other optimizer's keyword arguments.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = like("transformers", model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
        >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["relative"]
        (0.001, False)
    """
    _check_names(source, "adafactor")
    peer = PEERS[source]
    _check_arguments(peer, arguments)
    args = {**peer.defaults, **arguments}
    groups = []
    for overrides, members in _read_params(params):
        _check_arguments(peer, [key for key in overrides if key in OURS.arguments])
        extras = {key: value for key, value in overrides.items() if key not in args}
        groups.append(Group(peer, {**args, **overrides}, members, given=args, extras=extras))
    ours = [
        {**group.extras, **asdict(group.settings), "params": [member.item for member in group.members]}
        for group in groups
    ]
    optimizer = Adafactor(ours, **asdict(Group(peer, args, given=args).settings))
    _warn(note for group in groups for note in group.notes)
    return optimizer


def guess(state_dict: Any) -> str:
    """Return whose state it is by its keys, or raise an error that lists them."""
    groups = _groups(state_dict)
    source = _recognise(groups)
    if source is None:
        unknown = groups[0] if groups else state_dict
        keys = ", ".join(map(repr, unknown))[:300] if isinstance(unknown, Mapping) else type(unknown).__name__
        raise ValueError(f"it cannot be told whose state this is, which has {keys}: say one of {', '.join(PEERS)}")
    return source


def _groups(state_dict: Any) -> list[Mapping[str, Any]]:
    """Return the groups of a state dict; none if it is not one."""
    groups: Any = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    is_list = isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) for group in groups)
    return list(groups) if is_list else []


def _recognise(groups: list[Mapping[str, Any]]) -> str | None:
    """Return the optimizer with such groups, ours first; timm's have all that transformers' have, and `eps_scale`."""
    for name, peer in reversed(PEERS.items()) if groups else ():
        if all(peer.signs <= group.keys() and "eps_scale" not in group for group in groups):
            return name
    return None


def _check_owner(state_dict: Any, source: str) -> None:
    """Refuse the state of an optimizer that is plainly another one."""
    owner = _recognise(_groups(state_dict))
    if owner is None or owner == source:
        return
    keys = ", ".join(map(repr, sorted(PEERS[owner].signs)))
    advice = "there is nothing to convert" if owner == "adafactor" else f"its source is {owner!r}"
    raise ValueError(
        f"this is the state of {PEERS[owner].name} (its groups have {keys}), not of {PEERS[source].name}: {advice}"
    )


def _check_names(source: str, target: str) -> None:
    for what, name, names in (("source", source, (*PEERS,)), ("target", target, TARGETS)):
        if name not in names:
            raise ValueError(f"{what}={name!r} must be one of {', '.join(map(repr, names))}")
    if source == target:
        raise ValueError(f"source and target are both {source!r}: there is nothing to convert")


def _check_arguments(peer: Peer, arguments: Iterable[str]) -> None:
    if unknown := [name for name in arguments if name not in peer.arguments]:
        raise ValueError(f"{peer.name} has no argument {unknown[0]!r}; it has {', '.join(peer.arguments)}")


def _warn(notes: Iterable[str]) -> None:
    for note in dict.fromkeys(notes):
        warnings.warn(note, MigrationWarning, stacklevel=3)


def _read_params(params: Any) -> list[tuple[dict[str, Any], list[Member]]]:
    """Return the groups that any torch optimizer takes, each with its parameters and what else it says."""
    if isinstance(params, Tensor):
        raise TypeError("params must be parameters or groups, not one tensor")
    items = list(params.items() if isinstance(params, Mapping) else params)
    groups: list[Mapping[str, Any]] = items if items and isinstance(items[0], Mapping) else [{"params": items}]
    result = []
    for group in groups:
        members = []
        for number, item in enumerate([group["params"]] if isinstance(group["params"], Tensor) else group["params"]):
            is_named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
            name, value = item if is_named else (f"parameter {number}", item)
            members.append(Member(name, item, is_named, tuple(int(n) for n in getattr(value, "shape", value))))
        result.append(({key: value for key, value in group.items() if key != "params"}, members))
    return result


def _read_group(peer: Peer, saved: Arguments, members: list[Member], given: Arguments) -> Group:
    """Put a group of a state dict into our words."""
    for name, value in given.items():
        if name not in peer.renewable and saved.get(name, ...) not in (..., value):
            raise ValueError(f"{name}={value!r} is given, but the state dict has {saved[name]!r}")
    extras = {key: value for key, value in saved.items() if key not in (*peer.arguments, *INTERNAL)}
    return Group(peer, {**peer.defaults, **saved, **given}, members, saved, given, extras)


def _write(groups: list[Group], peer: Peer) -> tuple[StateDict, list[str]]:
    """Make a peer's state dict, parameters numbered anew; names that stand for numbers stay. And what differs."""
    entries: dict[int | str, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    notes: list[str] = []
    number = 0
    for group in groups:
        args, differences = translate(group.settings, peer)  # refuses what cannot be expressed before tensors are read
        group.read()
        keys = [m.item if isinstance(m.item, str) else number + i for i, m in enumerate(group.members)]
        is_named = bool(keys) and all(m.is_named for m in group.members)
        named = {"param_names": [m.name for m in group.members]} if is_named else {}
        param_groups.append({**group.extras, **args, "params": keys, **named})
        stepped = [(key, m) for key, m in zip(keys, group.members, strict=True) if m.moments is not None]
        entries |= {key: _write_entry(m, group, peer, args) for key, m in stepped}
        notes += [*group.notes, *differences]
        number += len(keys)
    return {"state": entries, "param_groups": param_groups}, notes


def _write_entry(member: Member, group: Group, peer: Peer, args: Arguments) -> dict[str, Any]:
    """Return the peer's state of a parameter, which it must factor as ours does with the group's keywords."""
    moments, name = member.moments, member.name
    assert moments is not None
    own, axes = (
        each.rule(keywords, moments.shape) for each, keywords in ((OURS, asdict(group.settings)), (peer, args))
    )
    if axes and own and set(own) != set(axes):
        raise ValueError(
            f"{name} of shape {moments.shape} is factored over the axes {own}; {peer.name} would factor it over the "
            "last two axes"
        )
    if axes and not own and 1 not in (moments.shape[axis] for axis in axes):
        raise ValueError(f"{name} of shape {moments.shape} has its second moment whole; {peer.name} would factor it")
    return peer.format(group.settings).write(moments, axes)
