"""What a plan must know of a model: the shape, dtype and ties of every parameter, without its numbers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import mode

import torch
from torch.nn.parameter import is_lazy

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter; a tied one is one."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    trainable: bool = True
    uses: int = 1  # in how many places of the model it is
    kind: str = "layer"  # or "table", whose rows are looked up, or "adapter", which LoRA adds
    devices: int = 1  # that share it

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def part(self) -> Shape:
        """What the first device has of it, which is the most: FSDP2 divides the first axis; a scalar is copied."""
        return (-(-self.shape[0] // self.devices), *self.shape[1:]) if self.shape else ()

    @property
    def part_count(self) -> int:
        """The number of elements on the first device."""
        return prod(self.part)


@dataclass(frozen=True)
class Model:
    """All parameters of a model, in its own order, and the bytes of its buffers."""

    name: str
    weights: tuple[Weight, ...]
    buffers: int = 0
    layers: int = 0  # that repeat; 0 if none are found

    @property
    def parameters(self) -> int:
        """How many numbers there are in all parameters."""
        return sum(w.count for w in self.weights)

    @property
    def trained(self) -> tuple[Weight, ...]:
        """Those that have a gradient."""
        return tuple(w for w in self.weights if w.trainable and w.count)

    @property
    def words(self) -> int:
        """The width of an output layer over the vocabulary; 0 if there is none."""
        tables = [w for w in self.weights if w.kind == "table"]
        words = max((w.shape[0] for w in tables), default=0)
        tied = any(w.uses > 1 for w in tables)
        return words if tied or any(w.kind == "layer" and words in w.shape for w in self.weights) else 0

    @property
    def matrices(self) -> list[Weight]:
        """Those that multiply inside the layers: neither embeddings nor the output layer."""
        words = self.words
        matrices = [w for w in self.weights if w.kind == "layer" and len(w.shape) == 2]
        return [w for w in matrices if not words or words not in w.shape]

    def activations(self, positions: int, itemsize: int, checkpointing: bool) -> int:
        """Estimate what backward needs of the forward pass over so many tokens, in bytes.

        A matrix keeps what goes in, and what comes out is kept by what follows it; norms and copies keep an eighth as
        much again. Backward adds half a layer of gradients, or at the output layer the logits and three times as many
        numbers in float32. Attention is taken not to keep its weights. With checkpointing only the input of each layer
        is kept, and one layer is there at a time. docs/plan.md says how far off this is.
        """
        if other := [w.shape for w in self.weights if len(w.shape) > 2]:
            raise ValueError(f"{self.name} has a parameter of {other[0]}: activations are estimated for matrices only")
        if checkpointing and not self.layers:
            raise ValueError(f"{self.name} has no list of layers (ModuleList, Sequential) that could be checkpointed")
        layers = sum(w.uses * sum(w.shape) for w in self.matrices) * itemsize * 9 // 8
        layer, output = layers // max(1, self.layers), self.words * (itemsize + 3 * 4)
        if not checkpointing:
            return positions * (layers + max(layer // 2, output))
        width = mode(axis for w in self.matrices for axis in w.shape)
        return positions * (self.layers * width * itemsize + max(layer + layer // 2, output))

    def shard(self, devices: int) -> Model:
        """Return this model, shared by so many devices."""
        return replace(self, weights=tuple(replace(w, devices=devices) for w in self.weights))

    def with_lora(self, rank: int) -> Model:
        """Return this model frozen, and two trained matrices of that rank beside each matrix of its layers."""
        if not self.matrices:
            raise ValueError(f"{self.name} has no matrix in its layers that LoRA could adapt")
        shapes = [shape for w in self.matrices for shape in ((rank, w.shape[1]), (w.shape[0], rank))]  # A, B
        adapters = [Weight(shape, kind="adapter") for shape in shapes]
        return replace(self, weights=(*(replace(w, trainable=False) for w in self.weights), *adapters))


def gpt2(layers: int = 12, width: int = 768) -> list[Shape]:
    """GPT-2, by default the small one: 148 tensors, 124 million parameters. The output layer is the embedding."""
    return [(50257, width), (1024, width), *transformer(layers, width), (width,), (width,)]


def transformer(layers: int, d: int) -> list[Shape]:
    """GPT-2's blocks of any size, about 12·layers·d² parameters."""
    attention: list[Shape] = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
    return [*attention, (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)] * layers


def llama(layers: int, width: int, inner: int, key: int, words: int, tied: bool) -> list[Shape]:
    """A Llama, or a model built like one; `key` is the width of keys and values."""
    attention: list[Shape] = [(width, width), (key, width), (key, width), (width, width)]
    layer = [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    shapes = [(words, width), *layer * layers, (width,)]
    return shapes if tied else [*shapes, (words, width)]


# Llama 2: 7b, 13b; Llama 3: 8b, 70b; Llama 3.1: 405b; Llama 3.2: 1b, 3b. The first argument is the number of layers.
PRESETS: dict[str, partial[list[Shape]]] = {
    "gpt2": partial(gpt2, 12, 768),
    "gpt2-medium": partial(gpt2, 24, 1024),
    "gpt2-large": partial(gpt2, 36, 1280),
    "gpt2-xl": partial(gpt2, 48, 1600),
    "llama-1b": partial(llama, 16, 2048, 8192, 512, 128256, True),
    "llama-3b": partial(llama, 28, 3072, 8192, 1024, 128256, True),
    "llama-7b": partial(llama, 32, 4096, 11008, 4096, 32000, False),
    "llama-8b": partial(llama, 32, 4096, 14336, 1024, 128256, False),
    "llama-13b": partial(llama, 40, 5120, 13824, 5120, 32000, False),
    "llama-70b": partial(llama, 80, 8192, 28672, 1024, 128256, False),
    "llama-405b": partial(llama, 126, 16384, 53248, 1024, 128256, False),
    "mistral-7b": partial(llama, 32, 4096, 14336, 1024, 32000, False),
}


def _preset(name: str) -> Model:
    """A preset with its ties, in transformers' order; the first matrices are looked up, and the first may be tied."""
    build = PRESETS[name]
    tables = 2 if build.func is gpt2 else 1  # of words and positions
    uses = 2 if build.func is gpt2 or build.args[-1] else 1
    weights = [Weight(shape, kind="table" if i < tables else "layer") for i, shape in enumerate(build())]
    return Model(name, (replace(weights[0], uses=uses), *weights[1:]), layers=build.args[0])


def find(model: torch.nn.Module | str | Path) -> Model:
    """Describe a module, a preset's name, or the path of a transformers `config.json`."""
    if isinstance(model, torch.nn.Module):
        return of_module(type(model).__name__, model)
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model must be a torch.nn.Module, a name or a path, not {type(model).__name__}")
    name = str(model)
    if name in PRESETS:
        return _preset(name)
    if not Path(name).exists():
        raise ValueError(
            f"{name!r} must be the path of a transformers config.json, or one of {', '.join(PRESETS)}; "
            "in Python, adafactor.plan takes a module of your own"
        )
    return of_module(name, _build_config(Path(name)))


def of_module(name: str, module: torch.nn.Module) -> Model:
    """Describe a module, which may be on the meta device."""
    tables = {m.weight for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    uses: Counter[torch.nn.Parameter] = Counter()
    for key, p in module.named_parameters(remove_duplicate=False):
        if is_lazy(p):
            raise ValueError(f"{name}: {key} has no shape before a first forward pass; make it without lazy layers")
        if p.is_nested:
            raise ValueError(f"{name}: {key} is a nested tensor, which has no shape of its own")
        uses[p] += 1
    weights = []
    for p, places in uses.items():
        is_trained = p.requires_grad and p.is_floating_point()
        weights.append(Weight(tuple(p.shape), p.dtype, is_trained, places, "table" if p in tables else "layer"))
    if not any(w.trainable and w.count for w in weights):
        raise ValueError(f"{name} has no parameters to train")
    return Model(name, tuple(weights), sum(b.nbytes for b in module.buffers()), _count_layers(module))


def _count_layers(module: torch.nn.Module) -> int:
    """Return how often the class repeats that has most of the parameters in lists of modules."""
    lists = [m for m in module.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))]
    children = [child for parent in lists for child in parent.children()]
    sizes: Counter[type] = Counter()
    for child in children:
        sizes[type(child)] += sum(p.numel() for p in child.parameters())
    largest = max(sizes, key=lambda kind: sizes[kind], default=None)
    return sum(type(child) is largest for child in children)


def _build_config(path: Path) -> torch.nn.Module:
    """Build the model that a transformers `config.json` describes, on the meta device: no weights, no network."""
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, RecursionError) as wrong:
        raise ValueError(f"{path} is not JSON: {wrong}") from wrong
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ValueError(f"{path} is not a transformers config.json: it has no model_type")
    try:
        import transformers
    except ImportError as missing:
        raise ImportError(f"{path} needs transformers to be read (pip install transformers): {missing}") from missing
    kind = values.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{path}: transformers {transformers.__version__} has no model_type {kind!r}")
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
        with torch.device("meta"):
            classes = [name for name in config.architectures or [] if hasattr(transformers, name)]
            make = getattr(transformers, classes[0]) if classes else transformers.AutoModel.from_config
            model = make(config)
    except Exception as wrong:  # transformers has no one exception for a size that is no size
        why = " ".join(str(wrong).split())
        raise ValueError(f"{path}: transformers cannot build it: {type(wrong).__name__}: {why}") from wrong
    assert isinstance(model, torch.nn.Module)
    return model
