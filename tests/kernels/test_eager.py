"""What the eager kernel promises: no host waits, bounded memory, the same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from studies.temporaries import Largest
from tests import inside
from tests.step.test_nonfinite import KEYWORDS


def test_a_step_asks_nothing_of_a_device() -> None:
    """On the meta device every question to the host (`item`, `bool`) raises."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4), torch.nn.Conv2d(4, 4, 3)).to("meta")
    for keywords in KEYWORDS:
        optimizer = Adafactor(model.parameters(), **keywords)  # type: ignore[arg-type]
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        optimizer.step()
    with pytest.raises(Exception, match="meta"):
        bool(next(model.parameters()).sum() > 0)  # the control


def test_the_result_does_not_depend_on_the_number_of_threads(threads: Callable[[int], None]) -> None:
    def run(count: int) -> Tensor:
        threads(count)
        p = torch.randn(1500, 900, generator=torch.Generator().manual_seed(0)).requires_grad_()
        v = torch.randn(400_000, generator=torch.Generator().manual_seed(0)).requires_grad_()
        optimizer = Adafactor([p, v], backend="eager")
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            p.grad, v.grad = (
                torch.randn(1500, 900, generator=generator),
                torch.randn(400_000, generator=generator),
            )
            optimizer.step()
        return torch.cat([p.detach().flatten(), v.detach()])

    results = [run(count) for count in (1, 2, 8)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


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
    assert 0 < largest.bytes <= width * inside.block()
    assert p.numel() > 4 * inside.block(), "the control: there are several blocks"
