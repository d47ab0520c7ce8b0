"""Parameters of one group on one device, one after the other: the verbs of the contract."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from adafactor.core import rounding
from adafactor.core.contract import Executor as AnyExecutor
from adafactor.core.contract import Gradients, Parameter, Sums
from adafactor.core.settings import Settings
from adafactor.core.sums import vector
from adafactor.core.warn import warn
from adafactor.kernels import eager
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import proof
from adafactor.kernels.triton.launch import aligned
from adafactor.kernels.triton.plan import Plan


class Executor:
    """The plans of some parameters, and a table of their scalars on the device."""

    def __init__(self, parameters: list[Parameter]):
        """Prepare each of them."""
        self.parameters, self.in_lockstep, self.sums = parameters, parameters[0].in_lockstep, list[Sums]()
        self._device, self._steps = parameters[0].x.device, [p.state["step"] for p in parameters]
        table = torch.zeros(len(parameters), f.FIELDS, dtype=torch.float64, device="cpu")
        roots = [rounding.roots(p.settings.seed, p.number) for p in parameters]
        table[:, f.ROOT1.value : f.ROOT2.value + 1] = torch.tensor(roots, dtype=torch.float64, device="cpu")
        table[:, f.ALPHA.value : f.LAST_BETA2.value + 1] = torch.nan  # no step has been taken
        self._fields = table.to(self._device)
        self._plans = [Plan(p, row) for p, row in zip(parameters, self._fields, strict=True)]
        self._must_measure = [p.measures_x for p in parameters]
        small = [i for i, p in enumerate(parameters) if p.x.numel() <= proof.LARGEST]
        self._in_doubt, self._tries = [] if self.in_lockstep else small, proof.TRIES
        self._eager: list[AnyExecutor] = []  # what steps in our place, once a step was wrong
        self._grads: Gradients = []
        self._settings: Sequence[Settings] = ()
        self._has_stepped = self._has_new = False

    def begin(self, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Take the gradients; compute the rates where t is; measure what was written to."""
        self._grads, self._settings, self._has_stepped = grads, settings, False
        if written is not None:  # ΣX² is of what was there before
            known = zip(self._must_measure, written, self.parameters, strict=True)
            self._must_measure = [a or (b and p.measures_x) for a, b, p in known]
        with self._on_device():
            if self._is_capturing():  # what a graph reads with every replay must last as long as the optimizer
                self.parameters[0].metrics.captured.append(self)
            rates = settings[self.parameters[0].group].rates(torch.stack(self._steps).double() + 1)
            for column, rate in enumerate(rates):
                self._fields[:, column] = rate
            for plan, g, wanted in zip(self._plans, grads, self._must_measure, strict=True):
                if wanted and g is not None:
                    plan.measure()

    def step(self) -> None:
        """Take every parameter from G to X, so that the last pass finds in the cache what the first has read."""
        self._has_stepped = True
        with self._on_device():
            done = self._prove() if self._in_doubt and not self._is_capturing() else ()
            if self._eager:
                left = {plan.parameter: g for plan, g in self._present(done)}
                proof.step_in_eager(self._eager, left, self._settings)
                return
            self._has_new = True
            for plan, g in self._present(done):
                plan.step(aligned(g))

    def moments(self) -> None:
        """Run the first pass of all, and hand over what other ranks have a share in."""
        with self._on_device():
            for plan, g in self._present():
                plan.moments(aligned(g))
            plans = [plan for plan, _ in self._present()]
            if plans:
                flags = torch.stack([plan.probe() for plan in plans]).isfinite().unbind()
                self.sums = [plan.sums(flag) for plan, flag in zip(plans, flags, strict=True)]

    def norms(self) -> None:
        """Find ΣU² and ΣX² of what is here of shards, from the completed means."""
        with self._on_device():
            for (plan, _), one in zip(self._present(), self.sums, strict=True):
                one.u2, one.x2 = plan.norms()

    def apply_(self) -> None:
        """Run the last pass of all, of shards with the completed sums."""
        self._has_stepped = self._has_new = True
        with self._on_device():
            if self.parameters[0].shard is not None and self.sums:
                self._note_sums()
            for plan, g in self._present():
                plan.apply_(aligned(g))

    def end(self) -> list[Parameter]:
        """Let go of the gradients; tell autograd what was written behind its back."""
        if self._has_stepped:
            self._must_measure = [a and g is None for a, g in zip(self._must_measure, self._grads, strict=True)]
            torch.autograd.graph.increment_version([plan.x for plan, _ in self._present()])
        self._grads, self.sums = [], []
        return []

    def flush(self) -> None:
        """Hand the metrics of the steps since the last time to the parameters, without reading them."""
        for executor in self._eager:
            executor.flush()
        if not self._has_new:
            return
        self._has_new = self in self.parameters[0].metrics.captured  # then graphs step without a word
        now = self._fields.clone()
        self._fields[:, f.STEPS.value : f.SKIPPED.value + 1].zero_()
        for p, row in zip(self.parameters, now, strict=True):
            alpha, rms_x, rms_u, beta2, steps, clipped, skipped = row[f.ALPHA.value : f.SKIPPED.value + 1].unbind()
            rms_x = rms_x if p.measures_x else None
            p.metrics.add(beta2, rms_x, alpha.abs(), rms_u, clipped.long(), steps.long())
            p.metrics.skipped = p.metrics.skipped + skipped.long()

    def _prove(self) -> list[int]:
        """Step one of each unproven kind in eager PyTorch, too; return which, all rightly stepped now."""
        kinds = {i: proof.kind_of(self.parameters[i]) for i in self._in_doubt}
        self._in_doubt = [i for i, k in kinds.items() if self._tries and proof.known().right[k] < proof.STEPS]
        self._tries -= 1
        chosen = {kinds[i]: (i, g) for i in self._in_doubt if (g := self._grads[i]) is not None}
        done = []
        for i, g in chosen.values():
            done.append(i)
            if problem := proof.prove(self._plans[i], aligned(g), self._settings):
                card = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device
                warn(
                    f"Triton's step was wrong on {card}, so eager PyTorch took it and takes those to come: {problem}. "
                    "Please report this line, with the versions of torch and Triton, as an issue."
                )
                self._has_new = True
                self.flush()
                self._in_doubt, self._eager = [], list(eager.prepare(self.parameters))
                break
        return done

    def _note_sums(self) -> None:
        """Put ΣU², ΣX² and whether G² is finite, of all ranks, where `conclude` looks for them."""
        finite = vector([one.finite for one in self.sums], self._device)
        u2 = vector([one.u2 for one in self.sums], self._device)
        x2 = vector([0.0 if one.x2 is None else one.x2 for one in self.sums], self._device)
        three = torch.stack([torch.where(finite > 0, 0.0, torch.nan), u2, x2], dim=1)
        torch._foreach_copy_([plan.completed for plan, _ in self._present()], list(three.unbind()))

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _present(self, done: Collection[int] = ()) -> Iterator[tuple[Plan, Tensor]]:
        """Plans with their gradients, but for those that were stepped already."""
        for i, (plan, g) in enumerate(zip(self._plans, self._grads, strict=True)):
            if g is not None and i not in done:
                yield plan, g

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the device current: kernels are launched there."""
        is_host = self._device.type == "cpu"
        return nullcontext() if is_host else torch.get_device_module(self._device).device(self._device)
