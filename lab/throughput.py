"""Training speed of the lab's model against the same model built from torch.nn.Transformer."""

from __future__ import annotations

import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab import vocabulary
from lab.batches import Batch, Batches
from lab.corpus import Corpus
from lab.machine import keep_freed_memory
from lab.model import Shape, Transformer, sinusoids
from lab.presets import Scale
from lab.vocabulary import PAD


class Reference(nn.Module):
    """The same architecture with torch's own layers; the loss is torch's too."""

    def __init__(self, shape: Shape, size: int) -> None:
        """A model of the given shape."""
        super().__init__()
        self.width = shape.width
        self.embedding = nn.Parameter(torch.randn(size, shape.width) * shape.width**-0.5)
        warnings.filterwarnings("ignore", message="enable_nested_tensor")  # only of use in evaluation
        self.body = nn.Transformer(
            shape.width, shape.heads, shape.layers, shape.layers, shape.filter, shape.dropout,
            batch_first=True, norm_first=shape.norm == "pre", bias=True,
        )  # fmt: skip
        for layer in self.body.modules():  # the lab's model has no dropout on the attention weights
            if isinstance(layer, nn.MultiheadAttention):
                layer.dropout = 0.0
        self.register_buffer("positions", sinusoids(1024, shape.width), persistent=False)
        self.positions: Tensor
        self.dropout = shape.dropout

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) → (B, T, d)."""
        x = F.embedding(ids, self.embedding) * self.width**0.5 + self.positions[: ids.shape[1]]
        return F.dropout(x, self.dropout, self.training)

    def loss(self, source: Tensor, target_in: Tensor, target_out: Tensor, smoothing: float) -> Tensor:
        """Label-smoothed cross entropy over target tokens."""
        padding = source == PAD
        x = self.body(
            self.embed(source),
            self.embed(target_in),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target_in.shape[1]),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        real = target_out != PAD
        return F.cross_entropy(F.linear(x[real], self.embedding), target_out[real], label_smoothing=smoothing)


def compare(scale: Scale, corpus: Corpus, cache: Path, steps: int) -> tuple[float, float]:
    """Tokens per second of forward and backward, ours and torch's, on the same batches in turn."""
    keep_freed_memory()
    words = vocabulary.train(corpus, scale.vocabulary, cache)
    stream = Batches(corpus.train, words, scale.tokens).stream(seed=0)
    models: tuple[Transformer | Reference, ...] = (
        Transformer(scale.shape, len(words)),
        Reference(scale.shape, len(words)),
    )
    speeds: tuple[list[float], list[float]] = ([], [])
    for step in range(steps + 3):
        batch = next(stream)
        for model, found in zip(models, speeds, strict=True):
            seconds = _time(model, batch, scale.smoothing)
            if step >= 3:  # the first ones warm up
                found.append(batch.tokens / seconds)
    return statistics.median(speeds[0]), statistics.median(speeds[1])


def _time(model: Transformer | Reference, batch: Batch, smoothing: float) -> float:
    began = time.perf_counter()
    model.zero_grad()
    torch.autograd.backward(model.loss(batch.source, batch.target_in, batch.target_out, smoothing))
    return time.perf_counter() - began
