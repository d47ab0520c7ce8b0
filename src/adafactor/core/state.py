"""A parameter's state: made, checked, and repaired when the model was moved, converted or given other settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adafactor.core import dtensor, momentum
from adafactor.core.factoring import STEP_DTYPE, Factored, Factoring, find_factoring, is_stack, statistics_dtype
from adafactor.core.rounding import SIXTEEN_BIT
from adafactor.core.settings import Settings

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


State = dict[str, Any]  # of a parameter: tensors, and what users put beside them


def factoring_of(p: Tensor, settings: Settings) -> Factoring:
    """Which axes of a parameter are factored under these settings."""
    s = settings
    return find_factoring(tuple(p.shape), s.factored, s.axes, s.min_factored, s.per_slice)


def is_sliced(p: Tensor, settings: Settings) -> bool:
    """Whether the slices of a parameter along its first axis are stepped as parameters of their own."""
    return settings.per_slice and is_stack(tuple(p.shape))


def new_state(p: Tensor, factoring: Factoring, settings: Settings, name: str) -> State:
    """Make the state of a parameter that has taken no step."""
    dtype = statistics_dtype(p.dtype)
    state: State = {"step": _new_count(p, settings)}
    for key, shape in factoring.statistics.items():
        if key == "full":
            state[key] = torch.zeros_like(p, dtype=dtype)  # lies in memory as the parameter does
        elif dtensor.is_sharded(p) and isinstance(factoring, Factored):
            state[key] = dtensor.zero_means(p, factoring.summed_axis(key), dtype)
        else:
            state[key] = torch.zeros(shape, dtype=dtype, device=p.device)
    _add_missing(state, p, factoring, settings, name)
    return {key: value.detach() for key, value in state.items()}


def _new_count(p: Tensor, settings: Settings) -> Tensor:
    """Zero steps of a parameter, or of each of its slices, cut as these are."""
    if is_sliced(p, settings) and dtensor.is_sharded(p):
        return dtensor.zero_counts(p, STEP_DTYPE)
    return torch.zeros(p.shape[:1] if is_sliced(p, settings) else (), dtype=STEP_DTYPE, device=p.device)


def fit(state: State, p: Tensor, settings: Settings, name: str) -> None:
    """Make a state, or make it fit settings that may have been edited since; raise before anything is changed."""
    check(state, p, settings, name)
    factoring = factoring_of(p, settings)
    if not state:
        state.update(new_state(p, factoring, settings, name))
    _convert_momentum(state, p, factoring, settings, name)
    _add_missing(state, p, factoring, settings, name)
    # the model may have been moved or converted after the optimizer was made, and kernels trust the state's types
    dtypes = {"step": STEP_DTYPE, "compensation": p.dtype, "momentum_scale": torch.float32}
    dtypes[momentum.key(settings.momentum_of)] = momentum.float_dtype(p, settings)
    dtypes[momentum.key(settings.momentum_of, is_int8=True)] = torch.int8
    for key, value in state.items():
        wanted = dtypes.get(key, statistics_dtype(p.dtype))
        if isinstance(value, Tensor) and (value.dtype != wanted or value.device != p.device):
            state[key] = value.to(p.device, wanted)


def _convert_momentum(state: State, p: Tensor, factoring: Factoring, settings: Settings, name: str) -> None:
    """Bring the momentum from int8 to floating-point numbers or back, if the settings say so; rounded to nearest."""
    blocks, key = momentum.blocks_of(factoring, settings), momentum.key_in(state)
    if key is None or (blocks is None) == ("momentum_scale" not in state):
        return
    new = _new_momentum(p, factoring, settings, name)  # where the shards do not allow it, the old one stays
    old = [dtensor.local(state.pop(part)) for part in (key, "momentum_scale") if part in state]
    if blocks is None:
        was = momentum.blocks_of(factoring, replace(settings, momentum_dtype="int8"))
        assert was is not None
        values: tuple[Tensor, ...] = (momentum.decode(old[0], old[1], was),)
    else:
        values = momentum.encode(old[0], blocks, None)
    for kept, value in zip(new.values(), values, strict=True):
        dtensor.local(kept).copy_(value)
    state.update(new)


def _add_missing(state: State, p: Tensor, factoring: Factoring, settings: Settings, name: str) -> None:
    """Buffers that a setting needs, also one that was switched on in mid-run."""
    if settings.beta1 and momentum.key_in(state) is None:
        state.update(_new_momentum(p, factoring, settings, name))
    if settings.rounding == "kahan" and p.dtype in SIXTEEN_BIT and "compensation" not in state:
        state["compensation"] = torch.zeros_like(p).detach()


def _new_momentum(p: Tensor, factoring: Factoring, settings: Settings, name: str) -> State:
    """The buffers of a momentum in the format that the settings say, all zero."""
    blocks = momentum.blocks_of(factoring, settings)
    key = momentum.key(settings.momentum_of, is_int8=blocks is not None)
    if blocks is None:
        return {key: torch.zeros_like(p, dtype=momentum.float_dtype(p, settings)).detach()}
    if dtensor.is_sharded(p):
        scale = dtensor.zero_scales(p, blocks, name)
    else:
        scale = torch.zeros(momentum.scale_shape(tuple(p.shape), blocks), dtype=torch.float32, device=p.device)
    return {key: torch.zeros_like(p, dtype=torch.int8).detach(), "momentum_scale": scale}


def check_parameter(p: Tensor, name: str, settings: Settings) -> None:
    """Refuse what the optimizer cannot step."""
    if hasattr(p, "_fsdp_flattened"):
        raise ValueError(
            f"{name} is a flat parameter of FSDP1, whose slices are not the model's matrices; use FSDP2 (fully_shard)"
        )
    if p.dtype not in FLOATS:
        raise TypeError(
            f"{name} has dtype {p.dtype}; Adafactor steps real floating-point parameters of 16, 32 or 64 bits only"
        )
    factoring_of(p, settings)  # complains about axes that the parameter does not have


def check_gradient(p: Tensor, g: Tensor, name: str) -> None:
    """Refuse a gradient that does not belong to its parameter or cannot be computed with."""
    if dtensor.is_sharded(p) != dtensor.is_sharded(g):
        raise TypeError(f"{name} is a {type(p).__name__}, but its gradient a {type(g).__name__}: shard both or none")
    if g.layout != torch.strided:
        raise TypeError(f"the gradient of {name} is sparse ({g.layout}); make the layer dense (e.g. sparse=False)")
    if g.device != p.device:
        raise ValueError(f"{name} is on {p.device}, but its gradient on {g.device}: was one of them moved?")
    if g.shape != p.shape:
        raise ValueError(f"{name} of shape {tuple(p.shape)} has a gradient of shape {tuple(g.shape)}: was it replaced?")
    if g.dtype not in FLOATS:
        raise TypeError(f"the gradient of {name} has dtype {g.dtype}; only floating-point gradients are supported")


def check(state: State, p: Tensor, settings: Settings, name: str) -> None:
    """Refuse slices that are cut, and a state that is not of a parameter of this shape with these settings."""
    _check_slices(p, settings, name)
    if state:
        _check_count(state, p, settings, name)
        _check_statistics(state, p, settings, name)
        _check_momentum(state, p, settings, name)


def _check_slices(p: Tensor, settings: Settings, name: str) -> None:
    """Refuse slices that are cut between ranks."""
    if is_sliced(p, settings) and dtensor.is_sharded(p):
        for place, ranks in zip(p.placements, p.device_mesh.shape, strict=True):
            if ranks > 1 and dtensor.cut_axis(place) not in (None, 0):
                raise ValueError(
                    f"per_slice=True needs whole slices on each rank, but axis {dtensor.cut_axis(place)} of {name} "
                    f"(shape {tuple(p.shape)}) is cut between {ranks} ranks; cut it along axis 0, or step it with "
                    "per_slice=False"
                )


def _check_count(state: State, p: Tensor, settings: Settings, name: str) -> None:
    """Refuse a state of the whole for slices, or of slices for the whole: their statistics may have the same shapes."""
    wanted = tuple(p.shape[:1]) if is_sliced(p, settings) else ()
    has = tuple(getattr(state.get("step"), "shape", ()))
    if has != wanted:
        raise ValueError(
            f"{name} of shape {tuple(p.shape)} with per_slice={settings.per_slice} needs a state 'step' of shape "
            f"{wanted}, but the state has one of {has}: `per_slice` changed, or the groups are in another order. A "
            "state is of the whole or of its slices: go on with the `per_slice` that it was made with, or start "
            "without a state"
        )


def _check_statistics(state: State, p: Tensor, settings: Settings, name: str) -> None:
    """Refuse statistics of other axes, of another estimator or of another shape."""
    wanted = {"row": None, "col": None, "full": None, **factoring_of(p, settings).statistics}
    for key, shape in wanted.items():
        has = _shape(state, key, name)
        if has != shape:
            needed = f"no state {key!r}" if shape is None else f"a state {key!r} of shape {shape}"
            raise ValueError(
                f"{name} of shape {tuple(p.shape)} with factored={settings.factored!r} and axes={settings.axes} needs "
                f"{needed}, but the state has {'none' if has is None else f'one of shape {has}'}: the groups are in "
                "another order, or `factored`, `axes` or `min_factored` changed, which a state cannot follow"
            )


def _check_momentum(state: State, p: Tensor, settings: Settings, name: str) -> None:
    """Refuse an average of something else, and one that is not whole."""
    shape = tuple(p.shape)
    for key in (*momentum.BUFFERS, "compensation"):
        has = _shape(state, key, name)
        if has is not None and has != shape:
            raise ValueError(f"{name} of shape {shape} has a {key} of shape {has}")
    keys = [key for key in momentum.BUFFERS if key in state]
    if len(keys) > 1 or ("momentum_scale" in state) != any(key.endswith("_int8") for key in keys):
        held = ", ".join(map(repr, [*keys, *(key for key in state if key == "momentum_scale")]))
        raise ValueError(f"the state of {name} has {held}: it must be one momentum, and of int8 its 'momentum_scale'")
    if keys and not keys[0].startswith(momentum.key(settings.momentum_of)):
        raise ValueError(
            f"the state of {name} has {keys[0]!r}, but momentum_of={settings.momentum_of!r}: an average of the one "
            "cannot go on as an average of the other. Set `momentum_of` back, or delete that entry to start a new one"
        )
    if "momentum_scale" in state:
        blocks = momentum.blocks_of(factoring_of(p, settings), replace(settings, momentum_dtype="int8"))
        wanted = None if blocks is None else momentum.scale_shape(shape, blocks)
        if (has := _shape(state, "momentum_scale", name)) != wanted:
            raise ValueError(f"{name} of shape {shape} has a momentum_scale of shape {has}, not {wanted}")


def _shape(state: State, key: str, name: str) -> tuple[int, ...] | None:
    value = state.get(key)
    if key not in state:
        return None
    is_int8 = key.endswith("_int8")
    if not isinstance(value, Tensor) or not (value.dtype == torch.int8 if is_int8 else value.is_floating_point()):
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the state {key!r} of {name} is {kind}; it must be a tensor, {'int8' if is_int8 else 'floating-point'}"
        )
    return tuple(value.shape)
