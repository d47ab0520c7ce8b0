"""Label-smoothed cross entropy and the softmax's matrix product as one function.

Its gradient by the logits is known as soon as the loss is, so it takes the logits' own place in memory: with
a vocabulary of thousands this saves a good part of a training step on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class SmoothedCrossEntropy(torch.autograd.Function):
    """Mean over N of log Σ exp(z) − (1 − ε)·z_y − ε·mean(z), where z = x·Wᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, smoothing: float) -> Tensor:
        """The loss of x (N, d) with weight (V, d) for target (N,)."""
        outputs = F.linear(x, weight)  # (N, V); under autocast in 16 bits
        logits = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        count, size = logits.shape
        wanted = (1 - smoothing) * logits.gather(1, target[:, None])[:, 0] + smoothing * logits.mean(1)  # (N,)
        top = logits.amax(1, keepdim=True)
        exps = logits.sub_(top).exp_()
        total = exps.sum(1, keepdim=True)
        loss = ((total.log() + top)[:, 0] - wanted).mean()
        # ∂loss/∂z = (softmax(z) − (1 − ε)·onehot(y) − ε/V) / N
        gradient = exps.mul_(1 / (count * total)).sub_(smoothing / (size * count))
        rows = torch.arange(count, device=x.device)
        gradient[rows, target] -= (1 - smoothing) / count
        ctx.save_for_backward(x, weight, gradient.to(outputs.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients by x and weight."""
        x, weight, gradient = ctx.saved_tensors
        (scale,) = outer
        by_x = gradient @ weight.to(gradient.dtype)
        by_weight = gradient.T @ x.to(gradient.dtype)
        return scale * by_x.to(x.dtype), scale * by_weight.to(weight.dtype), None, None


def smoothed_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """The label-smoothed loss of outputs x (N, d) before the softmax of `weight` (V, d)."""
    loss: Tensor = SmoothedCrossEntropy.apply(x, weight, target, smoothing)
    return loss
