"""What a plan must know of a model: the shape, dtype and ties of every parameter, without its numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from adafactor.planning.presets import PRESETS
from adafactor.shapes import Shape, build


@dataclass(frozen=True)
class Weight:
    """One parameter; a tied one is one."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    trainable: bool = True
    uses: int = 1  # in how many places of the model it is

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

    @property
    def parameters(self) -> int:
        """How many numbers there are in all parameters."""
        return sum(w.count for w in self.weights)

    @property
    def trained(self) -> tuple[Weight, ...]:
        """Those that have a gradient."""
        return tuple(w for w in self.weights if w.trainable and w.count)


def find(model: torch.nn.Module | str | Path) -> Model:
    """Of a module, a preset's name, `module:function` or the path of a transformers `config.json`."""
    if isinstance(model, torch.nn.Module):
        return of_module(type(model).__name__, model)
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model must be a torch.nn.Module, a name or a path, not {type(model).__name__}")
    name = str(model)
    if name in PRESETS:
        first, *rest = PRESETS[name].shapes
        return Model(name, (Weight(first, uses=PRESETS[name].embedded), *map(Weight, rest)))
    if name.endswith(".json") or Path(name).exists():
        return of_module(name, build_config(Path(name)))
    if ":" not in name:
        raise ValueError(f"{name!r} must be module:function, the path of a config.json, or one of {', '.join(PRESETS)}")
    return of_module(name, build(name))


def of_module(name: str, module: torch.nn.Module) -> Model:
    """What a plan needs of a module, which may be on the meta device."""
    uses: dict[torch.Tensor, int] = {}
    for _, p in module.named_parameters(remove_duplicate=False):
        uses[p] = uses.get(p, 0) + 1
    weights = [Weight(tuple(p.shape), p.dtype, p.requires_grad and p.is_floating_point(), n) for p, n in uses.items()]
    if not any(w.trainable and w.count for w in weights):
        raise ValueError(f"{name} has no parameters to train")
    return Model(name, tuple(weights), sum(b.nbytes for b in module.buffers()))


def build_config(path: Path) -> torch.nn.Module:
    """The model that a transformers `config.json` describes, on the meta device: no weights, no network."""
    path = path / "config.json" if path.is_dir() else path
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as wrong:
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
    config = transformers.AutoConfig.for_model(kind, **described)
    made: Any = None
    with torch.device("meta"):
        for name in config.architectures or []:
            if hasattr(transformers, name):
                made = getattr(transformers, name)(config)
                break
        else:
            made = transformers.AutoModel.from_config(config)
    assert isinstance(made, torch.nn.Module)
    return made
