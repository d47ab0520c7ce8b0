"""Gradients that a GradScaler has scaled.

Where parameters are on a device, torch's GradScaler leaves two tensors there and lets the optimizer do the rest, so
that the host need not wait: what the gradients were multiplied with, and whether one of them is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adafactor.core import sums


class Scaling(NamedTuple):
    """What a GradScaler left."""

    scale: Tensor | None  # what the gradients were multiplied with; None: they have been divided again
    found_inf: Tensor  # not 0: no parameter shall be stepped

    @classmethod
    def of(cls, optimizer: Any) -> Scaling | None:
        """What lies on this optimizer; None outside of `GradScaler.step`."""
        found_inf = getattr(optimizer, "found_inf", None)
        return None if found_inf is None else cls(getattr(optimizer, "grad_scale", None), found_inf)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The two as float32 of one element on a device, for a kernel to read."""
        one = self.found_inf.new_ones(1) if self.scale is None else self.scale
        scale, found_inf = (t.to(device, torch.float32, non_blocking=True).reshape(1) for t in (one, self.found_inf))
        return scale, found_inf

    def unscale_(self, grads: Sequence[Tensor], may_wait: bool) -> bool:
        """Divide gradients, in place as GradScaler does; return False if they shall not be stepped.

        Where the host may not wait, they become NaN instead, and so are skipped.
        """
        may_wait = may_wait or sums.on_host(self.found_inf)
        if may_wait and bool(self.found_inf):
            return False
        for device in {g.device for g in grads}:
            scale, found_inf = self.on(device)
            factor = scale.reciprocal() if may_wait else torch.where(found_inf == 0, scale.reciprocal(), torch.nan)
            torch._foreach_mul_([g for g in grads if g.device == device], factor.reshape(()))
        return True
