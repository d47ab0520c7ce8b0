"""A setting of `adafactor plan` at work, for its bytes to be measured."""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import weakref
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from adafactor import Adafactor, step_in_backward
from adafactor.planning import SETTINGS
from adafactor.planning.models import Weight, find
from benchmarks.machine import ENVIRONMENT, PEAK, status
from tests.launch import python

MODEL = "gpt2"  # 124 million parameters; AdamW in float32 takes 1.9 GiB
NOT_HERE = ("adamw-8bit", "adamw-8bit-bfloat16")  # bitsandbytes works in place on a GPU only
OURS = {key: setting.keywords for key, setting in SETTINGS.items() if setting.optimizer == "adafactor"}


class Given(torch.autograd.Function):
    """Needs no activations, and gives its parameter a gradient."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        """Some number."""
        ctx.like = torch.empty_like(p, device="meta")
        return p.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Tensor:
        """As it may be early in a training run."""
        return torch.full_like(ctx.like, 1e-3, device="cpu")


class Parameters(torch.nn.Module):
    """The parameters of a model, used in the order of the model; tied ones first and last, as embeddings are."""

    def __init__(self, weights: tuple[Weight, ...], dtype: torch.dtype):
        """Made of ones: every page of memory is touched."""
        super().__init__()
        self.all = torch.nn.ParameterList(torch.ones(w.shape, dtype=dtype) for w in weights)
        self.tied = [p for p, w in zip(self.all, weights, strict=True) if w.uses > 1]

    def forward(self) -> Tensor:
        """A loss with a gradient for every parameter, for next to no activations."""
        first = [F.embedding(torch.zeros(1, dtype=torch.long), p) for p in self.tied]
        tied = set(self.tied)
        used = [Given.apply(p) for p in self.all if p not in tied]
        last = [F.linear(x, p).sum() for x, p in zip(first, self.tied, strict=True)]
        return torch.stack([*used, *last]).sum()


class Training:
    """A setting at work on new parameters."""

    def __init__(self, key: str, weights: tuple[Weight, ...]):
        """The first step makes the state."""
        self.key, self.model = key, Parameters(weights, SETTINGS[key].dtype)
        self.params: list[Tensor] = list(self.model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.params] if SETTINGS[key].master else []
        # one optimizer for each master, so that one gradient at a time is converted, and for each that AdamW frees
        is_single = self.masters or key == "adamw-backward"
        groups = [[p] for p in self.masters or self.params] if is_single else [self.params]
        self.optimizers = [make(key, group) for group in groups]
        if key == "adamw-backward":
            for p, optimizer in zip(self.params, self.optimizers, strict=True):
                p.register_post_accumulate_grad_hook(partial(_step_and_free, optimizer))
        elif SETTINGS[key].in_backward:
            step_in_backward(self.model, cast(Adafactor, self.optimizers[0]))

    def step(self) -> None:
        """Backward, and one step."""
        self.model().backward()
        for p, master, optimizer in zip(self.params, self.masters, self.optimizers, strict=False):
            assert p.grad is not None
            master.grad = p.grad.float()
            optimizer.step()
            p.detach().copy_(master.detach())
            p.grad = master.grad = None
        if not self.masters and self.key != "adamw-backward":
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()

    def state_bytes(self) -> int:
        """What the optimizers keep; a tensor that several parameters share counts once."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return sum(v.nbytes for v in {v for state in states for v in state.values() if isinstance(v, Tensor)})


def _step_and_free(optimizer: Optimizer, p: Tensor) -> None:
    """PyTorch's own way to step inside backward."""
    optimizer.step()
    p.grad = None


def make(key: str, params: Sequence[Tensor]) -> Optimizer:
    """The optimizer of a setting."""
    if key in OURS:
        return Adafactor(params, **OURS[key])
    if key.startswith("torch-"):
        return torch.optim.Adafactor(params)
    if key.startswith("transformers-"):
        from transformers.optimization import Adafactor as TransformersAdafactor

        return cast(Optimizer, TransformersAdafactor(params))
    if key.startswith("adamw-8bit"):
        return cast(Optimizer, importlib.import_module("bitsandbytes").optim.AdamW8bit(params))
    return torch.optim.AdamW(params, fused=True)


class Live(TorchDispatchMode):
    """The most bytes of new tensors that exist at one time while it is entered, on any device, also on meta."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.peak = self.now = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the memory that the operation made, until it is gone."""
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = function(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(made) if isinstance(t, Tensor)]:
            if storage._cdata not in given | self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def _free(self, storage: int, size: int) -> None:
        self.known.discard(storage)
        self.now -= size


def peak_bytes(key: str, model: str = MODEL) -> int:
    """The peak of the resident set over two steps, above what it was before there were any parameters."""
    request = json.dumps({"key": key, "model": model})
    child = python("-W", "ignore", "-m", "tests.tools.training", request, environment=ENVIRONMENT)
    if child.returncode:
        raise RuntimeError(f"{key}: {child.stderr.strip().splitlines()[-1]}")
    return int(child.stdout.split()[-1])


def child(request: str) -> None:
    """In a process of its own."""
    asked = json.loads(request)
    torch.set_num_threads(1)
    model, key = find(asked["model"]), asked["key"]
    small = Training(key, (Weight((6, 4), uses=2), Weight((5,))))
    small.step()  # whatever is compiled or loaded by a first step is here before the measurement
    small.step()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    PEAK.write_text("5")  # the peak is now what is resident
    training = Training(key, model.trained)
    training.step()
    training.step()
    print(status("VmHWM") - before)


class Decoder(torch.nn.Module):
    """A small Transformer of torch's own layers, with an output layer of its own."""

    def __init__(self, layers: int = 4, width: int = 256, words: int = 8000):
        """With eight heads and no dropout."""
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).layers
        self.output = torch.nn.Linear(width, words, bias=False)
        self.recomputes = False

    def gradient_checkpointing_enable(self, _: Any = None) -> None:
        """By the name that transformers' models have."""
        self.recomputes = True

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        """The loss in float32, and the logits."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        logits = self.output(x)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def activation_bytes(model: torch.nn.Module, batch: int, tokens: int, words: int) -> int:
    """The most that forward and backward hold beside weights, with logits that live on and gradients that do not."""
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    ids = torch.randint(words, (batch, tokens))
    live = Live()
    with live:
        made = model(input_ids=ids, labels=ids)
        made.loss.backward()
    return live.peak


if __name__ == "__main__":
    child(sys.argv[1])
