"""A GPT of any size for the study of capacity; its layers compute in float32, a block of rows at a time.

Processors without bfloat16 arithmetic multiply such matrices many times more slowly than float32 ones, and a float32
copy of a whole matrix would be memory that no optimizer can save.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, HEADS = 50257, 32, 16  # GPT-2's vocabulary, and a short batch: activations are not the question
RATIO = 64  # width to layers, as in GPT-2
BLOCK = 2**20  # elements that are converted at a time
STD = 0.02


class Product(torch.autograd.Function):
    """Like F.linear without a bias, in float32, with temporaries of one block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """From (tokens, inputs) and (outputs, inputs) to (tokens, outputs)."""
        ctx.save_for_backward(x, w)
        wide, out = x.float(), x.new_empty(len(x), len(w))
        for rows in pieces(w):
            out[:, rows] = wide @ w[rows].float().t()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """For x and w."""
        (x, w), (g,) = ctx.saved_tensors, grads
        wide, to_x, to_w = x.float(), torch.zeros(x.shape), torch.empty_like(w)
        for rows in pieces(w):
            part = g[:, rows].float()
            to_x += part @ w[rows].float()
            to_w[rows] = part.t() @ wide
        return to_x.to(x.dtype), to_w


def pieces(w: Tensor) -> Iterator[slice]:
    """Blocks of rows."""
    rows = max(1, BLOCK // w.shape[1])
    return (slice(start, start + rows) for start in range(0, len(w), rows))


def linear(x: Tensor, w: Tensor) -> Tensor:
    """The above, for all dtypes: F.linear would take one more copy of a tied weight's gradient in float32."""
    product: Tensor = Product.apply(x, w)
    return product


class Layer(nn.Module):
    """Attention and a feed-forward network, each on a normed input and added to it."""

    def __init__(self, width: int, std: float, **kind: Any):
        """12·width² numbers, and two norms."""
        super().__init__()
        self.norms = nn.ParameterList(torch.ones(width, **kind) for _ in range(2))
        self.read, self.up = (drawn((n * width, width), STD, **kind) for n in (3, 4))
        self.write, self.down = drawn((width, width), std, **kind), drawn((width, 4 * width), std, **kind)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width)."""
        width = x.shape[1]
        heads = linear(F.layer_norm(x, (width,), self.norms[0]), self.read).view(len(x), 3, HEADS, -1)
        q, k, v = heads.permute(1, 2, 0, 3).unsqueeze(1)  # each (1, heads, tokens, width / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]
        x = x + linear(mixed.transpose(0, 1).reshape(len(x), width), self.write)
        return x + linear(F.gelu(linear(F.layer_norm(x, (width,), self.norms[1]), self.up)), self.down)


class GPT(nn.Module):
    """`width / 64` layers; the embedding is the output layer too. Activations are recomputed, layer by layer."""

    def __init__(self, width: int, dtype: torch.dtype, device: str = "cpu"):
        """Weights are drawn in place, in their own dtype."""
        super().__init__()
        if width % HEADS:
            raise ValueError(f"width={width} must be a multiple of {HEADS}")
        layers = layers_of(width)
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.embedding = drawn((VOCABULARY, width), STD, **kind)
        self.positions = drawn((LENGTH, width), STD, **kind)
        self.layers = nn.ModuleList(Layer(width, STD / (2 * layers) ** 0.5, **kind) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(width, **kind))
        self.output = self.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each token from those before it."""
        x = F.embedding(tokens[:-1], self.embedding) + self.positions[: len(tokens) - 1]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = linear(F.layer_norm(x, (x.shape[1],), self.norm), self.output)
        return F.cross_entropy(logits.float(), tokens[1:])


def layers_of(width: int) -> int:
    """How deep a GPT of that width is."""
    return max(1, round(width / RATIO))


def count(width: int) -> int:
    """The parameters of a GPT of that width."""
    return layers_of(width) * (12 * width**2 + 2 * width) + (VOCABULARY + LENGTH + 1) * width


def drawn(shape: tuple[int, int], std: float, **kind: Any) -> nn.Parameter:
    """Normal numbers, the same million over and over: cheap, and never a float32 copy of the tensor."""
    p = nn.Parameter(torch.empty(shape, **kind))
    if not p.is_meta:
        some = torch.randn(BLOCK + 7, generator=torch.Generator().manual_seed(0)).mul_(std)
        for part in p.detach().view(-1).split(len(some)):
            part.copy_(some[: len(part)])
    return p
