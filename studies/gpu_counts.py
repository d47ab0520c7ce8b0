"""Launches of a step on a GPU, counted without one: the table of docs/gpu.md.

python -m studies.gpu_counts

The Triton backend prepares real parameters, in memory that nobody touches, and a stand-in takes its launches. The
operations of eager PyTorch are counted on the meta device, those of torch.optim.Adafactor on tensors cut down to two
elements an axis: how many there are depends on how many tensors there are, and of how many axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adafactor import Adafactor
from adafactor.planning.models import Shape, gpt2, llama
from benchmarks.suites import resnet50

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Model:
    """The shapes of a model's tensors."""

    title: str
    shapes: tuple[Shape, ...]
    dtype: torch.dtype

    @property
    def parameters(self) -> int:
        """How many numbers there are in all."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def label(self) -> str:
        """What a table calls it."""
        return f"{self.title}, {str(self.dtype).removeprefix('torch.')}"

    def make(self, device: str = "cpu", shapes: Sequence[Shape] | None = None) -> list[Tensor]:
        """Parameters with gradients; on a CPU their memory is never touched, so they may be larger than it."""
        params: list[Tensor] = []
        for shape in self.shapes if shapes is None else shapes:
            params.append(torch.empty(shape, dtype=self.dtype, device=device).requires_grad_())
            params[-1].grad = torch.empty_like(params[-1])
        return params


def lora(layers: int = 32, width: int = 4096, rank: int = 16) -> Iterator[Shape]:
    """Adapters of the queries and values of a Llama 7B."""
    for _ in range(2 * layers):
        yield from [(rank, width), (width, rank)]


MODELS = {
    "gpt2": Model("GPT-2 small", tuple(gpt2()), FLOAT32),
    "gpt2-bfloat16": Model("GPT-2 small", tuple(gpt2()), BFLOAT16),
    "llama": Model("Llama 7B", tuple(llama(32, 4096, 11008, 4096, 32000, False)), BFLOAT16),
    "resnet": Model("ResNet-50", tuple(resnet50()), FLOAT32),
    "lora": Model("LoRA of rank 16 on Llama 7B", tuple(lora()), BFLOAT16),
}


@contextmanager
def note_launches() -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Let the Triton backend prepare tensors on a CPU; note its launches, with what they are given, and run none."""
    from adafactor.kernels import triton as backend
    from adafactor.kernels.triton import proof
    from adafactor.kernels.triton.launch import Launch

    noted: list[tuple[Any, tuple[Any, ...]]] = []
    with (
        patch.object(backend, "INTERPRETED", True),
        patch.object(Launch, "__call__", lambda launch, *given: noted.append((launch, given))),
        patch.object(proof, "LARGEST", -1),  # nothing is stepped twice
    ):
        yield noted


@cache
def count(model: Model, **keywords: Any) -> int:
    """Launches of a step that launches nothing, with these keywords of the optimizer."""
    with note_launches() as noted:
        optimizer = Adafactor(model.make(), backend="triton", **keywords)
        optimizer.step()
        noted.clear()
        optimizer.step()
    return len(noted)


class Operations(TorchDispatchMode):
    """Counts what a device would have to launch (all but views, types and new memory), and waits of the host."""

    FREE = set(
        "new_empty empty promote_types slice view select unbind detach as_strided permute unsqueeze squeeze split "
        "split_with_sizes expand alias empty_like _local_scalar_dense t transpose is_pinned".split()
    )

    def __init__(self, on_host: Sequence[Tensor] = ()) -> None:
        """Nothing is counted of what works on these tensors, which are on the host."""
        super().__init__()
        self.count, self.waits = 0, 0
        self._on_host = {t.data_ptr() for t in on_host}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Count one."""
        name = func.overloadpacket.__name__
        first = next(iter(tree_leaves(args)), None)
        if not (self._on_host and isinstance(first, Tensor) and first.data_ptr() in self._on_host):
            self.count += name not in self.FREE
            self.waits += name == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


@cache
def eager(model: Model) -> int:
    """Operations of our step in eager PyTorch."""
    params = model.make("meta")
    optimizer = Adafactor(params)
    optimizer.step()
    with Operations() as found:
        optimizer.step()
    return int(found.count)


@cache
def torch_adafactor(model: Model, foreach: bool) -> tuple[int, int]:
    """Operations and waits of torch.optim.Adafactor; its step counts are on the host."""
    params = model.make(shapes=[tuple(min(n, 2) for n in shape) for shape in model.shapes])
    for p in params:
        with torch.no_grad():
            p.fill_(1.0)
        assert p.grad is not None
        p.grad.fill_(1.0)
    optimizer = torch.optim.Adafactor(params, foreach=foreach)
    optimizer.step()
    with Operations([optimizer.state[p]["step"] for p in params]) as found:
        optimizer.step()
    return found.count, found.waits


def fused_adamw(model: Model, tensors: int = 36, blocks: int = 320, chunk: int = 65536) -> int:
    """Launches of torch.optim.AdamW(fused=True), by the limits of ATen's MultiTensorApply.cuh for four lists.

    A launch takes so many tensors or so many chunks of 65,536 elements; a tensor may go on in the next launch. The step
    counts are a list of their own, of 110 a launch.
    """
    launches = listed = used = 0
    for i, shape in enumerate(model.shapes):
        listed += 1
        chunks = -(-prod(shape) // chunk)
        for number in range(chunks):
            used += 1
            last = number == chunks - 1
            full = (listed == tensors and last) or used == blocks
            if full or (last and i == len(model.shapes) - 1):
                launches += 1
                used, listed = 0, 0 if last else 1
    return launches + -(-len(model.shapes) // 110)


# ---- the table


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def launches() -> str:
    """How many launches each takes."""
    rows = []
    for model in MODELS.values():
        ours, (loop, waits), (lists, list_waits) = (
            count(model),
            torch_adafactor(model, False),
            torch_adafactor(model, True),
        )
        rows.append([
            model.label,
            f"{len(model.shapes)}",
            f"{ours:,}",
            f"{fused_adamw(model)}",
            f"{eager(model):,}",
            f"{loop:,} and {waits:,} waits",
            f"{lists:,} and {list_waits:,} waits",
        ])  # fmt: skip
    heads = [
        "model",
        "tensors",
        "ours, Triton",
        "AdamW, fused",
        "ours, eager",
        "torch's Adafactor",
        "the same, foreach",
    ]
    return table(heads, rows)


TABLES = {"launches": launches}


def main() -> None:
    """Print all tables."""
    for name, make in TABLES.items():
        print(f"<!-- {name} -->\n\n{make()}\n", flush=True)


if __name__ == "__main__":
    main()
