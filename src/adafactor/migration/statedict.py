"""The form of a torch optimizer's state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adafactor.migration.form import Shape

StateDict = dict[str, Any]
Named = list[tuple[str | None, Shape]]  # the parameters in order, some or all with names


def checked(state_dict: Any) -> tuple[list[dict[str, Any]], Mapping[Any, Any]]:
    """The groups and the state of a torch optimizer's state dict, if it is one."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("not an optimizer's state dict: it needs 'state' and 'param_groups'")
    groups, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        raise ValueError("not an optimizer's state dict: 'state' must be a dict and 'param_groups' a list")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), Sequence):
            raise ValueError(f"group {number} of the state dict has no list 'params'")
        if len(group.get("param_names", group["params"])) != len(group["params"]):
            raise ValueError(f"group {number} of the state dict has another number of 'param_names' than of 'params'")
    keys = [key for group in groups for key in group["params"]]
    if len(set(keys)) != len(keys):
        raise ValueError("the state dict has a parameter in two groups")
    if extra := [key for key in state if key not in set(keys)]:
        raise ValueError(f"the state dict has a state for parameter {extra[0]!r}, which is in no group")
    return [dict(group) for group in groups], state


def names(group: Mapping[str, Any]) -> Sequence[str | None]:
    """The names in a group, or None for each parameter."""
    return group.get("param_names") or [None] * len(group["params"])


def match(groups: list[dict[str, Any]], shapes: Named | None) -> dict[Any, Shape]:
    """The shape of each parameter of the state dict: by name where both sides have names, else in order."""
    if shapes is None:
        return {}
    keys = [key for group in groups for key in group["params"]]
    saved = [name for group in groups for name in names(group)]
    given = [name for name, _ in shapes]
    if None not in saved and None not in given:
        for missing, where in ((set(given) - set(saved), "the state dict"), (set(saved) - set(given), "params")):
            if missing:
                raise ValueError(f"{where} lacks {min(str(name) for name in missing)!r}")
        by_name = dict(shapes)
        return {key: by_name[name] for key, name in zip(keys, saved, strict=True)}
    if len(keys) != len(shapes):
        raise ValueError(f"the state dict has {len(keys)} parameters, params has {len(shapes)}")
    return {key: shape for key, (_, shape) in zip(keys, shapes, strict=True)}
