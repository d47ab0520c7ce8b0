"""The shapes that are stepped: models as lists of shapes, without the models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

Shape = tuple[int, ...]
LARGE = 30_000_000  # parameters from which a step cannot live in a cache


@dataclass(frozen=True)
class Suite:
    """A model's shapes."""

    name: str
    title: str
    shapes: tuple[Shape, ...]

    @property
    def parameters(self) -> int:
        """How many numbers there are in all."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def large(self) -> bool:
        """Whether memory bandwidth decides how long a step takes."""
        return self.parameters >= LARGE


def bert(layers: int = 12, width: int = 256) -> Iterator[Shape]:
    """A small BERT with its biases and norms: 199 tensors, most of them tiny."""
    d = width
    yield from [(30522, d), (512, d), (2, d), (d,), (d,)]
    for _ in range(layers):
        yield from [(d, d), (d,)] * 4  # query, key, value, output
        yield from [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,), (d,), (d,)]
    yield from [(d, d), (d,)]


def gpt2() -> Iterator[Shape]:
    """GPT-2 small: 148 tensors, 124 million parameters."""
    yield from [(50257, 768), (1024, 768), *transformer(12, 768), (768,), (768,)]


def transformer(layers: int, d: int) -> Iterator[Shape]:
    """GPT-2's blocks of any size, about 12·layers·d² parameters."""
    for _ in range(layers):
        yield from [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]


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
        Suite("bert", "BERT, 12 layers of width 256: many small tensors", tuple(bert())),
        Suite("gpt2", "GPT-2 small", tuple(gpt2())),
        Suite("llama", "three matrices of Llama 7B", ((4096, 4096), (11008, 4096), (4096, 11008))),
        Suite("embedding", "an embedding of 50,257 × 768", ((50257, 768),)),
        Suite("convolutions", "ResNet-50", tuple(resnet50())),
        Suite("tiny", "four tensors, to try the benchmark itself", ((64, 48), (48,), (32, 16, 3, 3), (8, 8))),
    )
}
DEFAULT = ("bert", "gpt2", "llama", "embedding", "convolutions")


def find(name: str) -> Suite:
    """The suite of that name."""
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]


def of_model(reference: str) -> Suite:
    """The shapes of the model that `module:function` returns."""
    shapes = tuple(tuple(p.shape) for p in build(reference).parameters() if p.requires_grad and p.numel())
    if not shapes:
        raise ValueError(f"{reference} has no parameters to train")
    return Suite(reference, reference, shapes)


def build(reference: str) -> torch.nn.Module:
    """The model that `module:function` returns; its weights are not made where it can be helped."""
    module, colon, function = reference.partition(":")
    if not (module and colon and function):
        raise ValueError(f"the model {reference!r} must be module:function")
    if (here := str(Path.cwd())) not in sys.path:  # an installed command does not look there by itself
        sys.path.insert(0, here)
    make = getattr(importlib.import_module(module), function, None)
    if not callable(make):
        raise ValueError(f"{reference}: {module} has no function {function!r}")
    try:
        with torch.device("meta"):
            model = make()
    except (NotImplementedError, RuntimeError):  # it looks at its weights while it makes them
        model = make()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{reference} returned {type(model).__name__}, not a torch.nn.Module")
    return model
