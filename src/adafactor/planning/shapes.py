"""Models as lists of shapes, without the models; and the model that `module:function` makes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

Shape = tuple[int, ...]


def bert(layers: int = 12, width: int = 256) -> Iterator[Shape]:
    """A small BERT with its biases and norms: 199 tensors, most of them tiny."""
    d = width
    yield from [(30522, d), (512, d), (2, d), (d,), (d,)]
    for _ in range(layers):
        yield from [(d, d), (d,)] * 4  # query, key, value, output
        yield from [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,), (d,), (d,)]
    yield from [(d, d), (d,)]


def gpt2(layers: int = 12, width: int = 768) -> Iterator[Shape]:
    """GPT-2, by default the small one: 148 tensors, 124 million parameters. The output layer is the embedding."""
    yield from [(50257, width), (1024, width), *transformer(layers, width), (width,), (width,)]


def transformer(layers: int, d: int) -> Iterator[Shape]:
    """GPT-2's blocks of any size, about 12·layers·d² parameters."""
    for _ in range(layers):
        yield from [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]


def llama(layers: int, width: int, inner: int, key: int, words: int, tied: bool) -> Iterator[Shape]:
    """A Llama, or a model built like one; `key` is the width of keys and values."""
    yield (words, width)
    for _ in range(layers):
        yield from [(width, width), (key, width), (key, width), (width, width)]
        yield from [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    yield (width,)
    if not tied:
        yield (words, width)


def t5(layers: int, width: int, inner: int, heads: int, key: int = 64) -> Iterator[Shape]:
    """The first T5; `key` is the width of one head, `layers` are those of the encoder and again of the decoder."""
    attention: list[Shape] = [*[(heads * key, width)] * 3, (width, heads * key)]
    yield (32128, width)
    for attentions in (1, 2):  # the decoder looks at itself and at the encoder
        for layer in range(layers):
            for number in range(attentions):
                yield from attention
                if layer == number == 0:
                    yield (32, heads)  # the bias of relative positions, shared by all layers
                yield (width,)
            yield from [(inner, width), (width, inner), (width,)]
        yield (width,)


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


def build(reference: str) -> torch.nn.Module:
    """The model that `module:function` returns; its weights are not made where it can be helped."""
    module, colon, function = reference.partition(":")
    if not (module and colon and function):
        raise ValueError(f"the model {reference!r} must be module:function")
    if (here := str(Path.cwd())) not in sys.path:  # an installed command does not look there by itself
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), function, None)
        model = _made(make) if callable(make) else None
    except Exception as wrong:  # whatever a user's own file may raise
        raise ValueError(f"{reference} raised {type(wrong).__name__}: {wrong}") from wrong
    if not callable(make):
        raise ValueError(f"{reference}: {module} has no function {function!r}")
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{reference} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _made(make: Callable[[], Any]) -> Any:
    try:
        with torch.device("meta"):
            return make()
    except (NotImplementedError, RuntimeError):  # it looks at its weights while it makes them
        return make()


def require_shapes(name: str, module: torch.nn.Module) -> None:
    """Raise for a parameter that has no shape, or none that is known before a first forward pass."""
    for key, p in module.named_parameters():
        if is_lazy(p):
            raise ValueError(f"{name}: {key} has no shape before a first forward pass; make it without lazy layers")
        if p.is_nested:
            raise ValueError(f"{name}: {key} is a nested tensor, which has no shape of its own")
