"""Bytes that a step moves to and from the memory of a card, in the workshop's model of its cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor.kernels.triton import executor as work
from adafactor.kernels.triton import table
from adafactor.kernels.triton.sizes import unit_rows
from tests.kernels.triton_emulated import Emulator, like_cuda, take

CARDS = {"A100-80": "sm_80", "H100-SXM": "sm_90", "RTX-4090": "sm_89"}


@dataclass(frozen=True)
class Weighed:
    """HBM bytes an element of a whole step."""

    usual: float  # what a launch leaves in the cache is there for the next
    cold: float  # every launch begins with an empty cache, as in a large model
    instructions: dict[str, float]  # warp instructions of a launch, for 32 elements


@contextmanager
def cut_as(shape: tuple[int, int], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every matrix be cut as one of this shape is: a part of its rows stands for the whole."""

    def whole(n: int, m: int, itemsize: int, rows: int) -> int:
        return unit_rows(shape[0], m, itemsize, rows)

    with patch.context() as inner:
        inner.setattr(table, "unit_rows", whole)
        yield


def weigh(shape: tuple[int, int], dtype: torch.dtype, card: str, part: int, patch: pytest.MonkeyPatch) -> Weighed:
    """Weigh a step of a matrix on a card, by 1/part of its rows on 1/part of the card.

    It is the first step, which measures ΣX² before all else; no later one does, so this launch is left out.
    """
    traffic = import_module("traffic")
    rows, columns = shape[0] // part, shape[1]
    traces: list[Any] = []

    def observe(compiled: Any, grid: tuple[int, int, int], values: list[Any], reached: list[Tensor]) -> None:
        traces.append(traffic.record(compiled, grid, values, extra=reached))

    torch.manual_seed(0)
    x, g = torch.randn(rows, columns).to(dtype), torch.randn(rows, columns).to(dtype)
    emulator = Emulator(CARDS[card], observe=observe)
    with cut_as(shape, patch), patch.context() as inner:
        inner.setattr(
            work.Executor, "_empty", lambda self, count, dtype: like_cuda(torch.empty(max(count, 1), dtype=dtype))
        )
        take(emulator, patch, [x], [[g]])
    kept = [i for i, name in enumerate(emulator.launched) if name != "measure"]
    names, traces = [emulator.launched[i] for i in kept], [traces[i] for i in kept]
    elements, model = rows * columns, traffic.CARDS[card]
    cache, usual, cold = None, 0, 0
    for trace in traces:
        result = traffic.simulate(trace, model, part, cache=cache, flush=trace is traces[-1])
        usual, cache = usual + result.hbm, result.cache
        cold += traffic.simulate(trace, model, part).hbm
    counts = {name: sum(t.warp_instr.values()) * 32 / elements for name, t in zip(names, traces, strict=True)}
    return Weighed(usual / elements, cold / elements, counts)
