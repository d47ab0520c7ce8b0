"""Products with a weight matrix, in float32 on a CPU by oneDNN: on AMD's processors it takes half the time of MKL.

torch.nn.Linear calls MKL there. The numbers differ from MKL's in the last digits, as they do between processors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x·Wᵀ of x (…, d) and W (e, d)."""
    if not _is_for_onednn(x) or not _is_for_onednn(weight):
        return F.linear(x, weight)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out


def _is_for_onednn(t: Tensor) -> bool:
    if torch.compiler.is_compiling() or not t.is_cpu or t.dtype != torch.float32:
        return False
    return torch.backends.mkldnn.is_available() and not torch.is_autocast_enabled("cpu")


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Gᵀ·x (e, d) of G (N, e) and x (N, d); the shorter side first, which is faster."""
    if gradient.shape[1] > x.shape[1]:
        return product(x.T, gradient.T).T
    return product(gradient.T, x.T)


class Product(torch.autograd.Function):
    """x·Wᵀ, and its gradients by the same product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """(…, d) and (e, d) → (…, e)."""
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients by x and by W."""
        (x, weight), (gradient,) = ctx.saved_tensors, outer
        return product(gradient, weight.T), weight_gradient(gradient.flatten(0, -2), x.flatten(0, -2))


class Linear(nn.Linear):
    """torch's layer, with the product above."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, e)."""
        if not _is_for_onednn(x):
            return super().forward(x)
        out: Tensor = Product.apply(x, self.weight)
        return out if self.bias is None else out + self.bias
