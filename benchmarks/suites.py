"""The shapes that are stepped: models as lists of shapes, without the models."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Suite:
    """A model's shapes."""

    name: str
    title: str
    shapes: tuple[Shape, ...]

    @property
    def parameters(self) -> int:
        """How many numbers there are in all."""
        return sum(map(prod, self.shapes))


def transformer(layers: int, width: int, vocabulary: int, positions: int) -> Iterator[Shape]:
    """A GPT-2-like stack: embeddings, and in each layer two norms and four matrices with their biases."""
    yield from [(vocabulary, width), (positions, width)]
    for _ in range(layers):
        yield from [(width,)] * 4
        for inputs, outputs in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
            yield from [(inputs, outputs), (outputs,)]
    yield from [(width,)] * 2


def bert() -> Iterator[Shape]:
    """BERT with 12 layers of width 256: 199 tensors."""
    yield from [(30522, 256), (512, 256), (2, 256), (256,), (256,)]
    for _ in range(12):
        for outputs, inputs in ((256, 256),) * 4 + ((1024, 256), (256, 1024)):
            yield from [(outputs, inputs), (outputs,)]
        yield from [(256,)] * 4
    yield from [(256, 256), (256,)]


def resnet50() -> Iterator[Shape]:
    """ResNet-50: convolutions of 1×1 and 3×3, norms, and the classifier: 161 tensors."""
    yield from [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            for shape in ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                yield from [shape, shape[:1], shape[:1]]
            if block == 0:  # the shortcut has to change the width
                yield from [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    yield from [(1000, 2048), (1000,)]


SUITES = {
    suite.name: suite
    for suite in (
        Suite("gpt2", "GPT-2 small", tuple(transformer(12, 768, 50257, 1024))),
        Suite("bert", "BERT, 12 layers of width 256: many small tensors", tuple(bert())),
        Suite("llama", "the MLP of a layer of Llama 7B", ((11008, 4096), (11008, 4096), (4096, 11008))),
        Suite("squares", "24 matrices of 1024 × 1024", ((1024, 1024),) * 24),
        Suite("convolutions", "ResNet-50", tuple(resnet50())),
        Suite("embedding", "an embedding of 50,257 × 768", ((50257, 768),)),
        Suite("tiny", "four tensors, to try the benchmark itself", ((64, 48), (48,), (32, 16, 3, 3), (8, 8))),
    )
}
DEFAULT = tuple(name for name in SUITES if name != "tiny")


def find(name: str) -> Suite:
    """The suite of that name; `module:function` returns a model of the user's own, whose shapes are taken."""
    if name in SUITES:
        return SUITES[name]
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"unknown suite {name!r}; there are {', '.join(SUITES)}, or module:function of your own model")
    model: torch.nn.Module = getattr(importlib.import_module(module), function)()
    return Suite(name, name, tuple(tuple(p.shape) for p in model.parameters() if p.requires_grad))
