"""`migrate` and `like`: from a peer's groups and state to ours."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from adafactor.core.settings import Settings
from adafactor.migration import back, fairseq, timm, torch_optim, trees
from adafactor.migration.foreign import SIGNS, recognise
from adafactor.migration.form import (
    MigrationWarning,
    Moments,
    Named,
    Peer,
    StateDict,
    check,
    checked,
    is_half,
    match,
    names,
)
from adafactor.migration.groups import Group, Member, express, kind, ours, settings, split
from adafactor.optimizer import Adafactor

PEERS = {
    "torch": torch_optim.ADAFACTOR,
    "transformers": fairseq.TRANSFORMERS,
    "fairseq": fairseq.FAIRSEQ,
    "timm": timm.TIMM,
    "timm_bv": timm.TIMM_BV,
    "pytorch_optimizer": fairseq.PYTORCH_OPTIMIZER,
    "optax": trees.OPTAX,
    "t5x": trees.T5X,
    "adamw": torch_optim.ADAMW,
}
OURS = "adafactor"
# what values of the wrong type or size lead to: a state dict from a file may hold anything anywhere
DAMAGED = (TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)
TARGETS = (OURS, *back.TARGETS)
READ_TREE = {"optax": trees.read_optax, "t5x": trees.read_t5x}


def migrate(
    state_dict: Any,
    source: str | None = None,
    target: str = OURS,
    *,
    params: Any = None,
    arguments: Mapping[str, Any] | None = None,
    paths: Mapping[str, Any] | None = None,
) -> StateDict:
    """Convert an optimizer's state dict, arguments and statistics, from `source` to `target`.

    Load the result into the optimizer that `like` makes of the same arguments. Where our steps will differ from the
    original's, a `MigrationWarning` says how and how much; what cannot be converted is a ValueError.

    Args:
        state_dict: what the other optimizer's `state_dict()` gave; of optax the state, of T5X its `state_dict`.
        source: "torch", "adamw" (torch.optim's AdamW or Adam), "transformers", "fairseq", "timm", "timm_bv"
            (AdafactorBigVision), "pytorch_optimizer", "optax", "t5x", or "adafactor"; None: told from the keys.
        target: "adafactor", "torch" or "transformers".
        params: the parameters in the optimizer's order (tensors, named tensors, groups, or a mapping from names to
            tensors or shapes): their number, names and shapes are checked. Needed for optax and T5X.
        arguments: the other optimizer's arguments that its state dict does not hold: all of optax and T5X; `lr`, and
            of AdamW `betas`, may be given anew, for the steps to come.
        paths: for optax and T5X, from our names to the paths in their trees where they are not the same, or to pairs
            of a path and the order of axes: `{"weight": ("dense/kernel", (1, 0))}` for a transposed matrix.

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
    shapes = _shapes(params)
    notes: list[str] = []
    converted = state_dict
    if source != OURS:
        peer, arguments = PEERS[source], dict(arguments or {})
        _check_arguments(peer, arguments)
        try:
            if source in READ_TREE:
                groups = _of_tree(state_dict, source, shapes, arguments, paths or {})
            else:
                groups = _of_state_dict(state_dict, peer, shapes, arguments)
            converted, notes = ours(groups), [note for group in groups for note in group.told.notes]
        except DAMAGED as wrong:
            raise ValueError(
                f"the state or the arguments of {peer.name} cannot be converted ({type(wrong).__name__}: {wrong})"
            ) from wrong
        shapes = None  # checked, and our groups may have another order
    if target != OURS:
        converted, more = back.convert(converted, target, shapes)
        notes += more
    _warn(notes)
    result: StateDict = converted
    return result


def like(source: str, params: Any, **arguments: Any) -> Adafactor:
    """Our optimizer with another's arguments, so that a training script changes one line.

    Where one of its groups holds parameters that it treats in different ways (say, factors only large ones), ours has
    a group of each kind.

    Args:
        source: as for `migrate`.
        params: as for the other optimizer: parameters, named parameters, or groups with arguments of their own.
        arguments: the other optimizer's keyword arguments.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = like("transformers", model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
        >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["relative"]
        (0.001, False)
    """
    _check_names(source, OURS)
    peer = PEERS[source]
    _check_arguments(peer, arguments)
    defaults, groups = peer.translate({**peer.defaults, **arguments}, None), []
    for given in _grouped(params):
        overrides = {key: value for key, value in given.items() if key != "params"}
        theirs = {**peer.defaults, **arguments, **overrides}
        told = peer.translate(theirs, None)
        members = [_new_member(peer, theirs, number, item) for number, item in enumerate(given["params"])]
        groups.append(Group(told, members, {k: v for k, v in overrides.items() if k not in peer.defaults}))
    mine = [{**keywords, "params": [m.item for m in members]} for keywords, members in split(groups)]
    keywords = {name: value for name, value in settings(defaults, {}).items() if name in Settings.__dataclass_fields__}
    optimizer = Adafactor(mine, **keywords)
    _warn([note for group in groups for note in group.told.notes])
    return optimizer


def guess(state_dict: Any) -> str:
    """Whose state it is, told from its keys, or an error that lists them."""
    if source := recognise(state_dict):
        groups = state_dict["param_groups"] if source == "transformers" else []
        if any(group["scale_parameter"] is True and group.get("relative_step") is not True for group in groups):
            raise ValueError(
                "the state dict is of transformers' or of fairseq's Adafactor, whose lr mean different things with "
                "scale_parameter=True and relative_step=False: say which"
            )
        return source
    if source := trees.recognise(state_dict):
        return source
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    seen: Any = groups[0] if isinstance(groups, list) and groups else state_dict
    keys = ", ".join(map(repr, seen)) if isinstance(seen, Mapping) else type(seen).__name__
    raise ValueError(f"it cannot be told whose state this is, which has {keys[:300]}: say one of {', '.join(PEERS)}")


def _check_owner(state_dict: Any, source: str) -> None:
    """Refuse the state of an optimizer that is plainly another one."""
    owner = recognise(state_dict)
    if owner is None or owner == source or (owner, source) == ("transformers", "fairseq"):
        return
    name, keys = SIGNS[owner]
    expected = SIGNS[source][0] if source in SIGNS else PEERS[source].name
    raise ValueError(
        f"this is the state of {name} (its groups have {', '.join(map(repr, sorted(keys)))}), not of {expected}: "
        f"{'there is nothing to convert' if owner == OURS else f'its source is {owner!r}'}"
    )


def _check_names(source: str, target: str) -> None:
    if source != OURS and source not in PEERS:
        raise ValueError(f"source={source!r} must be one of {', '.join(map(repr, [*PEERS, OURS]))}")
    if target not in TARGETS:
        raise ValueError(f"target={target!r} must be one of {', '.join(map(repr, TARGETS))}")
    if source == target:
        raise ValueError(f"source and target are both {source!r}: there is nothing to convert")


def _check_arguments(peer: Peer, arguments: Mapping[str, Any]) -> None:
    if unknown := [name for name in arguments if name not in peer.defaults]:
        raise ValueError(f"{peer.name} has no argument {unknown[0]!r}; it has {', '.join(peer.defaults)}")


def _warn(notes: Iterable[str]) -> None:
    for note in dict.fromkeys(notes):
        warnings.warn(note, MigrationWarning, stacklevel=3)


def _grouped(params: Any) -> list[dict[str, Any]]:
    """Parameters or groups, as for any torch optimizer, as groups with lists."""
    if isinstance(params, Tensor):
        raise TypeError("params must be parameters or groups, not one tensor")
    items: Any = params.items() if isinstance(params, Mapping) else params
    found = list(items)
    groups: list[Mapping[str, Any]] = found if found and isinstance(found[0], Mapping) else [{"params": found}]
    return [{**g, "params": [g["params"]] if isinstance(g["params"], Tensor) else list(g["params"])} for g in groups]


def _shapes(params: Any) -> Named | None:
    """The name and shape of every parameter, in order."""
    if params is None:
        return None
    shapes: Named = []
    for group in _grouped(params):
        for item in group["params"]:
            named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
            value: Any = item[1] if named else item
            shapes.append((item[0] if named else None, tuple(int(n) for n in getattr(value, "shape", value))))
    return shapes


def _new_member(peer: Peer, theirs: Mapping[str, Any], number: int, item: Any) -> Member:
    name, parameter = item if isinstance(item, tuple) else (None, item)
    where, shape = name or f"parameter {number}", tuple(parameter.shape)
    return Member(where, item, shape, name, kind=kind(peer, theirs, shape, where))


def _of_state_dict(state_dict: Any, peer: Peer, shapes: Named | None, arguments: dict[str, Any]) -> list[Group]:
    """Every group of a torch optimizer's state dict, its entries read and checked."""
    saved, state = checked(state_dict)
    known = match(saved, shapes)
    groups = []
    for group in saved:
        if both := [
            name for name in arguments if name not in peer.anew and group.get(name, ...) not in (..., arguments[name])
        ]:
            raise ValueError(f"{both[0]}={arguments[both[0]]!r} is given, but the state dict has {group[both[0]]!r}")
        theirs = {**peer.defaults, **group, **arguments, "given": arguments, "saved": group}
        members = []
        for key, name in zip(group["params"], names(group), strict=True):
            where = name or f"parameter {key}"
            member = Member(where, key, known.get(key), name, kind=("outer", peer.axes))
            if entry := state.get(key):
                member.moments = _moments(peer, theirs, entry, member)
                member.shape = member.moments.shape
            if member.shape is not None:
                member.kind = kind(peer, theirs, member.shape, where)
            elif peer.factored:
                raise ValueError(f"{where} has no state, so that its shape is unknown: pass params")
            members.append(member)
        steps = [m.moments.step for m in members if m.moments is not None]
        told = peer.translate(theirs, max(steps, default=0))
        told.notes += [peer.doubt] if peer.doubt else []
        if missing := [name for name in peer.unsaved if name not in arguments]:
            told.notes.append(
                f"state dicts of {peer.name} do not hold {', '.join(missing)}: taken as its defaults, pass others in "
                "arguments"
            )
        mine = {*peer.defaults, *peer.internal, "params", "param_names"}
        groups.append(Group(told, members, {k: v for k, v in group.items() if k not in mine}))
    return groups


def _moments(peer: Peer, theirs: Mapping[str, Any], entry: Any, member: Member) -> Moments:
    if not isinstance(entry, Mapping):
        raise ValueError(f"the state of {member.where} is {type(entry).__name__}, not a dict")
    assert peer.read is not None
    moments = peer.read(theirs, entry, member.shape, member.where)
    if member.shape is not None and moments.shape != member.shape:
        raise ValueError(f"{member.where} has the shape {member.shape}, its state is of the shape {moments.shape}")
    return check(moments, is_half(entry), member.where)


def _of_tree(
    tree: Any,
    source: str,
    shapes: Named | None,
    arguments: dict[str, Any],
    paths: Mapping[str, Any],
) -> list[Group]:
    """One group of all parameters: a tree has no groups."""
    peer = PEERS[source]
    if shapes is None or any(name is None for name, _ in shapes):
        raise ValueError(f"{peer.name} does not say which shape a state is of: pass params with names")
    theirs = {**peer.defaults, **arguments}
    leaves = [trees.leaf(str(name), shape, paths) for name, shape in shapes]
    if unknown := set(paths) - {item.name for item in leaves}:
        raise ValueError(f"paths has {min(unknown)!r}, which is none of the parameters")
    read = READ_TREE[source](tree, theirs, leaves)
    told = peer.translate(theirs, read[0][0].step if read else 0)
    members = [
        Member(item.name, number, moments.shape, item.name, moments, express(moments.shape, axes, item.name))
        for number, (item, (moments, axes)) in enumerate(zip(leaves, read, strict=True))
    ]
    return [Group(told, members)]
