"""What a plan must know of a model: the shape, dtype and ties of every parameter, without its numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import mode
from typing import Any

import torch

from adafactor.planning.shapes import Shape, bert, build, gpt2, llama, require_shapes, t5


@dataclass(frozen=True)
class Weight:
    """One parameter; a tied one is one."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    trainable: bool = True
    uses: int = 1  # in how many places of the model it is
    kind: str = "layer"  # or "table", whose rows are looked up, or "adapter", which LoRA adds

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)


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
        found = [w for w in self.weights if w.kind == "layer" and len(w.shape) == 2]
        return [w for w in found if not self.words or self.words not in w.shape]

    def activations(self, positions: int, itemsize: int, checkpointing: bool) -> int:
        """An estimate of what backward needs of the forward pass over so many tokens, in bytes.

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

    def with_lora(self, rank: int) -> Model:
        """This model frozen, and two trained matrices of that rank beside each matrix of its layers."""
        if not self.matrices:
            raise ValueError(f"{self.name} has no matrix in its layers that LoRA could adapt")
        adapters = [Weight(shape, kind="adapter") for w in self.matrices for shape in lora_shapes(w.shape, rank)]
        return replace(self, weights=(*(replace(w, trainable=False) for w in self.weights), *adapters))


def lora_shapes(shape: Shape, rank: int) -> tuple[Shape, Shape]:
    """Of LoRA's A and B beside a matrix."""
    return (rank, shape[1]), (shape[0], rank)


@dataclass(frozen=True)
class Preset:
    """A known model from shapes alone, in transformers' order. The first is that of the token embedding."""

    title: str
    build: partial[Iterator[Shape]]  # its first argument is the number of layers
    embedded: int = 1  # in how many places the token embedding is used; 2 where it is the output layer too

    @property
    def shapes(self) -> list[Shape]:
        """Of all parameters, a tied one once."""
        return list(self.build())

    def model(self, name: str) -> Model:
        """With its ties; the first matrices are looked up: words, positions and kinds of tokens."""
        shapes = self.shapes
        layers = self.build.args[0] * (2 if self.build.func is t5 else 1)
        tables = {bert: 3, gpt2: 2}.get(self.build.func, 1)
        weights = [Weight(shape, kind="table" if i < tables else "layer") for i, shape in enumerate(shapes)]
        return Model(name, (replace(weights[0], uses=self.embedded), *weights[1:]), layers=layers)


PRESETS = {
    "gpt2": Preset("GPT-2", partial(gpt2, 12, 768), 2),
    "gpt2-medium": Preset("GPT-2 medium", partial(gpt2, 24, 1024), 2),
    "gpt2-large": Preset("GPT-2 large", partial(gpt2, 36, 1280), 2),
    "gpt2-xl": Preset("GPT-2 XL", partial(gpt2, 48, 1600), 2),
    "bert-base": Preset("BERT base, uncased", partial(bert, 12, 768)),
    "bert-large": Preset("BERT large, uncased", partial(bert, 24, 1024)),
    "t5-small": Preset("T5 small", partial(t5, 6, 512, 2048, 8), 3),
    "t5-base": Preset("T5 base", partial(t5, 12, 768, 3072, 12), 3),
    "t5-large": Preset("T5 large", partial(t5, 24, 1024, 4096, 16), 3),
    "t5-3b": Preset("T5 3B", partial(t5, 24, 1024, 16384, 32, 128), 3),
    "t5-11b": Preset("T5 11B", partial(t5, 24, 1024, 65536, 128, 128), 3),
    "llama-1b": Preset("Llama 3.2 1B", partial(llama, 16, 2048, 8192, 512, 128256, True), 2),
    "llama-3b": Preset("Llama 3.2 3B", partial(llama, 28, 3072, 8192, 1024, 128256, True), 2),
    "llama-7b": Preset("Llama 2 7B", partial(llama, 32, 4096, 11008, 4096, 32000, False)),
    "llama-8b": Preset("Llama 3 8B", partial(llama, 32, 4096, 14336, 1024, 128256, False)),
    "llama-13b": Preset("Llama 2 13B", partial(llama, 40, 5120, 13824, 5120, 32000, False)),
    "llama-70b": Preset("Llama 3 70B", partial(llama, 80, 8192, 28672, 1024, 128256, False)),
    "mistral-7b": Preset("Mistral 7B", partial(llama, 32, 4096, 14336, 1024, 32000, False)),
}


def find(model: torch.nn.Module | str | Path) -> Model:
    """Of a module, a preset's name, `module:function` or the path of a transformers `config.json`."""
    if isinstance(model, torch.nn.Module):
        return of_module(type(model).__name__, model)
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model must be a torch.nn.Module, a name or a path, not {type(model).__name__}")
    name = str(model)
    if name in PRESETS:
        return PRESETS[name].model(name)
    if name.endswith(".json") or Path(name).exists():
        return of_module(name, build_config(Path(name)))
    if ":" not in name:
        raise ValueError(f"{name!r} must be module:function, the path of a config.json, or one of {', '.join(PRESETS)}")
    return of_module(name, build(name))


def of_module(name: str, module: torch.nn.Module) -> Model:
    """What a plan needs of a module, which may be on the meta device."""
    require_shapes(name, module)
    tables = {m.weight for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    uses: dict[torch.Tensor, int] = {}
    for _, p in module.named_parameters(remove_duplicate=False):
        uses[p] = uses.get(p, 0) + 1
    weights = [
        Weight(
            tuple(p.shape), p.dtype, p.requires_grad and p.is_floating_point(), n, "table" if p in tables else "layer"
        )
        for p, n in uses.items()
    ]
    if not any(w.trainable and w.count for w in weights):
        raise ValueError(f"{name} has no parameters to train")
    return Model(name, tuple(weights), sum(b.nbytes for b in module.buffers()), count_layers(module))


def count_layers(module: torch.nn.Module) -> int:
    """How often the class repeats that has most of the parameters in lists of modules."""
    sizes: dict[type, int] = {}
    counts: dict[type, int] = {}
    for parent in module.modules():
        for child in parent.children() if isinstance(parent, (torch.nn.ModuleList, torch.nn.Sequential)) else ():
            kind = type(child)
            sizes[kind] = sizes.get(kind, 0) + sum(p.numel() for p in child.parameters())
            counts[kind] = counts.get(kind, 0) + 1
    return max(((size, counts[kind]) for kind, size in sizes.items()), default=(0, 0))[1]


def build_config(path: Path) -> torch.nn.Module:
    """The model that a transformers `config.json` describes, on the meta device: no weights, no network."""
    path = path / "config.json" if path.is_dir() else path
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, RecursionError) as wrong:
        raise ValueError(f"{path} is not JSON: {wrong}") from wrong
    if not isinstance(described, dict) or not isinstance(described.get("model_type"), str):
        raise ValueError(f"{path} is not a transformers config.json: it has no model_type")
    try:
        import transformers
    except ImportError as missing:
        raise ImportError(f"{path} needs transformers to be read (pip install transformers): {missing}") from missing
    kind = described.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{path}: transformers {transformers.__version__} has no model_type {kind!r}")
    try:
        config = transformers.AutoConfig.for_model(kind, **described)
        with torch.device("meta"):
            known = [name for name in config.architectures or [] if hasattr(transformers, name)]
            made: Any = getattr(transformers, known[0])(config) if known else transformers.AutoModel.from_config(config)
    except Exception as wrong:  # transformers has no one exception for a size that is no size
        raise ValueError(f"{path}: transformers cannot build it: {type(wrong).__name__}: {wrong}") from wrong
    assert isinstance(made, torch.nn.Module)
    return made
