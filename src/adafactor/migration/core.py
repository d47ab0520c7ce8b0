"""`migrate` and `like`: from another's groups and state to ours, and back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from adafactor.core.settings import Settings, rename_momentum
from adafactor.migration import fairseq, torch_optim, trees
from adafactor.migration.peer import OURS, Group, Keywords, MigrationWarning, Peer, translate
from adafactor.migration.state import Arguments, Member, StateDict, factored_axes, read_groups, refuse_damage
from adafactor.optimizer import Adafactor

PEERS = {
    "torch": torch_optim.ADAFACTOR,
    "transformers": fairseq.TRANSFORMERS,
    "fairseq": fairseq.FAIRSEQ,
    "timm": fairseq.TIMM,
    "timm_bv": fairseq.TIMM_BV,
    "pytorch_optimizer": fairseq.PYTORCH_OPTIMIZER,
    "optax": trees.OPTAX,
    "t5x": trees.T5X,
    "adamw": torch_optim.ADAMW,
    "adafactor": OURS,
}
TARGETS = ("adafactor", *(name for name, peer in PEERS.items() if peer.back is not None and peer is not OURS))
INTERNAL = ("params", "param_names", "step", "relative_step")  # what groups may hold besides arguments


def migrate(
    state_dict: Any,
    source: str | None = None,
    target: str = "adafactor",
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
            (AdafactorBigVision), "pytorch_optimizer", "optax", "t5x", or "adafactor"; None: found by the keys.
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
    peer, given = PEERS[source], dict(arguments or {})
    own = None if params is None else [member for _, members in _read_params(params) for member in members]
    with refuse_damage(f"the state or the arguments of {peer.name}"):
        _check_arguments(peer, given)
        if source in trees.FIELDS:
            args = {**peer.defaults, **given}
            members = trees.read(state_dict, peer, args, own, paths or {})
            groups = [Group(peer, args, members, saved={}, given=given)]  # a tree has no groups
        else:
            groups = [_read_group(peer, *group, given) for group in read_groups(state_dict, own)]
        converted, notes = _write(groups, PEERS[target])
    _warn(notes)
    return converted


def like(source: str, params: Any, **arguments: Any) -> Adafactor:
    """Make our optimizer with another's arguments, so that a training script changes one line.

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
    _check_names(source, "adafactor")
    peer = PEERS[source]
    _check_arguments(peer, arguments)
    args = {**peer.defaults, **arguments}
    defaults = asdict(Group(peer, args, [], given=args).settings)
    groups, ours = [], []
    for overrides, members in _read_params(params):
        _check_arguments(peer, [key for key in overrides if key in OURS.arguments])
        extras = {key: value for key, value in overrides.items() if key not in args}
        groups.append(Group(peer, {**args, **overrides}, members, given=args, extras=extras))
        for keywords, part in groups[-1].split():
            ours.append({**groups[-1].extras, **keywords, "params": [member.item for member in part]})
    if not any(group["beta1"] for group in ours):
        defaults["momentum_dtype"] = Settings.momentum_dtype  # another without momentum is refused
    optimizer = Adafactor(ours, **defaults)
    _warn(note for group in groups for note in group.notes)
    return optimizer


def guess(state_dict: Any) -> str:
    """Return whose state it is by its keys, or raise an error that lists them."""
    groups = _groups(state_dict)
    source = _recognise(groups) or trees.recognise(state_dict)
    if source is None:
        unknown = groups[0] if groups else state_dict
        keys = ", ".join(map(repr, unknown))[:300] if isinstance(unknown, Mapping) else type(unknown).__name__
        raise ValueError(f"it cannot be told whose state this is, which has {keys}: say one of {', '.join(PEERS)}")
    if source == "transformers" and any(
        group["scale_parameter"] is True and group.get("relative_step") is not True for group in groups
    ):
        raise ValueError(
            "the state dict is of transformers' or of fairseq's Adafactor, whose lr mean different things with "
            "scale_parameter=True and relative_step=False: say which"
        )
    return source


def _groups(state_dict: Any) -> list[Mapping[str, Any]]:
    """Return the groups of a state dict; none if it is not one."""
    groups: Any = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    is_list = isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) for group in groups)
    return list(groups) if is_list else []


def _recognise(groups: list[Mapping[str, Any]]) -> str | None:
    """Return the optimizer with such groups: ours first, and timm's, which have all of transformers', before it."""
    for name, peer in reversed(PEERS.items()) if groups else ():
        if peer.signs and all(peer.signs <= group.keys() for group in groups):
            return name
    return None


def _check_owner(state_dict: Any, source: str) -> None:
    """Refuse the state of an optimizer that is plainly another one."""
    owner = _recognise(_groups(state_dict))
    if owner is None or owner == source or (owner, source) == ("transformers", "fairseq"):
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
    if peer is OURS:
        saved = dict(saved)
        rename_momentum(saved)
    for name, value in given.items():
        if name not in peer.renewable and saved.get(name, ...) not in (..., value):
            raise ValueError(f"{name}={value!r} is given, but the state dict has {saved[name]!r}")
    extras = {key: value for key, value in saved.items() if key not in (*peer.arguments, *INTERNAL)}
    return Group(peer, {**peer.defaults, **saved, **given}, members, saved, given, extras)


def _write(groups: list[Group], peer: Peer) -> tuple[StateDict, list[str]]:
    """Make a peer's state dict, parameters numbered anew; names that stand for numbers stay. And what differs."""
    entries: dict[int | str, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    differences: list[str] = []
    number = 0
    for group in groups:
        translate(group.settings, peer)  # refuses what cannot be expressed before tensors are read
        for keywords, members in group.split():
            args, notes = translate(Settings(**keywords), peer)
            keys = [m.item if isinstance(m.item, str) else number + i for i, m in enumerate(members)]
            is_named = bool(members) and all(m.is_named for m in members)
            named = {"param_names": [m.name for m in members]} if is_named else {}
            param_groups.append({**group.extras, **args, "params": keys, **named})
            stepped = [(key, m) for key, m in zip(keys, members, strict=True) if m.moments is not None]
            entries |= {key: _write_entry(m, keywords, peer, args) for key, m in stepped}
            differences += notes
            number += len(members)
    return {"state": entries, "param_groups": param_groups}, [n for g in groups for n in g.notes] + differences


def _write_entry(member: Member, keywords: Keywords, peer: Peer, args: Arguments) -> dict[str, Any]:
    """Return the peer's state of a parameter, which it must factor as ours does with these keywords."""
    moments, name = member.moments, member.name
    assert moments is not None
    own, axes = factored_axes(moments.shape, keywords), peer.rule(args, name, moments.shape)
    if axes and own and set(own) != set(axes):
        raise ValueError(
            f"{name} of shape {moments.shape} is factored over the axes {own}; {peer.name} would factor it over the "
            "last two axes"
        )
    if axes and not own and 1 not in (moments.shape[axis] for axis in axes):
        raise ValueError(f"{name} of shape {moments.shape} has its second moment whole; {peer.name} would factor it")
    entry = peer.format.write(moments, axes)
    if member.is_sliced:
        entry["step"] = entry["step"].repeat(moments.shape[0])
    return entry
