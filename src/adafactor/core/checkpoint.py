"""Loading a state dict: all of it is checked and copied before anything changes, and keeps its precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from adafactor.core import dtensor
from adafactor.core import state as states
from adafactor.core.gather import entries_of
from adafactor.core.momentum import BUFFERS, blocks_of, buffer
from adafactor.core.settings import Settings
from adafactor.core.warn import warn

Loaded = dict[Tensor, states.State]


def read(state_dict: StateDict, groups: list[dict[str, Any]]) -> Loaded:
    """Make new states of a state dict, or say where it does not fit an optimizer of these groups."""
    saved_groups = state_dict["param_groups"]
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved_groups]:
        return {}  # torch says so itself
    _refuse_foreign(state_dict["state"].values())
    if all("param_names" in group for group in [*groups, *saved_groups]):
        ours, theirs = ([name for group in g for name in group["param_names"]] for g in (groups, saved_groups))
        # the same names in another order are a mistake; other names may be a wrapper's, with a prefix
        if ours != theirs and sorted(ours) == sorted(theirs):
            name, held = next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
            raise ValueError(f"the optimizer has {name!r} where the state dict has {held!r}: another order")
    entries, loaded, converted = dict(state_dict["state"]), Loaded(), False
    named = [[entry.name for entry in entries_of(groups) if entry.group == i] for i in range(len(groups))]
    for group, saved, names in zip(groups, saved_groups, named, strict=True):
        try:
            if missing := [f.name for f in fields(Settings) if f.name not in saved]:
                raise ValueError(f"a group has no {missing[0]!r}")
            settings = Settings.of({**saved, "momentum_dtype": group["momentum_dtype"]})
        except (TypeError, ValueError) as wrong:
            raise ValueError(f"the state dict is not of this optimizer: {wrong}") from wrong
        for p, key, name in zip(group["params"], saved["params"], names, strict=True):
            values, state = entries.pop(key, None), states.State()
            if values:
                _check_entry(values, p, settings, name)
            elif not p.requires_grad:
                continue
            as_saved = replace(settings, momentum_dtype=_format(values or {}, p, settings))
            converted |= as_saved != settings
            states.fit(state, p, as_saved, name)
            _fill(state, values or {})
            states.fit(state, p, settings, name)
            loaded[p] = state
    if entries:
        raise ValueError(f"the state dict has a state {next(iter(entries))!r} that belongs to none of its parameters")
    if converted:
        warn("the state dict has another `momentum_dtype` than this optimizer: its momentum is converted to the latter")
    return loaded


def _format(values: Mapping[str, Any], p: Tensor, settings: Settings) -> str:
    """The `momentum_dtype` of a saved state."""
    kept, is_float = buffer(values), blocks_of(states.factoring_of(p, settings), settings) is None
    if "momentum_scale" in values:
        return "int8"
    if not isinstance(kept, Tensor) or (settings.momentum_dtype == "int8" and is_float):
        return settings.momentum_dtype
    return "bfloat16" if kept.dtype == torch.bfloat16 else "float32"


def _refuse_foreign(entries: Iterable[Any]) -> None:
    """Name the cure for a state dict of another optimizer."""
    for values in entries:
        foreign = set(values) - {"step", "compensation", "momentum_scale", *BUFFERS}
        if foreign and not foreign & {"row", "col", "full"}:
            raise ValueError(
                f"the state dict is of another optimizer: it has {', '.join(map(repr, sorted(foreign)))}. "
                "adafactor.migrate converts it, and so does `adafactor migrate` on the command line"
            )


def _fill(state: states.State, values: Mapping[str, Any]) -> None:
    """Copy what a state dict has for one parameter into its new state, and what users put beside it."""
    for key, value in values.items():
        if key in state:
            dtensor.copy_(state[key], _as_tensor(value))
        else:
            state[key] = deepcopy(value)


def _check_entry(state: states.State, p: Tensor, settings: Settings, name: str) -> None:
    """Refuse what a state dict holds for a parameter before any of it is loaded."""
    states.check(state, p, settings, name)
    step = state.get("step")
    counts = dtensor.local(step).reshape(-1).tolist() if isinstance(step, Tensor) else [step]
    if not all(isinstance(count, (int, float)) and count >= 0 and count % 1 == 0 for count in counts):
        raise ValueError(f"the state of {name} has step={step!r}; it must be whole numbers that are not negative")


def _as_tensor(value: Any) -> Tensor:
    """A tensor as it is, anything else as one on the CPU, whatever torch's default device is."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
