"""Who steps together inside backward, and when: collectives must come in the same order on all ranks.

| unit | its gradients come | it steps |
|---|---|---|
| the parameters of a module that FSDP2 wraps | in one go, reduced, in one order on all ranks | at once |
| some of data parallel, or DTensors that are not FSDP2's | in autograd's order | in the order of a line |

A parameter that needs no other rank is in no unit, and steps alone. What a backward pass leaves incomplete steps at its
end, or where a rank's backward has reached none of the parameters, in `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from adafactor.backward.spent import is_spent, second_gradient
from adafactor.core import dtensor
from adafactor.distributed.average import Average
from adafactor.distributed.shard import Group

PACK = 1 << 20  # bytes: smaller gradients are averaged together until they are as many


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that step together."""

    params: tuple[Tensor, ...]
    place: tuple[nn.Module, str] | None = None  # of the first of them in its module, where it is FSDP2's

    def check_copy(self, name: str) -> None:
        """Refuse to step where FSDP2 goes on with the copy that it gathered before."""
        if self.place is not None and getattr(*self.place) is not self.params[0]:
            raise RuntimeError(
                f"{name} is still gathered after backward, as set_reshard_after_backward(False) has it: the next "
                "forward would use what it was before its step. Leave that out, or call optimizer.step() after "
                "backward() without step_in_backward"
            )


class Turns:
    """Has units step in an order that all ranks share."""

    def __init__(
        self, modules: list[Unit], params: Iterable[Tensor], group: Group | None, step: Callable[[Unit], None]
    ):
        """With what steps a unit.

        Args:
            modules: the units of FSDP2.
            params: those that stand in a line.
            group: over which the gradients of these are averaged, if they are.
            step: is called with the unit whose turn it is.
        """
        self.modules, self.group = modules, group
        # of what holds this: so that both are free as soon as nobody else holds them
        self._step_unit = WeakMethod(step)
        self._params = list(params)[::-1]  # gradients mostly come in this order
        self._is_first = True  # no step has ended yet
        self._backward = -1  # torch's number of the backward in which the last gradient came
        self._line_up()
        self.begin()

    def begin(self) -> None:
        """Wait for the gradients of the next step, or again for those of this one."""
        self._complete: dict[Tensor, None] = {}  # whose gradients are there, in the order in which they came
        self._done: set[Unit] = set()
        self._next = 0  # in the line
        self._open: Unit | None = None  # a module whose gradients are coming
        self._under_way: tuple[Unit, Average] | None = None

    def arrived(self, p: Tensor, name: str) -> None:
        """Note that the gradient of `p` is complete, and step the units whose turn that makes it."""
        unit = self.units[p]
        if unit in self._done:
            if any(is_spent(q.grad) for q in self.units):
                raise second_gradient(name)
            self.begin()  # somebody has dropped all gradients, after a failure say
        backward = torch._C._current_graph_task_id()
        if backward < 0:
            raise RuntimeError(
                f"the gradient of {name} came outside of any backward(), as a pipeline's schedule reduces it, before "
                "it is scaled: call optimizer.step() after the schedule without step_in_backward"
            )
        Variable._execution_engine.queue_callback(self.end_backward)
        self._complete[p] = None
        if backward != self._backward:  # a unit that one before has left open is over, or waits for `optimizer.step()`
            self._open, self._backward = None, backward
        if self._open is not unit:
            self._close()
        if unit.place is not None:
            self._open = unit
            if self._is_complete(unit):
                self._close()
        elif not self.modules:  # beside modules, whose order is another, the line waits for the end
            while self._next < len(self.line) and self._is_complete(self.line[self._next]):
                self._start(self.line[self._next])

    def append(self, p: Tensor) -> None:
        """Put one more parameter into the line, before the next step."""
        self._params.append(p)
        self._line_up()

    def end_backward(self) -> None:
        """Step what has been left incomplete."""
        self._close()
        while self._next < len(self.line):
            self._start(self.line[self._next])
        self._land()

    def finish(self) -> None:
        """Step the units that no backward has reached: other ranks may have gradients for them."""
        self.end_backward()
        for unit in self.modules:
            if unit not in self._done:
                self._step(unit)

    def end_step(self) -> None:
        """End the step; after the first one stand in line as gradients came to the first rank, and the others last."""
        if self.group is not None and self._is_first:
            places = {p: place for place, p in enumerate(self._params)}
            first = self.group.ask([places[p] for p in self._complete])[0]
            self._params = [self._params[place] for place in dict.fromkeys([*first, *places.values()])]
            self._line_up()
        self._is_first = False
        self.begin()

    def _is_complete(self, unit: Unit) -> bool:
        """Whether all gradients are there; one of a backward that has failed may have been dropped since.

        This is asked at every arrival: so the last one, which mostly comes last, is looked at first.
        """
        return all(p in self._complete and p.grad is not None for p in reversed(unit.params) if p.requires_grad)

    def _line_up(self) -> None:
        self.line = _pack(self._params)
        self.units = {p: unit for unit in (*self.modules, *self.line) for p in unit.params}

    def _close(self) -> None:
        """No more gradients come for the module whose gradients were coming."""
        unit, self._open = self._open, None
        if unit is not None:
            self._step(unit)

    def _start(self, unit: Unit) -> None:
        """Average the gradients of the next unit; meanwhile step the one before, whose average should be there."""
        self._next += 1
        if self.group is None:
            self._step(unit)
            return
        started = unit, Average(unit.params, self.group)
        self._land()
        self._under_way = started

    def _land(self) -> None:
        started, self._under_way = self._under_way, None
        if started is not None:
            unit, average = started
            average.finish()
            self._step(unit)

    def _step(self, unit: Unit) -> None:
        self._done.add(unit)
        if (step := self._step_unit()) is not None:
            step(unit)


def find_modules(model: nn.Module) -> list[Unit]:
    """The parameters that FSDP2 reduces together: those of a wrapped module that no inner one has."""
    if not any(dtensor.is_sharded(p) for p in model.parameters()):
        return []
    from torch.distributed.fsdp import FSDPModule, fully_shard

    taken: set[Tensor] = set()
    together: dict[int, list[tuple[Tensor, nn.Module, str]]] = {}  # by what `fully_shard([a, b])` has once for both
    for module in reversed([module for module in model.modules() if isinstance(module, FSDPModule)]):
        own = together.setdefault(id(fully_shard.state(module)), [])  # type: ignore[attr-defined]
        for owner in module.modules():
            for name, p in owner.named_parameters(recurse=False):
                if p not in taken and dtensor.is_sharded(p):
                    taken.add(p)
                    own.append((p, owner, name))
    return [Unit(tuple(p for p, *_ in own), own[0][1:]) for own in together.values() if own]


def _pack(params: Iterable[Tensor]) -> list[Unit]:
    """Units of parameters of one kind, small ones together."""
    units: list[list[Tensor]] = []
    full, kind = True, None
    for p in params:
        if full or kind != (p.dtype, p.device) or p.nbytes >= PACK:
            units.append([])
        units[-1].append(p)
        kind, full = (p.dtype, p.device), sum(q.nbytes for q in units[-1]) >= PACK
    return [Unit(tuple(unit)) for unit in units]
