"""What is remembered from step to step: parameters that step together, and whether all of it is still true.

A bucket is the whole model, a sharded model, or one parameter inside backward. A kernel prepares it once (addresses,
tables, scratch) and then steps it as long as nothing has changed but the values of the gradients and the rates of the
groups. To look at hundreds of small tensors one by one in Python takes longer than to step them: so the *fingerprint*
is a few lists, one property of all tensors after the other, each made by a loop that runs in C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress, repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from adafactor.core import dtensor
from adafactor.core.factoring import Factoring
from adafactor.core.record import Trace
from adafactor.core.rounding import SIXTEEN_BIT
from adafactor.core.settings import Settings
from adafactor.core.state import check_gradient

if TYPE_CHECKING:
    from adafactor.distributed.reductions import Ranks, Shard
    from adafactor.kernels import Doubt, Executor, Fallback

Group = dict[str, Any]
Gradients = list[Tensor | None]  # one entry for each parameter of a bucket; None where it has none this time
PLAIN = {Tensor, torch.nn.Parameter}  # types whose memory is what it seems; subclasses may have none

_grad = attrgetter("grad")
_form = attrgetter("layout", "dtype", "device", "shape")
_dtype = attrgetter("dtype")
_version = attrgetter("_version")
_is_zero = Tensor._is_zerotensor


@dataclass(eq=False)
class Parameter:
    """What lasts of one parameter. Where it is sharded, `x` and `state` are this rank's part, the rest is the whole's.

    `settings` are those of its group when the bucket was made: all of them still hold but the rates, which every step
    is given anew.
    """

    p: Tensor  # as it stands in its group
    x: Tensor  # any strides, any floating dtype
    state: dict[str, Tensor]
    factoring: Factoring
    settings: Settings
    group: int
    name: str
    number: int  # its place among all parameters, for the random numbers of stochastic rounding
    trace: Trace
    shard: Shard | None = None
    gradient: Form | None = None  # the form of its last gradient; None: it never had one
    overlaps: bool = False  # its memory is also another parameter's

    @property
    def offset(self) -> tuple[int, ...] | None:
        """Where this rank's part begins in the whole; None: it is the whole."""
        return None if self.shard is None else self.shard.place

    @cached_property
    def rounding(self) -> str:
        """How X is rounded: what the settings say, if it has 16 bits."""
        return self.settings.rounding if self.x.dtype in SIXTEEN_BIT else "nearest"

    @property
    def measures_x(self) -> bool:
        """Whether ΣX² is wanted before X is written; of a shard it cannot be asked for later."""
        return self.settings.relative or self.shard is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape; of the whole, where it is sharded."""
        return self.factoring.shape


class Bucket:
    """Parameters that step together, and what the kernels prepared for them."""

    def __init__(
        self,
        parameters: list[Parameter],
        ranks: Ranks | None,
        backend: str,
        groups: list[Group],
        settings: list[Settings],
        states: Mapping[Tensor, Any],
        only: tuple[int, int] | None = None,
        doubt: Doubt | None = None,
    ):
        """Remember how everything is now.

        Args:
            parameters: those that step together.
            ranks: completes the sums of sharded parameters; None if there are none.
            backend: as given to the optimizer.
            groups: the optimizer's, with their settings.
            settings: one for each group.
            states: the optimizer's.
            only: the group and the place in it of a single parameter that steps inside backward.
            doubt: why `"auto"` should not rely on a backend here.
        """
        self.parameters, self.ranks, self.backend, self.only = parameters, ranks, backend, only
        self.doubt = doubt
        self.executors: list[Executor] = []
        self.fallback: Fallback | None = None  # a parameter that the backend has left to `eager`
        self.places: dict[Executor, list[int]] = {}  # of each work's parameters in the bucket
        held = {parameter.p for parameter in parameters}
        self.members = [p in held for p in self._all(groups)]
        self.settings = [s.without_rates for s in settings]
        self.forms: list[list[Any]] = []  # of the gradients that `works` were prepared for
        self.counted = [p.x for p in parameters if not p.x.is_inference()]  # torch counts how often they are written to
        self.versions = list(map(_version, self.counted))
        self.new_figures = False  # since `flush`
        self.seen = self._look(groups, states) if all(map(_is_knowable, parameters)) else None

    def holds(self, backend: str, groups: list[Group], settings: list[Settings], states: Mapping[Tensor, Any]) -> bool:
        """Whether everything but the gradients is as it was when the bucket was made; rates may differ."""
        if self.seen is None or backend != self.backend or self.settings != [s.without_rates for s in settings]:
            return False
        try:
            return self.seen == self._look(groups, states)
        except (TypeError, AttributeError, IndexError, RuntimeError):  # something is gone, or is no tensor any more
            return False

    def gradients(self, groups: list[Group]) -> Gradients | None:
        """The gradients of the parameters; None if another parameter has one, which must come in first."""
        every = list(map(_grad, self._all(groups)))
        if len(self.parameters) == len(every):
            return every
        grads = list(compress(every, self.members))
        return grads if _present(grads) == _present(every) else None

    def match(self, grads: Gradients) -> Gradients:
        """Have everything prepared for gradients of this form; return them as the kernels take them.

        Everything that can be wrong with a gradient is found here, before anything is changed.
        """
        if self.ranks is not None:
            for parameter, g in zip(self.parameters, grads, strict=True):
                if g is not None:
                    check_gradient(parameter.p, g, parameter.name)
            grads = self.ranks.align(self.parameters, grads)
        if not self._match_forms(grads):
            for parameter, g in zip(self.parameters, grads, strict=True):
                if g is not None:
                    check_gradient(parameter.x, g, parameter.name)
                    parameter.gradient = _form_of(g)
            self._prepare()
        return grads

    def written_between_steps(self) -> list[bool] | None:
        """Which parameters somebody has written to since the last step, as far as torch knows; None: nobody has.

        A write through `p.data` is hidden from torch; the compiled step finds it by other means.
        """
        if list(map(_version, self.counted)) == self.versions:
            return None
        before = dict(zip(map(id, self.counted), self.versions, strict=True))
        return [id(p.x) in before and p.x._version != before[id(p.x)] for p in self.parameters]

    def end_step(self) -> None:
        """Remember how the step has left the parameters."""
        self.versions, self.new_figures = list(map(_version, self.counted)), True

    def flush(self) -> None:
        """Hand the figures of the steps since the last time to the traces behind `report()`."""
        if self.new_figures:
            for work in self.executors:
                work.flush()
            self.new_figures = False

    def _match_forms(self, grads: Gradients) -> bool:
        """Whether the gradients have the form that the executors were prepared for, those that are there."""
        present = [g for g in grads if g is not None]
        forms = self.forms
        if len(present) != len(grads):
            here = [g is not None for g in grads]
            forms = [list(compress(column, here)) for column in forms]
        try:
            return bool(forms) and forms == _look_at(present)
        except RuntimeError:  # a sparse gradient has no strides
            return False

    def _prepare(self) -> None:
        from adafactor.kernels import prepare

        self.flush()
        known = [p for p in self.parameters if p.gradient is not None and p.factoring.count]
        mark_overlaps(known)
        self.executors, self.fallback = prepare(known, self.backend, self.doubt)
        place = {parameter: i for i, parameter in enumerate(self.parameters)}
        self.places = {work: [place[parameter] for parameter in work.parameters] for work in self.executors}
        nothing = (None,) * len(Form._fields)  # no gradient has this form
        forms = [parameter.gradient or nothing for parameter in self.parameters]
        self.forms = [list(column) for column in zip(*forms, strict=True)]

    def _all(self, groups: list[Group]) -> list[Tensor]:
        """The parameters, in the groups as they are now, among which this bucket's are."""
        if self.only is None:
            return list(chain.from_iterable(group["params"] for group in groups))
        group, place = self.only
        return [groups[group]["params"][place]]

    def _look(self, groups: list[Group], states: Mapping[Tensor, Any]) -> list[list[Any]]:
        """What must stay so, one property of all after the other: who they are, where and how they lie in memory."""
        every = self._all(groups)
        params = every if len(self.parameters) == len(every) else list(compress(every, self.members))
        held = list(map(states.get, params))
        kept: list[Any] = list(chain.from_iterable(map(dict.values, held)))  # type: ignore[arg-type]
        seen: list[list[Any]] = [list(map(id, every)), list(map(id, held)), list(map(type, chain(params, kept)))]
        if self.only is None:
            seen.append([len(group["params"]) for group in groups])
        if self.ranks is not None:
            seen.append([(getattr(p, "placements", None), p.requires_grad) for p in every])
            params, kept = list(map(dtensor.local, params)), list(map(dtensor.local, kept))
        seen += [list(map(Tensor.data_ptr, chain(params, kept))), list(map(_dtype, kept)), list(map(_form, params))]
        return [*seen, list(map(Tensor.stride, params)), list(map(Tensor.is_neg, params))]


class Form(NamedTuple):
    """What of a gradient must stay so that it need not be looked at again."""

    type: type
    meta: tuple[torch.layout, torch.dtype, torch.device, torch.Size]
    is_negative: bool
    is_zero: bool
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The gradient's dtype."""
        return self.meta[1]


def _look_at(grads: Sequence[Tensor]) -> list[list[Any]]:
    """The fields of `Form`, one of all gradients after the other."""
    forms, strides = list(map(_form, grads)), list(map(Tensor.stride, grads))
    return [list(map(type, grads)), forms, list(map(Tensor.is_neg, grads)), list(map(_is_zero, grads)), strides]


def _present(grads: Gradients) -> int:
    return sum(map(is_not, grads, repeat(None)))


def _form_of(g: Tensor) -> Form:
    return Form(*(column[0] for column in _look_at([g])))


def why_not_plain(t: Tensor) -> str | None:
    """Why the memory of a tensor is not what it seems, so that a compiled kernel must not read it; None if it is."""
    if type(t) not in PLAIN:
        return f"a {type(t).__name__}, a subclass of Tensor"
    if t.is_neg():
        return "a view with the negative bit set"
    if t._is_zerotensor():
        return "a zero tensor without memory"
    return None


def mark_overlaps(parameters: Sequence[Parameter]) -> None:
    """Find parameters and state tensors that lie in the same memory: those must be stepped one after the other."""
    spans = []
    for parameter in parameters:
        for t in (parameter.x, *parameter.state.values()):
            if isinstance(t, Tensor) and type(t) in PLAIN and t.numel() and t.device.type != "meta":
                last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
                spans.append((str(t.device), t.data_ptr(), t.data_ptr() + (last + 1) * t.itemsize, parameter))
    spans.sort(key=lambda span: span[:3])
    furthest = spans[0] if spans else None
    for span in spans[1:]:
        if furthest is not None and span[0] == furthest[0] and span[1] < furthest[2]:
            span[3].overlaps = furthest[3].overlaps = True
        if furthest is None or span[0] != furthest[0] or span[2] > furthest[2]:
            furthest = span


def _is_knowable(parameter: Parameter) -> bool:
    """Whether a parameter can be recognised: subclasses of Tensor, and what else may lie in a state, cannot."""
    return all(isinstance(t, Tensor) and type(t) in PLAIN for t in (parameter.x, *parameter.state.values()))
