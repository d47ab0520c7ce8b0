"""The Transformer of the paper's baseline (Vaswani et al., 2017), encoder and decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loss import smoothed_cross_entropy
from .vocabulary import PAD


@dataclass(frozen=True)
class Shape:
    """What a model looks like."""

    layers: int  # of the encoder, and as many of the decoder
    width: int  # d_model
    heads: int
    filter: int  # width inside the feed-forward layers
    dropout: float = 0.1
    norm: str = "pre"  # "pre": x + f(norm(x)); "post": norm(x + f(x)), as first published
    embedding: str = "scaled"  # a key of EMBEDDINGS
    tied: bool = True  # one matrix for both embeddings and the softmax


# Table 3 of the paper: initial standard deviation and multiplier of the embeddings, as powers of d_model.
EMBEDDINGS = {"scaled": (-0.5, 0.5), "unit": (0.0, 0.0), "plain": (-0.5, 0.0)}


class Attention(nn.Module):
    """Multi-head attention; the projections that read the same input are one matrix."""

    def __init__(self, width: int, heads: int, cross: bool = False) -> None:
        """Attention from a sequence to itself or, if ``cross``, to another."""
        super().__init__()
        self.heads = heads
        sizes = (1, 2) if cross else (3,)
        self.inputs = nn.ModuleList(nn.Linear(width, n * width, bias=False) for n in sizes)
        self.output = nn.Linear(width, width, bias=False)
        for weight in (*(layer.weight for layer in self.inputs), self.output.weight):
            nn.init.normal_(weight, std=width**-0.5)

    def split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, T, parts·d) → ``parts`` tensors of (B, heads, T, d/heads)."""
        batch, length, _ = x.shape
        return x.view(batch, length, parts, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def join(self, x: Tensor) -> Tensor:
        """(B, heads, T, d/heads) → (B, T, d), through the output projection."""
        return self.output(x.transpose(1, 2).flatten(2))

    def own(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Self-attention; without a mask every position sees itself and what is before it."""
        query, key, value = self.split(self.inputs[0](x), 3)
        return self.join(F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None))

    def memory(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of the other sequence, each (B, heads, S, d/heads)."""
        return self.split(self.inputs[1](memory), 2)

    def cross(self, x: Tensor, memory: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        """Attention to another sequence's keys and values."""
        (query,) = self.split(self.inputs[0](x), 1)
        return self.join(F.scaled_dot_product_attention(query, *memory, mask))


class FeedForward(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self, width: int, inner: int) -> None:
        """Both layers have biases, zero at first."""
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)
        for layer in (self.widen, self.narrow):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        return self.narrow(F.relu(self.widen(x)))


class Layer(nn.Module):
    """One layer of the encoder or, with ``cross`` attention, of the decoder."""

    def __init__(self, shape: Shape, cross: bool) -> None:
        """Each sublayer has its norm and a residual connection."""
        super().__init__()
        self.attention = Attention(shape.width, shape.heads)
        self.cross = Attention(shape.width, shape.heads, cross=True) if cross else None
        self.feed_forward = FeedForward(shape.width, shape.filter)
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(3 if cross else 2))
        self.pre = shape.norm == "pre"
        self.dropout = shape.dropout

    def residual(self, index: int, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer around which the input goes unchanged; ``index`` picks its norm."""
        norm = self.norms[index]
        if self.pre:
            return x + F.dropout(function(norm(x)), self.dropout, self.training)
        return norm(x + F.dropout(function(x), self.dropout, self.training))

    def forward(
        self, x: Tensor, own: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """(B, T, d) → (B, T, d); ``own`` and ``other`` are the attentions bound to their masks or caches."""
        x = self.residual(0, x, own)
        if other is not None:
            x = self.residual(1, x, other)
        return self.residual(-1, x, self.feed_forward)


class Transformer(nn.Module):
    """Encoder, decoder, embeddings and softmax."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        """Initialise with torch's global generator."""
        super().__init__()
        self.shape = shape
        spread, multiplier = EMBEDDINGS[shape.embedding]
        self.multiplier = shape.width**multiplier
        self.embedding = nn.Parameter(torch.randn(vocabulary, shape.width) * shape.width**spread)
        self.softmax = self.embedding
        if not shape.tied:
            self.softmax = nn.Parameter(torch.randn(vocabulary, shape.width) * shape.width**-0.5)
        self.encoder = nn.ModuleList(Layer(shape, cross=False) for _ in range(shape.layers))
        self.decoder = nn.ModuleList(Layer(shape, cross=True) for _ in range(shape.layers))
        # A pre-norm stack ends unnormalised.
        last = nn.LayerNorm if shape.norm == "pre" else nn.Identity
        self.encoder_norm, self.decoder_norm = last(shape.width), last(shape.width)
        self.register_buffer("positions", sinusoids(1024, shape.width), persistent=False)
        self.positions: Tensor

    def embed(self, ids: Tensor, start: int = 0) -> Tensor:
        """(B, T) ids → (B, T, d), with positions from ``start``."""
        x = F.embedding(ids, self.embedding) * self.multiplier + self.positions[start : start + ids.shape[1]]
        return F.dropout(x, self.shape.dropout, self.training)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S) ids → memory (B, S, d) and which of it is no padding (B, 1, 1, S)."""
        mask = (source != PAD)[:, None, None, :]
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, lambda x, layer=layer: layer.attention.own(x, mask))
        return self.encoder_norm(x), mask

    def decode(self, target: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """(B, T) ids → (B, T, d); position t sees targets up to t and the whole source."""
        x = self.embed(target)
        for layer in self.decoder:
            seen = layer.cross.memory(memory)
            x = layer(
                x,
                lambda x, layer=layer: layer.attention.own(x, None),
                lambda x, layer=layer, seen=seen: layer.cross.cross(x, seen, mask),
            )
        return self.decoder_norm(x)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The decoder's output (B, T, d) before the softmax."""
        return self.decode(target, *self.encode(source))

    def logits(self, x: Tensor) -> Tensor:
        """(…, d) → (…, vocabulary)."""
        return F.linear(x, self.softmax)

    def loss(self, source: Tensor, target_in: Tensor, target_out: Tensor, smoothing: float) -> Tensor:
        """Label-smoothed cross entropy, the mean over target tokens; padding never reaches the softmax."""
        real = target_out != PAD
        x = self(source, target_in)[real]  # (N, d)
        return smoothed_cross_entropy(x, self.softmax, target_out[real], smoothing)


def sinusoids(length: int, width: int) -> Tensor:
    """The position signal (length, width): sines, then cosines, of wavelengths from 2π to 10000·2π."""
    timescales = torch.exp(torch.arange(width // 2) * (-math.log(10000.0) / (width // 2 - 1)))
    angles = torch.arange(length)[:, None] * timescales
    return torch.cat([angles.sin(), angles.cos()], dim=1)
