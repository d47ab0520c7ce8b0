"""One step of `Adafactor` as NumPy's long double says it should be, from the real values of X, G and the state.

It is `tests/oracle.py`'s `step`, fed with what the optimizer's groups and state hold; nothing of `src` is used. What
the documentation promises beyond the paper (which axes are factored, the slices of `per_slice`, `maximize`, skipped
gradients, Kahan's remainder) is written down here once more. `allowed` says how far from this a correct step may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests import oracle

Array = NDArray[Any]
Values = dict[str, Array]  # a parameter's state in long double, under the optimizer's keys

STATISTICS = {torch.float64: torch.float64}  # of every other dtype: float32
ROOM = np.finfo(np.float64).max
ROUNDINGS = 32  # a step multiplies, divides and takes roots a dozen times; nothing in it cancels
SUMMED = float(np.finfo(np.longdouble).eps)  # times the number of its terms, the error of a sum of the oracle's


@dataclass(frozen=True)
class Outcome:
    """What one step should leave, if its numbers were exact."""

    x: Array
    state: Values
    taken: bool  # False: the gradient was not finite, and all is as it was
    length: float = 0.0  # the largest entry of the change, the decay left aside; with momentum, of the terms of it
    scale: float = 0.0  # the largest |X|
    momentum: float = 0.0  # the largest entry of the momentum before
    rms_update: float = float("nan")
    step_size: float = float("nan")

    @property
    def finite(self) -> bool:
        """Is there anything to compare with, which float64 has room for?"""
        return all(bool((np.abs(value) <= ROOM).all()) for value in (self.x, *self.state.values()))


def exact(t: Tensor) -> Array:
    """A copy of a tensor's values in long double."""
    return np.array(t.detach().double().cpu().numpy(), dtype=np.longdouble, copy=True)


def values(state: Mapping[str, Tensor]) -> Values:
    """A copy of a parameter's state in long double; the momentum of any name and format is `momentum`."""
    held = {key: exact(value) for key, value in state.items()}
    if (name := momentum_name(held)) is not None:
        kept, scale = held.pop(name), held.pop("momentum_scale", None)
        held["momentum"] = kept if scale is None else kept * spread(scale, kept.shape)
    return held


def momentum_name(state: Mapping[str, Any]) -> str | None:
    """The name of the momentum in a state."""
    return next((key for key in state if key.startswith("momentum_of_")), None)


def block_length(shape: tuple[int, ...], axis: int) -> int:
    """The indices along an axis in a block of an int8 momentum: a power of two, of at most 128 elements, or one."""
    behind = int(np.prod(shape[axis + 1 :]))
    return max([2**i for i in range(8) if 2**i * behind <= 128], default=1)


def spread(scale: Array, shape: tuple[int, ...]) -> Array:
    """A number for each block of an int8 momentum, over its elements."""
    axis = scale.ndim - 1
    along = np.repeat(scale, block_length(shape, axis), axis)[..., : shape[axis]]
    return np.asarray(np.broadcast_to(along.reshape(*along.shape, *(1,) * (len(shape) - along.ndim)), shape))


def largest_in_blocks(m: Array, axis: int) -> Array:
    """The largest entry of each block, over its elements."""
    length, found = block_length(m.shape, axis), np.zeros(m.shape)
    for start in range(0, m.shape[axis], length):
        part = (slice(None),) * axis + (slice(start, start + length),)
        found[part] = np.abs(m[part]).max(tuple(range(axis, m.ndim)), keepdims=True)
    return found


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of R, C, V̂ and m̂."""
    return STATISTICS.get(dtype, torch.float32)


def factored_axes(shape: tuple[int, ...], group: Mapping[str, Any]) -> tuple[int, int] | None:
    """The (row, column) axes; None where the second moment is unfactored."""
    factored, axes = group["factored"], group["axes"]
    if factored is False or len(shape) < 2 or 0 in shape:
        return None
    if axes is not None:
        row, col = axes[0] % len(shape), axes[1] % len(shape)
    else:  # the two largest, of equals the later ones, in their own order
        row, col = sorted(sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:])
    shorter = min(shape[row], shape[col])
    is_unfactored = shorter < group["min_factored"] or (factored == "outer" and shorter == 1)
    return None if is_unfactored else (row, col)


def is_good(g: Array, dtype: torch.dtype) -> bool:
    """Is the gradient's square finite in the precision of the statistics?"""
    with np.errstate(over="ignore", invalid="ignore"):
        square = np.square(g)
    return bool((square <= torch.finfo(statistics_dtype(dtype)).max).all())


def rho(group: Mapping[str, Any], t: float) -> float:
    """ρₜ."""
    return min(float(group["lr"]), t**-0.5) if group["lr_decay"] == "rsqrt" else float(group["lr"])


def outcome(group: Mapping[str, Any], dtype: torch.dtype, x: Array, g: Array, state: Mapping[str, Array]) -> Outcome:
    """One step of a parameter of this dtype in this group, from X, G and a state that may be empty."""
    held = dict(state)
    if x.size == 0 or (group["on_nonfinite"] != "ignore" and not is_good(g, dtype)):
        return Outcome(x, held, taken=False)
    axes = factored_axes(x.shape, group)
    row, memory = _row(group, axes), _memory(held, x.shape, axes)
    t = float(held.get("step", np.zeros(()))) + 1
    rate = rho(group, t)
    alpha = max(row.eps2, oracle.rms(x)) * rate if row.relative else rate
    share = 1 - oracle.decay(row, rate, alpha) * row.weight_decay
    # the average of updates keeps its sign when `maximize` is switched; the others are of G as it comes
    of_gradient = bool(row.beta1) and row.momentum == "gradient"
    as_it_comes = bool(row.beta1) and row.momentum != "update"
    with np.errstate(all="ignore"):
        new = oracle.step(row, x, -g if group["maximize"] and not as_it_comes else g, int(t), rate, memory)
        change = new - x * share
        if group["maximize"] and as_it_comes:
            new = x * share - change
        if group["rounding"] == "kahan" and "compensation" in held:
            new = new + held["compensation"] * share
        old = held.get("momentum", np.zeros(x.shape))
        old = old * alpha if row.momentum == "direction" else old
        length = float(_terms(change, old, _state(memory, x.shape, axes, row).get("momentum"), of_gradient).max())
    after = {**held, **_state(memory, x.shape, axes, row), "step": np.asarray(t)}
    scale, before = float(np.abs(x).max()), float(np.abs(old).max())
    return Outcome(new, after, True, length, scale, before, memory.rms_u[-1], alpha)


def relative_error(size: int, dtype: torch.dtype) -> float:
    """Of a change, and of every statistic, of a tensor of that many entries: roundings, and sums in double."""
    return ROUNDINGS * float(torch.finfo(statistics_dtype(dtype)).eps) + SUMMED * size


def allowed(expected: Outcome, dtype: torch.dtype, rounding: str) -> Array:
    """How far from the exact X each entry may be: an error of the step relative to its length, and the storing of X."""
    wide = torch.finfo(statistics_dtype(dtype))
    step = relative_error(expected.x.size, dtype) * expected.length
    # X·(1 − ρλ), then minus the change, each rounded to the statistics' precision; as much again for this model's own
    step += 4 * wide.eps * max(expected.scale, float(np.abs(expected.x).max(initial=0.0)))
    if rounding == "kahan" and dtype.itemsize < 4:  # X plus what is left over, itself a number of this dtype
        return np.asarray(step + torch.finfo(dtype).eps ** 2 * np.abs(expected.x) + _smallest(dtype))
    units = 1.0 if rounding == "stochastic" and dtype.itemsize < 4 else 0.5
    return np.asarray(step + units * torch.finfo(dtype).eps * (np.abs(expected.x) + step) + _smallest(dtype))


def state_problem(expected: Outcome, state: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """What is wrong in a state; nothing if it is right."""
    wide = statistics_dtype(dtype)
    relative = relative_error(expected.x.size, dtype)
    held = values(state)
    for key, should in expected.state.items():
        if key == "compensation":
            continue  # compared together with X
        if key not in held:
            return f"state has no {key!r}"
        value = held[key]
        if key != "momentum" and state[key].dtype != (torch.float32 if key == "step" else wide):
            return f"{key} is {state[key].dtype}"
        if value.shape != should.shape:
            return f"{key} has the shape {value.shape}, not {should.shape}"
        # an average of terms of either sign is as exact as its terms; all others are sums of positive terms
        size = np.abs(should).max(initial=expected.momentum) if key == "momentum" else np.abs(should)
        # squares below the smallest normal number have few digits, in sums whose scale is that of the longest axis
        digit = 2 * _smallest(wide) * max(expected.x.shape, default=1)
        limit = 0.0 if key == "step" else relative * size + digit
        if key == "momentum":
            limit = limit + _unit(should, state)
        wrong = ~(np.abs(value - should) <= limit)
        if key == "momentum" and state[momentum_name(state) or ""].dtype == torch.bfloat16:
            beyond = np.abs(should) > torch.finfo(torch.bfloat16).max  # of float64: there is only infinity
            wrong &= ~(beyond & (value == np.copysign(np.inf, should)))
        if wrong.any():
            return f"{key} is {value[wrong].flat[0]!r}, should be {should[wrong].flat[0]!r}"
    return ""


def difference(group: Mapping[str, Any], p: Tensor, state: Mapping[str, Tensor], expected: Outcome) -> str:
    """What of a parameter and its state is not as expected."""
    x, rounding = exact(p), group["rounding"]
    if not expected.taken:
        held = values(state)
        same = np.array_equal(x, expected.x, equal_nan=True) and all(
            key in held and np.array_equal(held[key], value, equal_nan=True) for key, value in expected.state.items()
        )
        return "" if same else "changed although no step was to be taken"
    if not expected.finite or (p.dtype != torch.float64 and expected.rms_update > 1e30):
        return ""  # there is no room for it, or in float32 none for U itself: nothing is promised
    if p.dtype.itemsize < 4 and rounding == "kahan":
        x = x + exact(state["compensation"])
    limit = allowed(expected, p.dtype, rounding)
    if group["weight_decay"] and group["weight_decay_by"] == "alpha":  # α's own error, which X is multiplied with
        limit = limit + relative_error(expected.x.size, p.dtype) * np.abs(expected.x)
    beyond = np.abs(expected.x) >= torch.finfo(p.dtype).max  # stored as infinity, or as the largest number
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(x - expected.x) <= limit) & ~(beyond & (np.sign(x) == np.sign(expected.x)) & (np.abs(x) > 1))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        return (
            f"{int(wrong.sum())} of {wrong.size} entries of X wrong, the first {x.flat[at]!r}, should be "
            f"{expected.x.flat[at]!r} ± {limit.flat[at]:.2g} (step of {expected.length:.2g})"
        )
    return state_problem(expected, state, p.dtype)


class Part(NamedTuple):
    """What the paper takes for one tensor: a parameter, or a slice of a stack that steps `per_slice`."""

    group: Mapping[str, Any]
    x: Tensor
    g: Tensor | None
    state: dict[str, Tensor]

    @property
    def is_bad(self) -> bool:
        """Is there a gradient that must not be taken as it is?"""
        return self.g is not None and not is_good(exact(self.g), self.x.dtype)


def parts(optimizer: Any) -> Iterator[Part]:
    """All of them, in the order of the groups, as they are now."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            x, g, state = p.detach(), p.grad, dict(optimizer.state[p])
            if not group["per_slice"] or p.dim() < 3 or not p.numel():
                yield Part(group, x, g, state)
                continue
            for i in range(len(p)):
                yield Part(group, x[i], None if g is None else g[i], {key: value[i] for key, value in state.items()})


class Expected:
    """What the next step should leave of every part, by what is there when this is made."""

    def __init__(self, optimizer: Any):
        """Read X, the gradients and the state."""
        self.optimizer, found = optimizer, list(parts(optimizer))
        bad = {part.group["on_nonfinite"] for part in found if part.is_bad}
        self.is_refused = "raise" in bad
        self.is_poisoned = "ignore" in bad  # let through as asked; what it leaves is not promised
        self.outcomes = [self._outcome(part) for part in found]
        self._grads = [None if part.g is None else (part.g, exact(part.g)) for part in found]

    def _outcome(self, part: Part) -> Outcome:
        x, state = exact(part.x), values(part.state)
        if part.g is None or self.is_refused:
            return Outcome(x, state, taken=False)
        return outcome(part.group, part.x.dtype, x, exact(part.g), state)

    def problem(self) -> str:
        """What is not so now; nothing if all is."""
        for number, (part, should) in enumerate(zip(parts(self.optimizer), self.outcomes, strict=True)):
            if problem := difference(part.group, part.x, part.state, should):
                return f"part {number}: {problem}"
        for given in self._grads:
            if given is not None and not np.array_equal(exact(given[0]), given[1], equal_nan=True):
                return "a gradient was written to"
        return ""


def _unit(m: Array, state: Mapping[str, Tensor]) -> Array | float:
    """How far rounding may take a momentum, as it is kept in a state: to the next number of its format."""
    if "momentum_scale" in state:
        largest = largest_in_blocks(m, state["momentum_scale"].dim() - 1)
        return np.asarray(largest / 127 * (1 + 2.0**-14) + 2.0**-100)
    if state[momentum_name(state) or ""].dtype == torch.bfloat16:
        return np.asarray(2.0**-7 * np.abs(m) + _smallest(torch.bfloat16))
    return 0.0


def _smallest(dtype: torch.dtype) -> float:
    limits = torch.finfo(dtype)
    return float(limits.smallest_normal * limits.eps)


def _terms(change: Array, old: Array, new: Array | None, of_gradient: bool) -> Array:
    """The size of what is added up to a change: more than the change itself where momentum and gradient cancel."""
    if new is None:
        return np.abs(change)
    if not of_gradient:
        return np.abs(change) + np.abs(old)
    more = np.divide(np.abs(old), np.abs(new), out=np.zeros(old.shape), where=new != 0)
    return np.asarray(np.abs(change) * (1 + more))


def _row(group: Mapping[str, Any], axes: tuple[int, int] | None) -> oracle.Row:
    return oracle.Row(
        estimator="none" if axes is None else str(group["factored"]),
        beta1=group["beta1"],
        momentum=group["momentum_of"],
        beta2=group["beta2"],
        c=group["decay_rate"],
        beta2_max=group["beta2_max"],
        d=group["clip"],
        relative=group["relative"],
        multiplier=1.0,
        eps1=group["eps"][0],
        eps2=group["eps"][1],
        weight_decay=group["weight_decay"],
        decay_by=group["weight_decay_by"],
        lr=float(group["lr"]),
        axes=axes,
    )


def _memory(state: Values, shape: tuple[int, ...], axes: tuple[int, int] | None) -> oracle.Memory:
    """The oracle's sums, factored axes last, from the state's means."""
    memory = oracle.Memory()
    if axes is None:
        memory.v = state.get("full", 0.0)
    else:
        row, col = axes
        if "row" in state:
            memory.r = np.moveaxis(state["row"] * shape[col], axes, (-2, -1))
        if "col" in state:
            memory.c = np.moveaxis(state["col"] * shape[row], axes, (-2, -1))
    if "momentum" in state:
        memory.m = state["momentum"] if axes is None else np.moveaxis(state["momentum"], axes, (-2, -1))
    return memory


def _state(memory: oracle.Memory, shape: tuple[int, ...], axes: tuple[int, int] | None, row: oracle.Row) -> Values:
    """The state's means from the oracle's sums."""
    found: Values = {}
    if axes is None:
        found["full"] = np.asarray(memory.v)
    else:
        if row.estimator in ("outer", "row"):
            found["row"] = np.moveaxis(memory.r, (-2, -1), axes) / shape[axes[1]]
        if row.estimator in ("outer", "column"):
            found["col"] = np.moveaxis(memory.c, (-2, -1), axes) / shape[axes[0]]
    if row.beta1:
        found["momentum"] = memory.m if axes is None else np.moveaxis(memory.m, (-2, -1), axes)
    return found
