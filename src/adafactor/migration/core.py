"""`migrate` and `like`: from a peer's groups and state to ours, and back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from adafactor.core.settings import Settings
from adafactor.migration import back, fairseq, timm, torch_optim, trees
from adafactor.migration.peer import KEYWORDS, Group, MigrationWarning, Peer, our_state_dict
from adafactor.migration.state import Arguments, Member, StateDict, read_groups, refuse_damage
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
TARGETS = (OURS, *(name for name, peer in PEERS.items() if peer.back is not None))
NAMES = {OURS: "this optimizer", **{name: peer.name for name, peer in PEERS.items()}}
INTERNAL = ("params", "param_names", "step", "relative_step")  # what groups may hold besides arguments
# keys of its groups by which an optimizer is known: ours first, and timm's, which have all of transformers', before it
SIGNS = {
    OURS: frozenset({"lr_decay", "relative", "factored", "decay_rate"}),
    **{name: peer.signs for name, peer in reversed(PEERS.items()) if peer.signs},
}


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
    converted: StateDict = state_dict
    own = None if params is None else [member for _, members in _read_params(params) for member in members]
    notes: list[str] = []
    with refuse_damage(f"the state or the arguments of {NAMES[source]}"):
        if source != OURS:
            peer, given = PEERS[source], dict(arguments or {})
            _check_arguments(peer, given)
            if source in trees.FIELDS:
                args = {**peer.defaults, **given}
                members = trees.read(state_dict, peer, args, own, paths or {})
                groups = [Group(peer, args, members, saved={}, given=given)]  # a tree has no groups
            else:
                groups = _read_state_dict(state_dict, peer, own, given)
            converted, own = our_state_dict(groups), None  # checked, and our groups may have another order
            notes = [note for group in groups for note in group.notes]
        if target != OURS:
            converted, differences = back.convert(converted, PEERS[target], own)
            notes += differences
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
    _check_names(source, OURS)
    peer = PEERS[source]
    _check_arguments(peer, arguments)
    args = {**peer.defaults, **arguments}
    defaults = Group(peer, args, [], given=args).checked_keywords()
    groups = []
    for overrides, members in _read_params(params):
        extras = {key: value for key, value in overrides.items() if key not in args}
        groups.append(Group(peer, {**args, **overrides}, members, given=args, extras=extras))
    ours = [{**keywords, "params": [m.item for m in members]} for g in groups for keywords, members in g.split()]
    if not any(group["beta1"] for group in ours):
        defaults["momentum_dtype"] = Settings.momentum_dtype  # another without momentum is refused
    optimizer = Adafactor(ours, **{name: defaults[name] for name in KEYWORDS})
    _warn(note for group in groups for note in group.notes)
    return optimizer


def recognise(state_dict: Any) -> str | None:
    """Return the key in SIGNS of the optimizer whose state dict this is, or None."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, (list, tuple)) or not groups or not all(isinstance(group, Mapping) for group in groups):
        return None
    return next((name for name, keys in SIGNS.items() if all(keys <= group.keys() for group in groups)), None)


def guess(state_dict: Any) -> str:
    """Return whose state it is by its keys, or raise an error that lists them."""
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
    unknown: Any = groups[0] if isinstance(groups, list) and groups else state_dict
    keys = ", ".join(map(repr, unknown)) if isinstance(unknown, Mapping) else type(unknown).__name__
    raise ValueError(f"it cannot be told whose state this is, which has {keys[:300]}: say one of {', '.join(PEERS)}")


def _check_owner(state_dict: Any, source: str) -> None:
    """Refuse the state of an optimizer that is plainly another one."""
    owner = recognise(state_dict)
    if owner is None or owner == source or (owner, source) == ("transformers", "fairseq"):
        return
    keys = ", ".join(map(repr, sorted(SIGNS[owner])))
    raise ValueError(
        f"this is the state of {NAMES[owner]} (its groups have {keys}), not of {NAMES[source]}: "
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


def _read_params(params: Any) -> list[tuple[dict[str, Any], list[Member]]]:
    """Return the groups that any torch optimizer takes, each with its parameters and what else it says."""
    if isinstance(params, Tensor):
        raise TypeError("params must be parameters or groups, not one tensor")
    items = list(params.items() if isinstance(params, Mapping) else params)
    groups: list[Mapping[str, Any]] = items if items and isinstance(items[0], Mapping) else [{"params": items}]
    result = []
    for group in groups:
        own = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        members = [_new_member(number, item) for number, item in enumerate(own)]
        result.append(({key: value for key, value in group.items() if key != "params"}, members))
    return result


def _new_member(number: int, item: Any) -> Member:
    """Return a parameter that is given as a tensor or a shape, with a name or without."""
    is_named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
    name, value = item if is_named else (f"parameter {number}", item)
    return Member(name, item, is_named, tuple(int(n) for n in getattr(value, "shape", value)))


def _read_state_dict(state_dict: Any, peer: Peer, params: list[Member] | None, given: Arguments) -> list[Group]:
    """Read every group of a torch optimizer's state dict."""
    groups = []
    for group, members in read_groups(state_dict, params):
        for name, value in given.items():
            if name not in peer.renewable and group.get(name, ...) not in (..., value):
                raise ValueError(f"{name}={value!r} is given, but the state dict has {group[name]!r}")
        args = {**peer.defaults, **group, **given}
        for member in members:
            if member.entry:
                moments = peer.read(args, member, group.get("step"))
                member.moments = peer.correct(moments, {**peer.defaults, **group})
                member.shape = moments.shape
        extras = {key: value for key, value in group.items() if key not in (*peer.defaults, *INTERNAL)}
        groups.append(Group(peer, args, members, group, given, extras))
    return groups
