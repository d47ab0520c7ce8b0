"""Is everything as it was in the last step, but for the gradients' values?

A model has hundreds of parameters, most of them small: to look at each in Python takes longer than to step it. Here all
are looked at together, one property at a time, by loops that run in C.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, eq
from typing import Any

from torch import Tensor

from adafactor.settings import Settings
from adafactor.step import Update

Group = dict[str, Any]
State = dict[str, Any]

_gradient = attrgetter("grad")
_form = attrgetter("layout", "dtype", "device", "shape")
_dtype = attrgetter("dtype")


class Standing:
    """What a step found, and the fleet that took it."""

    def __init__(
        self,
        backend: str,
        groups: list[Group],
        settings: list[Settings],
        states: Iterable[State],
        updates: list[Update],
    ):
        """After a step in which all these updates went together."""
        self.backend, self.updates, self.settings, self.fleet = backend, updates, settings, updates[0].fleet
        try:
            self.seen = list(_look(groups, list(states)))
        except TypeError:  # something in the state that is no tensor: looked at one by one
            self.seen = []

    @staticmethod
    def can(groups: list[Group], updates: list[Update]) -> bool:
        """Did all that has a gradient go together, with a fleet that can be sent out again?"""
        fleet = updates[0].fleet if updates else None
        if fleet is None or fleet.updates != updates or fleet.others:
            return False
        return len(updates) == sum(p.grad is not None for group in groups for p in group["params"])

    def gradients(self, groups: list[Group], settings: list[Settings], states: Iterable[State]) -> list[Tensor] | None:
        """Those of the fleet's updates, if all is as it was; rates may have changed."""
        if settings != self.settings and not self._take(settings):
            return None
        try:
            if not self.seen or not all(map(eq, self.seen, _look(groups, list(states)))):
                return None
        except TypeError:  # something in the state that is no tensor
            return None
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def _take(self, settings: list[Settings]) -> bool:
        """Go on with other rates, if nothing else of the settings has changed."""
        changed = {id(old): new for old, new in zip(self.settings, settings, strict=False)}
        alike = all(old.form == new.form for old, new in zip(self.settings, settings, strict=False))
        if not alike or len(settings) != len(self.settings):
            return False
        for u in self.updates:
            u.settings = changed[id(u.settings)]
        self.settings = settings
        return True


def _look(groups: list[Group], states: list[State]) -> Iterator[list[Any]]:
    """What must stay so, one property of all after the other: who they are, and where and how they lie in memory."""
    params = list(chain.from_iterable(group["params"] for group in groups))
    yield list(map(id, params))
    yield list(map(id, states))
    kept = list(chain.from_iterable(map(dict.values, states)))
    yield list(map(Tensor.data_ptr, chain(params, kept)))
    yield list(map(_dtype, kept))
    yield list(map(_form, params))
    yield list(map(Tensor.stride, params))
    grads = list(map(_gradient, params))
    yield list(map(type, grads))
    grads = [g for g in grads if g is not None]
    yield list(map(_form, grads))
    yield list(map(Tensor.stride, grads))  # last: a gradient of another layout has none
