"""The scalars of a step in plain torch: rates, which steps are taken, step sizes, figures.

On a CPU they are numbers, one parameter at a time. On a device they are vectors with an entry for each parameter, so
that a step of hundreds of parameters takes a few dozen launches for them, and the host never waits. The equations are
the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from adafactor.core import equations as eq
from adafactor.core import sums
from adafactor.core.bucket import Parameter
from adafactor.core.equations import Scalar
from adafactor.core.factoring import sum_dtype
from adafactor.core.rounding import keys, roots
from adafactor.core.settings import Rates, Settings
from adafactor.core.step import Update, not_finite


class Batch:
    """Parameters with the same settings, whose scalars are computed together."""

    def __init__(self, places: list[int], parameters: list[Parameter]):
        """Prepare what lasts; `places` are their numbers among the updates of a step."""
        self.places, self.parameters = places, parameters
        x = parameters[0].x
        self.on_host = len(parameters) == 1 and sums.on_host(x)
        self.count: Scalar = float(parameters[0].factoring.count)
        self.roots: tuple[Scalar, Scalar] | None = None
        if not self.on_host:
            sizes = [float(p.factoring.count) for p in parameters]
            self.count = torch.tensor(sizes, dtype=sum_dtype(x.device), device=x.device)
        if any(p.rounding == "stochastic" for p in parameters):
            pairs = [roots(p.settings.seed, p.number) for p in parameters]
            self.roots = pairs[0] if self.on_host else tuple(torch.tensor(pairs, device=x.device).unbind(1))  # type: ignore[assignment]
        self.updates: list[Update] = []
        self.taken: list[Update] = []
        self.mask: Tensor | None = None
        self._figures: dict[str, Tensor] = {}  # on a device: vectors of what `flush` hands to the traces

    def begin(self, updates: list[Update], settings: Settings) -> None:
        """The rates of step t (Algorithm 6), for every t of the batch."""
        self.updates, self.taken, self.settings, self.mask = updates, updates, settings, None
        t = self._read([u.parameter.state["step"] for u in updates]) + 1
        self.rates: Rates = settings.rates(t)
        self._give(beta2=self.rates.beta2, w1=self.rates.w1, w2=self.rates.w2)
        if self.roots is not None:
            first, second = keys(self.roots, t)  # type: ignore[arg-type]
            for u, one, two in zip(updates, self._spread(first), self._spread(second), strict=True):
                u.keys = one, two

    def admit(self) -> None:
        """Decide which steps are taken: here and now on a CPU, by a mask on the device elsewhere."""
        how = self.settings.on_nonfinite
        if how == "ignore":
            return
        if self.on_host or how == "raise":
            bad = [u for u in self.updates if not u.finite]
            if bad and how == "raise":
                raise not_finite(bad[0].parameter)
            self.taken = [u for u in self.updates if u.finite]
            return
        self.mask = torch.stack([_tensor(u.finite, self._device()) for u in self.updates]).bool()
        # an average with a decay of one and a weight of zero stays as it was
        beta2, w1, w2 = (where(self.mask, value, other) for value, other in zip(self.rates[:3], (1, 0, 0), strict=True))
        self._give(beta2=beta2, w1=w1, w2=w2, mask=self.mask, not_taken=~self.mask)

    def conclude(self) -> None:
        """Algorithm 4, lines 3 and 9: from RMS(X) and RMS(U) to the number that the update is multiplied with."""
        if not self.taken:
            return
        s, rho = self.settings, self.rates.rho
        rms_x = None
        if self.taken[0].x2 is not None:
            rms_x = eq.root_mean_square(self._gather([0.0 if u.x2 is None else u.x2 for u in self.taken]), self.count)
        rms_u = eq.root_mean_square(self._gather([u.u2 for u in self.taken]), self.count)
        alpha = eq.step_size(rho, rms_x if s.relative else None, s.eps[1])
        divisor = eq.clip_divisor(rms_u, s.clip)
        self._give(
            scale=(-alpha if s.maximize else alpha) / divisor, decay=1 - rho * s.weight_decay if s.weight_decay else 1.0
        )
        self._note(rms_x, alpha, rms_u, divisor > 1)

    def advance(self) -> None:
        """Count the step."""
        counts = [u.parameter.state["step"] for u in self.taken]
        if not counts:
            return
        if self.mask is None:
            torch._foreach_add_(counts, 1)
        else:  # in two operations: a wrapper of two tensors would add to its one count twice
            new = torch._foreach_add(counts, list(self.mask.to(counts[0].dtype).unbind()))
            torch._foreach_copy_(counts, new)

    def end(self) -> list[Parameter]:
        """Count the steps that were skipped, as far as the host knows of them, and return their parameters."""
        skipped = [u.parameter for u in self.updates if not any(u is taken for taken in self.taken)]
        for parameter in skipped:
            parameter.trace.skipped += 1
        self.updates, self.taken, self.mask = [], [], None
        return skipped

    def flush(self) -> None:
        """Hand what is on a device to the traces, without reading it."""
        if self._figures:
            names, columns = list(self._figures), map(torch.unbind, self._figures.values())
            for parameter, values in zip(self.parameters, zip(*columns, strict=True), strict=True):
                found = dict(zip(names, values, strict=True))
                skipped = found.pop("skipped")
                parameter.trace.add(rms_parameter=found.pop("rms_parameter", None), **found)
                parameter.trace.skipped = parameter.trace.skipped + skipped
            self._figures = {}

    def _note(self, rms_x: Scalar | None, alpha: Scalar, rms_u: Scalar, clipped: Tensor | bool) -> None:
        if self.on_host:
            self.parameters[0].trace.add(self.rates.beta2, rms_x, alpha, rms_u, int(clipped), 1)
            return
        assert isinstance(rms_u, Tensor)
        like = rms_u
        new = {"beta2": self.rates.beta2, "step_size": alpha, "rms_update": rms_u}
        if rms_x is not None:
            new["rms_parameter"] = rms_x
        taken = torch.ones_like(like, dtype=torch.int64) if self.mask is None else self.mask.long()
        counts = {"clipped": taken * clipped, "taken": taken, "skipped": 1 - taken}
        old = self._figures
        for key, value in new.items():
            value = value if isinstance(value, Tensor) else torch.full_like(like, value)
            self._figures[key] = torch.where(taken > 0, value, old[key]) if key in old else value
        for key, count in counts.items():
            self._figures[key] = old[key] + count if key in old else count

    def _give(self, **values: Scalar) -> None:
        """Give every update its entry of these scalars."""
        for name, value in values.items():
            for u, entry in zip(self.taken, self._spread(value), strict=False):
                setattr(u, name, entry)

    def _spread(self, value: Scalar) -> Iterator[Scalar]:
        if isinstance(value, Tensor) and value.dim():
            return iter(value.unbind())
        return iter([value] * len(self.updates))

    def _gather(self, values: Sequence[Scalar]) -> Scalar:
        if self.on_host:
            return values[0]
        return torch.stack([_tensor(value, self._device()) for value in values])

    def _read(self, counts: list[Tensor]) -> Scalar:
        return float(counts[0].item()) if self.on_host else torch.stack(counts).to(sum_dtype(self._device()))

    def _device(self) -> torch.device:
        return self.parameters[0].x.device


def keep_and_fade(decay: Scalar, weight: Scalar) -> tuple[Scalar, Scalar]:
    """Split β̂ into keep − fade, such that neither β̂ near 0 nor 1 − β̂ near 0 is lost in float32."""
    if isinstance(weight, Tensor):
        slow = weight < 0.5
        return torch.where(slow, 1.0, decay), torch.where(slow, weight, 0.0)
    return (1.0, weight) if weight < 0.5 else (decay, 0.0)


def where(mask: Tensor, value: Scalar, other: float) -> Tensor:
    """`value` where the mask says so, else `other`; a number does not lose digits on the way."""
    return torch.where(mask, _tensor(value, mask.device), other)


def _tensor(value: Scalar | bool, device: torch.device) -> Tensor:
    """A scalar as a tensor, made on the device: nothing is copied there."""
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=sum_dtype(device), device=device)
