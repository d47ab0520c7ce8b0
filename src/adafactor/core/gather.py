"""From an optimizer's groups to its buckets: the parameters that step together, each with a state that fits it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from adafactor.core import dtensor
from adafactor.core import state as states
from adafactor.core.bucket import Bucket, Contents
from adafactor.core.contract import Gradients, Parameter, Prepare, Unit
from adafactor.core.factoring import find_factoring, is_stack
from adafactor.core.report import StepMetrics
from adafactor.core.settings import Settings
from adafactor.core.warn import warn
from adafactor.distributed.reductions import Ranks
from adafactor.distributed.shard import Shard


class Entry(NamedTuple):
    """A parameter as it stands in an optimizer's groups."""

    p: Tensor
    name: str  # without names, its number
    group: int
    place: int  # in its group
    number: int  # among all that are stepped, where each slice of a stack is one


def entries_of(groups: Iterable[Mapping[str, Any]]) -> Iterator[Entry]:
    """Every parameter of an optimizer's groups, in their order."""
    number, key = 0, itertools.count()  # the latter is what `state_dict` has for a parameter
    for i, group in enumerate(groups):
        params, unnamed = group["params"], [f"parameter {next(key)}" for _ in group["params"]]
        names = group.get("param_names", unnamed)
        if len(names) != len(params):
            raise ValueError(
                f"group {i} has {len(names)} 'param_names' for {len(params)} 'params': edit both lists together"
            )
        if len(set(params)) != len(params):
            raise ValueError(f"group {i} has a parameter twice in its 'params'")
        for place, (p, name) in enumerate(zip(params, names, strict=True)):
            yield Entry(p, name, i, place, number)
            number += len(p) if group.get("per_slice") and is_stack(tuple(p.shape)) else 1


class Slice(NamedTuple):
    """What of a parameter is stepped by itself."""

    name: str
    x: Tensor  # a view of the parameter, or itself
    place: int | None  # along the first axis; None: it is the whole


def slices_of(p: Tensor, name: str, per_slice: bool) -> list[Slice]:
    """The slices of a parameter that this rank has; itself, where it is stepped as a whole."""
    if not (per_slice and is_stack(tuple(p.shape))):
        return [Slice(name, p, None)]
    first = dtensor.beginning(p)[0] if dtensor.is_sharded(p) else 0
    return [Slice(f"{name}[{i}]", x, i) for i, x in enumerate(dtensor.local(p.detach()).unbind(), start=first)]


class Buckets:
    """The buckets of one optimizer, and what outlives them of its parameters."""

    def __init__(self, prepare: Prepare, before: Buckets | None):
        """Start without any, or with what still holds of those before, when a state was loaded."""
        self.prepare = prepare
        self.apart: set[Tensor] = set() if before is None else before.apart  # sharded ones that step inside backward
        self.ranks: dict[Unit | None, Ranks] = {} if before is None else before.ranks  # of sharded parameters
        for ranks in self.ranks.values():
            ranks.ask_again()
        self.of: dict[Unit | None, Bucket] = {}  # None: the whole model; else what steps inside backward
        self._metrics: Any = WeakTensorKeyDictionary()  # what is behind `report()`

    def find(self, unit: Unit | None, now: Contents) -> tuple[Bucket, Gradients] | None:
        """Return a bucket that is prepared for this step or can be, and the gradients of its parameters.

        Args:
            unit: the parameters that step inside backward; None: all.
            now: what the optimizer holds.

        Returns:
            None for parameters that are in no group (any more), and so take no step.
        """
        bucket = self.of.get(unit)
        if bucket is None or not bucket.holds(now):
            if unit is not None and _params(now.groups).isdisjoint(unit):
                self.of.pop(unit, None)
                return None
            bucket = self._gather(unit, now, set())
        grads = bucket.gradients(now.groups)
        if grads is None:  # of a parameter that never had one so far; those without one this time stay in
            bucket = self._gather(unit, now, {whole.p for whole in bucket.wholes})
            grads = bucket.gradients(now.groups)
        assert grads is not None
        return bucket, grads

    def flush(self) -> None:
        """Hand the figures of all steps to what is behind `report()`."""
        for bucket in self.of.values():
            bucket.flush()

    def flush_others(self, stepping: Unit | None) -> None:
        """Note the figures of earlier steps before those of another bucket of the same parameters."""
        if stepping is None:
            for unit, bucket in self.of.items():
                if unit is not None:
                    bucket.flush()
        elif None in self.of:
            self.of[None].flush()

    def step_apart(self, apart: Iterable[Tensor]) -> None:
        """Leave these sharded parameters out of the whole model, where they would take part without a gradient too."""
        self.flush()
        self.of.clear()
        self.apart = set(apart)

    def metrics_of(self, p: Tensor, place: int | None) -> StepMetrics:
        """What the steps have noted of a parameter, or of one of its slices."""
        if p not in self._metrics:
            self._metrics[p] = {}
        metrics: StepMetrics = self._metrics[p].setdefault(place, StepMetrics())
        return metrics

    def follow(self, groups: list[dict[str, Any]], held: MutableMapping[Tensor, Any]) -> None:
        """Exchange states without a step where others stand in the groups now: Accelerate's FSDP2 puts them there."""
        params = _params(groups)
        for p, state in list(held.items()):
            if isinstance(p, Tensor) and p not in params and not _has_stepped(state):
                del held[p]
        for entry in entries_of(groups):
            if entry.p.requires_grad and not held.get(entry.p):
                states.fit(held[entry.p], entry.p, Settings.of(groups[entry.group]), entry.name)

    def _gather(self, unit: Unit | None, now: Contents, staying: set[Tensor]) -> Bucket:
        """Put together the parameters that step together. What is wrong with them is found before anything changes."""
        old = self.of.pop(unit, None)
        if old is not None:
            old.flush()
        before = {} if old is None else {whole.p: whole for whole in old.wholes}
        if unit is None:
            _warn_of_flat_slices(now)
            self.follow(now.groups, now.states)
        members = None if unit is None else set(unit)
        entries = [entry for entry in entries_of(now.groups) if members is None or entry.p in members]
        taken = [e for e in entries if e.p.grad is not None or e.p in staying or self._is_shared(e.p, unit)]
        for entry in taken:
            if entry.p.grad is not None:  # of another shape, it says best that the parameter was replaced
                states.check_gradient(entry.p, entry.p.grad, entry.name)
            states.check(now.states[entry.p], entry.p, now.settings[entry.group], entry.name)
        wholes = [self._parameter(entry, now, before.get(entry.p)) for entry in taken]
        ranks = None
        if any(whole.shard is not None for whole in wholes):
            ranks = self.ranks[unit] = Ranks(wholes, self.ranks.get(unit))
        places = None if unit is None else [(entry.group, entry.place) for entry in entries]
        bucket = self.of[unit] = Bucket(wholes, ranks, self.prepare, now, places)
        self._forget_what_left(now.groups)
        return bucket

    def _is_shared(self, p: Tensor, unit: Unit | None) -> bool:
        """Whether other ranks may have a gradient where this one has none."""
        return dtensor.is_sharded(p) and p.requires_grad and (unit is not None or p not in self.apart)

    def _parameter(self, entry: Entry, now: Contents, before: Parameter | None) -> Parameter:
        p, name, settings, state = entry.p, entry.name, now.settings[entry.group], now.states[entry.p]
        states.fit(state, p, settings, name)
        factoring, shard, is_sliced = states.factoring_of(p, settings), None, states.is_sliced(p, settings)
        x, group, number = dtensor.local(p), entry.group, entry.number
        if before is not None and (before.x.shape != x.shape or is_sliced != (before.slices is not None)):
            before = None
        if dtensor.is_sharded(p):
            shard = Shard.of(p, name, factoring, is_sliced, None if before is None else before.shard)
            state = {key: dtensor.local(value) if isinstance(value, Tensor) else value for key, value in state.items()}
        metrics, form = self.metrics_of(p, None), None if before is None else before.form
        whole = Parameter(p, x, state, factoring, settings, group, name, number, metrics, shard, form)
        if is_sliced:
            whole.slices = self._slices(whole, before)
        return whole

    def _slices(self, whole: Parameter, before: Parameter | None) -> list[Parameter]:
        """The slices of a stack that this rank has, as parameters of their own: views, with numbers of their own."""
        s, slices = replace(whole.settings, per_slice=False), []
        factoring = find_factoring(whole.shape[1:], s.factored, s.axes, s.min_factored)
        known = [] if before is None else before.stepping
        for i, (name, x, place) in enumerate(slices_of(whole.p, whole.name, per_slice=True)):
            assert place is not None
            one = replace(
                whole, x=x, factoring=factoring, settings=s, name=name, number=whole.number + place, shard=None
            )
            one.state = {key: value[i] for key, value in whole.state.items() if _is_stacked(value, whole.x)}
            one.metrics = self.metrics_of(whole.p, place)
            one.form = known[i].form if known else None
            slices.append(one)
        return slices

    def _forget_what_left(self, groups: list[dict[str, Any]]) -> None:
        """Drop the buckets of parameters that are no longer in any group, so that they can be freed."""
        if len(self.of) > 1:
            params = _params(groups)
            for unit in [unit for unit in self.of if unit is not None and params.isdisjoint(unit)]:
                del self.of[unit]
                self.ranks.pop(unit, None)


def _is_stacked(value: object, x: Tensor) -> bool:
    """Whether a state's entry has a slice for each of X; users may have put others beside those."""
    return isinstance(value, Tensor) and value.shape[:1] == x.shape[:1]


def _warn_of_flat_slices(now: Contents) -> None:
    """DeepSpeed's ZeRO puts one flat slice in place of all the parameters of a group."""
    params = _params(now.groups)
    if all(p.ndim == 1 for p in params) and any(not now.states.get(p) for p in params):
        if any(state.keys() & {"row", "col"} for state in now.states.values()):
            warn(
                "the optimizer was made for matrices, but its groups now hold flat tensors, as DeepSpeed's ZeRO "
                "makes them: no second moment is factored, and no memory is saved. Use FSDP2 instead"
            )


def _has_stepped(state: Mapping[str, Any]) -> bool:
    step = state.get("step", 1)
    return bool(dtensor.local(step).any() if isinstance(step, Tensor) else step)


def _params(groups: list[dict[str, Any]]) -> set[Tensor]:
    return {p for group in groups for p in group["params"]}
