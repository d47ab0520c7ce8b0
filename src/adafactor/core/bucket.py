"""The cached preparation of a step, and the fingerprint that decides whether the cache is still valid.

A bucket is the whole model, sharded or not, or what steps together inside backward: one parameter, or those of a
wrapped module. A kernel prepares it once (addresses, tables, scratch) and then steps it as long as nothing has changed
but the values of the gradients and the rates of the groups. To look at hundreds of small tensors one by one in Python
takes longer than to step them: so the *fingerprint* is a few lists, one property of all tensors after the other, each
made by a loop that runs in C, and what torch's own guard says of all tensors in one call.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple

from torch import Tensor

from adafactor.core import dtensor
from adafactor.core.contract import EXACT_TYPES, Executor, Fallback, Form, Gradients, Parameter, Prepare
from adafactor.core.settings import Settings
from adafactor.core.state import check_gradient
from adafactor.distributed.reductions import Ranks

try:  # one call for many tensors; the rest of torch may do without it one day
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

Group = dict[str, Any]


class Contents(NamedTuple):
    """What an optimizer holds when it takes a step."""

    groups: list[Group]
    settings: list[Settings]  # of each group
    states: MutableMapping[Tensor, Any]
    backend: str


_grad = attrgetter("grad")
_form = attrgetter("layout", "dtype", "device", "shape")
_version = attrgetter("_version")


class Bucket:
    """Parameters that step together, and what the kernels prepared for them."""

    def __init__(
        self,
        wholes: list[Parameter],
        ranks: Ranks | None,
        prepare: Prepare,
        now: Contents,
        only: list[tuple[int, int]] | None = None,
    ):
        """Remember how everything is now.

        Args:
            wholes: the parameters that step together, or whose slices do.
            ranks: completes the sums of sharded parameters; None if there are none.
            prepare: makes executors for them.
            now: what the optimizer holds.
            only: of the parameters that step inside backward, the group of each and its place there; None: all.
        """
        self.wholes, self.ranks, self.prepare, self.only = wholes, ranks, prepare, only
        self.parameters = [parameter for whole in wholes for parameter in whole.stepping]
        self.is_cut = any(whole.slices is not None for whole in wholes)
        self.executors: list[Executor] = []
        self.fallback: Fallback | None = None  # a parameter that the backend has left to `eager`
        self.places: dict[Executor, list[int]] = {}  # of each executor's parameters in the bucket
        own = {whole.p for whole in wholes}
        self.members = [p in own for p in self._all(now.groups)]
        self.backend, self.settings = now.backend, [s.without_rates for s in now.settings]
        self.forms: Forms | None = None  # of the gradients that `executors` were prepared for
        # torch counts how often these are written to; of a shard, by way of the DTensor and of its part
        both = {id(t): t for whole in wholes for t in (whole.p, whole.x)}
        self.counted = [t for t in both.values() if not t.is_inference()]
        self.versions = list(map(_version, self.counted))
        self.new_metrics = False  # since `flush`
        self.fingerprint: tuple[list[list[Any]], Forms] | None = None
        if all(map(_can_fingerprint, wholes)):
            places, tensors = self._look(now)
            self.fingerprint = places, Forms(_look_at(tensors))

    def holds(self, now: Contents) -> bool:
        """Whether everything but the gradients is as it was when the bucket was made; rates may differ."""
        settings = [s.without_rates for s in now.settings]
        if self.fingerprint is None or now.backend != self.backend or settings != self.settings:
            return False
        try:
            places, tensors = self._look(now)
            return places == self.fingerprint[0] and self.fingerprint[1].match(tensors)
        except (TypeError, AttributeError, IndexError, RuntimeError):  # something is gone, or is no tensor any more
            return False

    def gradients(self, groups: list[Group]) -> Gradients | None:
        """The gradients of the parameters; None if another parameter has one, which must come in first."""
        every = list(map(_grad, self._all(groups)))
        if len(self.wholes) == len(every):
            return every
        grads = list(compress(every, self.members))
        return grads if _present(grads) == _present(every) else None

    def match(self, grads: Gradients) -> Gradients:
        """Have everything prepared for gradients of this form; return them as the kernels take them.

        Everything that can be wrong with a gradient is found here, before anything is changed.
        """
        if self.ranks is not None:
            grads = self.ranks.align(self.wholes, grads)
        if self.is_cut:
            grads = self._cut(grads)
        if self.forms is None or not self.forms.match(grads):
            for parameter, g in zip(self.parameters, grads, strict=True):
                if g is not None:
                    check_gradient(parameter.x, g, parameter.name)
                    parameter.form = _form_of(g)
            self._prepare()
        return grads

    def written_between_steps(self) -> list[bool] | None:
        """Which parameters somebody has written to since the last step, as far as torch knows; None: nobody has.

        A write through `p.data` is hidden from torch; the compiled step finds it by other means.
        """
        if list(map(_version, self.counted)) == self.versions:
            return None
        before = dict(zip(map(id, self.counted), self.versions, strict=True))
        written = [any(id(t) in before and t._version != before[id(t)] for t in (p.p, p.x)) for p in self.wholes]
        return [was for was, whole in zip(written, self.wholes, strict=True) for _ in whole.stepping]

    def end_step(self) -> None:
        """Remember how the step has left the parameters."""
        self.versions, self.new_metrics = list(map(_version, self.counted)), True

    def flush(self) -> None:
        """Hand the metrics of the steps since the last time to what is behind `report()`."""
        if self.new_metrics:
            for executor in self.executors:
                executor.flush()
            self.new_metrics = False

    def _cut(self, grads: Gradients) -> Gradients:
        """The gradients of all slices, of those of the wholes."""
        for whole, g in zip(self.wholes, grads, strict=True):
            if g is not None and whole.slices is not None:
                check_gradient(whole.x, g, whole.name)
        return [part for whole, g in zip(self.wholes, grads, strict=True) for part in whole.cut(g)]

    def _prepare(self) -> None:
        self.flush()
        mark_overlaps([whole for whole in self.wholes if any(p.form is not None for p in whole.stepping)])
        known = [p for p in self.parameters if p.form is not None and p.factoring.count]
        self.executors, self.fallback = self.prepare(known, self.backend)
        place = {parameter: i for i, parameter in enumerate(self.parameters)}
        self.places = {e: [place[parameter] for parameter in e.parameters] for e in self.executors}
        nothing = (None,) * len(Form._fields)  # no gradient has this form
        forms = [parameter.form or nothing for parameter in self.parameters]
        self.forms = Forms([list(column) for column in zip(*forms, strict=True)])

    def _all(self, groups: list[Group]) -> list[Tensor]:
        """The parameters, in the groups as they are now, among which this bucket's are."""
        if self.only is None:
            return list(chain.from_iterable(group["params"] for group in groups))
        return [groups[group]["params"][place] for group, place in self.only]

    def _look(self, now: Contents) -> tuple[list[list[Any]], list[Tensor]]:
        """What must stay so: who the parameters are and where they and their states lie; and these tensors' forms."""
        every = self._all(now.groups)
        params = every if len(self.wholes) == len(every) else list(compress(every, self.members))
        entries = list(map(now.states.get, params))
        tensors: list[Any] = [*params, *chain.from_iterable(map(dict.values, entries))]  # type: ignore[arg-type]
        places: list[list[Any]] = [list(map(id, every)), list(map(id, entries))]
        if self.only is None:
            places.append([len(group["params"]) for group in now.groups])
        if self.ranks is not None:
            places.append([(type(p), getattr(p, "placements", None), p.requires_grad) for p in every])
            places.append(list(map(type, tensors)))
            tensors = dtensor.parts(tensors)
        return [*places, list(map(Tensor.data_ptr, tensors))], tensors


class Forms:
    """What tensors look like, the fields of `Form` one after the other; others can be compared with them."""

    def __init__(self, columns: list[list[Any]]):
        """Take what `_look_at` has found."""
        self._columns = columns
        self._guard: Callable[..., bool] | None = None  # says yes for such tensors at once; its no means nothing

    def match(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether tensors look like this, those that are there."""
        present = [t for t in tensors if t is not None]
        is_whole, columns = len(present) == len(tensors), self._columns
        if not is_whole:
            here = [t is not None for t in tensors]
            columns = [list(compress(column, here)) for column in columns]
        try:
            if is_whole and self._guard is not None and self._guard(*present):
                return True
            matches = columns == _look_at(present)
        except RuntimeError:  # a sparse gradient has no strides
            return False
        if matches and is_whole and TensorGuards is not None:
            self._guard = TensorGuards(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return matches


def _look_at(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """The fields of `Form`, one of all tensors after the other."""
    looks = type, _form, Tensor.is_neg, Tensor._is_zerotensor, Tensor.stride
    return [list(map(look, tensors)) for look in looks]


def _present(grads: Gradients) -> int:
    return sum(map(is_not, grads, repeat(None)))


def _form_of(g: Tensor) -> Form:
    return Form(*(column[0] for column in _look_at([g])))


def mark_overlaps(parameters: Sequence[Parameter]) -> None:
    """Find parameters and state tensors that lie in the same memory: those must be stepped one after the other."""
    spans = []
    for parameter in parameters:
        for t in (parameter.x, *parameter.state.values()):
            if isinstance(t, Tensor) and type(t) in EXACT_TYPES and t.numel() and t.device.type != "meta":
                last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
                spans.append((str(t.device), t.data_ptr(), t.data_ptr() + (last + 1) * t.itemsize, parameter))
    spans.sort(key=lambda span: span[:3])
    furthest = spans[0] if spans else None
    for span in spans[1:]:
        if furthest is not None and span[0] == furthest[0] and span[1] < furthest[2]:
            for parameter in (*span[3].stepping, *furthest[3].stepping):
                parameter.overlaps = True
        if furthest is None or span[0] != furthest[0] or span[2] > furthest[2]:
            furthest = span


def _can_fingerprint(parameter: Parameter) -> bool:
    """Whether a parameter can be recognised: subclasses of Tensor, and what else may lie in a state, cannot."""
    return all(isinstance(t, Tensor) and type(t) in EXACT_TYPES for t in (parameter.x, *parameter.state.values()))
