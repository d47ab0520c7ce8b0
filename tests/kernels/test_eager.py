"""What the eager kernel promises: no host waits, bounded memory, few operations on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adafactor import Adafactor
from adafactor.planning.models import gpt2, llama
from studies.temporaries import Largest
from tests import inside
from tests.cases import normal
from tests.reference import Expected

KEYWORDS: list[dict[str, Any]] = [
    {},
    {"factored": False},
    {"factored": "row", "beta1": 0.9},
    {"factored": "column", "beta1": 0.9, "momentum_of": "gradient", "weight_decay": 0.1},
]


def test_a_step_asks_nothing_of_a_device() -> None:
    """On the meta device every question to the host (`item`, `bool`) raises."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4), torch.nn.Conv2d(4, 4, 3)).to("meta")
    for keywords in KEYWORDS:
        optimizer = Adafactor(model.parameters(), **keywords)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        optimizer.step()
    with pytest.raises(Exception, match="meta"):
        bool(next(model.parameters()).sum() > 0)  # the control


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keywords", [*KEYWORDS, {"rounding": "stochastic", "maximize": True}], ids=str)
@pytest.mark.filterwarnings("ignore:.*its gradient is not finite")
def test_parameters_side_by_side_as_on_a_device_step_as_each_would_alone(
    keywords: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.keep_scalars_on_the_device(monkeypatch)
    shapes = [(6, 5), (40, 30), (7,), (64,), (3, 12, 10), (16, 8, 3, 3), (5, 1), (), (9, 20)]
    params = [normal(shape, i, dtype).requires_grad_() for i, shape in enumerate(shapes)]
    optimizer = Adafactor(params, backend="eager", **keywords)
    for t in range(5):
        for i, p in enumerate(params):
            g = normal(shapes[i], 10 * t + i, dtype)
            if t == 2 and i in (1, 3, 5):
                g.view(-1)[0] = torch.nan
            p.grad = None if t == 3 and i % 3 == 0 else g
        expected = Expected(optimizer)
        optimizer.step()
        assert not (problem := expected.problem()), problem
    assert sum(record.skipped for record in optimizer.report()) == 3


@pytest.mark.parametrize(
    ("dtype", "rounding", "width"),
    [
        (torch.float32, "nearest", 4),
        (torch.bfloat16, "nearest", 4),
        (torch.bfloat16, "kahan", 4),
        (torch.bfloat16, "stochastic", 8),  # elements are numbered in int64
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(3000, 2500), (7_500_000,)], ids=str)
def test_a_step_allocates_at_most_a_block_at_a_time(
    shape: tuple[int, ...], dtype: torch.dtype, rounding: str, width: int
) -> None:
    p = torch.ones(shape, dtype=dtype, requires_grad=True)
    optimizer = Adafactor([p], backend="eager", rounding=rounding)
    p.grad = torch.ones(shape, dtype=dtype)
    with Largest() as largest:
        optimizer.step()
    assert 0 < largest.bytes <= width * inside.chunk()
    assert p.numel() > 4 * inside.chunk(), "the control: there are several blocks"


class Launches(TorchDispatchMode):
    """Counts the operations that a device would have to launch: all but views, types and new memory."""

    FREE = set(
        "new_empty empty promote_types slice view select unbind detach as_strided permute unsqueeze squeeze split "
        "split_with_sizes expand alias".split()
    )

    def __init__(self) -> None:
        """None yet."""
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Count one."""
        self.count += func.overloadpacket.__name__ not in self.FREE
        return func(*args, **(kwargs or {}))


LLAMA = tuple(llama(32, 4096, 11008, 4096, 32000, tied=False))


@pytest.mark.parametrize(
    ("shapes", "dtype", "limit"),
    [(tuple(gpt2()), torch.float32, 2 * 1784), (LLAMA, torch.bfloat16, 2 * 4655)],  # of torch.optim.Adafactor's loop
    ids=["GPT-2 small", "Llama 7B"],
)
def test_a_step_takes_at_most_twice_the_operations_of_torchs_loop_on_a_device(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, limit: int
) -> None:
    params = [torch.empty(shape, device="meta", dtype=dtype, requires_grad=True) for shape in shapes]
    optimizer = Adafactor(params)
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer.step()
    with Launches() as launches:
        optimizer.step()
    assert launches.count <= limit
