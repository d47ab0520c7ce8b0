"""The Transformer of the paper's baseline (Vaswani et al., 2017), encoder and decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.loss import smoothed_cross_entropy
from lab.vocabulary import PAD


@dataclass(frozen=True)
class Shape:
    """What a model looks like."""

    layers: int  # of the encoder, and as many of the decoder
    width: int  # d_model
    heads: int
    filter: int  # width inside the feed-forward layers
    dropout: float = 0.1  # of embeddings and of what sublayers add
    norm: str = "pre"  # "pre": x + f(norm(x)); "post": norm(x + f(x)), as first published
    embedding: str = "scaled"  # a key of EMBEDDINGS
    tied: bool = True  # one matrix for both embeddings and the softmax
    inner_dropout: float = 0.0  # of attention weights and ReLUs


# Table 3 of the paper: initial standard deviation and multiplier of the embeddings, as powers of d_model.
EMBEDDINGS = {"scaled": (-0.5, 0.5), "unit": (0.0, 0.0), "plain": (-0.5, 0.0)}


Pasts = tuple[Tensor, Tensor] | None


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(B, T, parts·d) → `parts` tensors of (B, heads, T, d/heads)."""
    batch, length, _ = x.shape
    return x.view(batch, length, parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def join_heads(x: Tensor) -> Tensor:
    """(B, heads, T, d/heads) → (B, T, d)."""
    return x.transpose(1, 2).flatten(2)


def projection(width: int, parts: int = 1) -> nn.Linear:
    """A linear layer d → parts·d without bias: projections that read the same input are one matrix."""
    layer = nn.Linear(width, parts * width, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5)
    return layer


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself."""

    def __init__(self, shape: Shape) -> None:
        """Query, key and value are one matrix."""
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.inner_dropout
        self.inputs = projection(shape.width, 3)
        self.output = projection(shape.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, d) → (B, T, d); without a mask every position sees itself and what is before it."""
        query, key, value = split_heads(self.inputs(x), 3, self.heads)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None)
        out: Tensor = self.output(join_heads(seen))
        return out

    def extend(self, x: Tensor, past: Pasts) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One more position x (B, 1, d) after `past` keys and values: its output, and the new past."""
        query, key, value = split_heads(self.inputs(x), 3, self.heads)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        return self.output(join_heads(F.scaled_dot_product_attention(query, key, value))), (key, value)


class CrossAttention(nn.Module):
    """Multi-head attention of the decoder to the encoder's output."""

    def __init__(self, shape: Shape) -> None:
        """Key and value are one matrix."""
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.inner_dropout
        self.query = projection(shape.width)
        self.key_value = projection(shape.width, 2)
        self.output = projection(shape.width)

    def read(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output, each (B, heads, S, d/heads)."""
        key, value = split_heads(self.key_value(memory), 2, self.heads)
        return key, value

    def forward(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        (query,) = split_heads(self.query(x), 1, self.heads)
        dropout = self.dropout if self.training else 0.0
        out: Tensor = self.output(join_heads(F.scaled_dot_product_attention(query, *memory, mask, dropout)))
        return out


class FeedForward(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self, shape: Shape) -> None:
        """Both layers have biases, zero at first."""
        super().__init__()
        self.dropout = shape.inner_dropout
        self.widen, self.narrow = nn.Linear(shape.width, shape.filter), nn.Linear(shape.filter, shape.width)
        for layer in (self.widen, self.narrow):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        out: Tensor = self.narrow(F.dropout(F.relu(self.widen(x)), self.dropout, self.training))
        return out


class Layer(nn.Module):
    """One layer of the encoder or, with attention to the `other` sequence, of the decoder."""

    other: CrossAttention

    def __init__(self, shape: Shape, cross: bool) -> None:
        """Each sublayer has its norm and a residual connection."""
        super().__init__()
        self.attention = SelfAttention(shape)
        if cross:
            self.other = CrossAttention(shape)
        self.feed_forward = FeedForward(shape)
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(3 if cross else 2))
        self.pre = shape.norm == "pre"
        self.dropout = shape.dropout

    def residual(self, index: int, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer around which the input goes unchanged; `index` picks its norm."""
        norm = self.norms[index]
        if self.pre:
            return x + F.dropout(function(norm(x)), self.dropout, self.training)
        out: Tensor = norm(x + F.dropout(function(x), self.dropout, self.training))
        return out

    def forward(
        self, x: Tensor, own: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """(B, T, d) → (B, T, d); `own` and `other` are the attentions bound to their masks or caches."""
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
        """(B, T) ids → (B, T, d), with positions from `start`."""
        x = F.embedding(ids, self.embedding) * self.multiplier + self.positions[start : start + ids.shape[1]]
        return F.dropout(x, self.shape.dropout, self.training)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S) ids → memory (B, S, d) and which of it is no padding (B, 1, 1, S)."""
        mask = (source != PAD)[:, None, None, :]
        x = self.embed(source)
        for layer in self.layers("encoder"):
            x = layer(x, partial(layer.attention, mask=mask))
        return self.encoder_norm(x), mask

    def decode(self, target: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """(B, T) ids → (B, T, d); position t sees targets up to t and the whole source."""
        x = self.embed(target)
        for layer in self.layers("decoder"):
            other = partial(layer.other, memory=layer.other.read(memory), mask=mask)
            x = layer(x, partial(layer.attention, mask=None), other)
        out: Tensor = self.decoder_norm(x)
        return out

    def layers(self, part: str) -> list[Layer]:
        """The layers of the `encoder` or the `decoder`."""
        return [layer for layer in getattr(self, part) if isinstance(layer, Layer)]

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
