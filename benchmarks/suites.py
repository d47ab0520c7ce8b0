"""The shapes that are stepped: models as lists of shapes, without the models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from adafactor.planning.models import Shape, gpt2, of_module, transformer

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


def bert(layers: int = 12, width: int = 256) -> list[Shape]:
    """A small BERT with its biases and norms: 199 tensors, most of them tiny."""
    d = width
    attention: list[Shape] = [(d, d), (d,)] * 4  # query, key, value, output
    layer = [*attention, (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,), (d,), (d,)]
    return [(30522, d), (512, d), (2, d), (d,), (d,), *layer * layers, (d, d), (d,)]


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
# What a parameter costs, from a million to a billion: layers and width of a GPT-2-like stack with so many parameters.
SIZES = {
    "1M": (4, 144),
    "3M": (6, 208),
    "10M": (8, 320),
    "30M": (8, 560),
    "100M": (12, 832),
    "300M": (16, 1248),
    "1B": (24, 1856),
}
DEFAULT = ("bert", "gpt2", "llama", "embedding", "convolutions")


def find(name: str) -> Suite:
    """The suite of that name."""
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]


def stack(name: str) -> Suite:
    """The stack of that size."""
    if name not in SIZES:
        raise ValueError(f"unknown size {name!r}; there are {', '.join(SIZES)}")
    layers, width = SIZES[name]
    return Suite(name, f"{layers} layers of width {width}", tuple(transformer(layers, width)))


def of_model(reference: str) -> Suite:
    """The shapes of the model that `module:function` returns."""
    return Suite(reference, reference, tuple(w.shape for w in of_module(reference, build(reference)).trained))


def build(reference: str) -> torch.nn.Module:
    """Build the model that `module:function` returns; its weights are not made where it can be helped."""
    module, colon, function = reference.partition(":")
    if not (module and colon and function):
        raise ValueError(f"the model {reference!r} must be module:function")
    if (here := str(Path.cwd())) not in sys.path:  # an installed command does not look there by itself
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), function, None)
        model = _call(make) if callable(make) else None
    except Exception as wrong:  # whatever a user's own file may raise
        raise ValueError(f"{reference} raised {type(wrong).__name__}: {wrong}") from wrong
    if not callable(make):
        raise ValueError(f"{reference}: {module} has no function {function!r}")
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{reference} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _call(make: Callable[[], Any]) -> Any:
    try:
        with torch.device("meta"):
            return make()
    except (NotImplementedError, RuntimeError):  # it looks at its weights while it makes them
        return make()
