"""How long both passes take, beside a copy. The figures are for the page at the end; nothing fails for being slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from adafactor.kernels.triton.launch import Launch

ELEMENTS = 2**27  # several times what any cache holds
ROUNDS = 15
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "stochastic": torch.bfloat16}


class Clock:
    """Times by the device's own events."""

    def __init__(self, module: Any):
        """Take torch's module for the device."""
        self.module = module
        self.noted: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def __call__(self, name: str, function: Callable[[], object]) -> None:
        """Run it between two events."""
        first, last = (self.module.Event(enable_timing=True) for _ in range(2))
        first.record()
        function()
        last.record()
        self.noted[name].append((first, last))

    def seconds(self) -> dict[str, float]:
        """Return the median of each name."""
        self.module.synchronize()
        return {name: median(a.elapsed_time(b) for a, b in pairs) / 1e3 for name, pairs in self.noted.items()}


@pytest.mark.parametrize("how", DTYPES)
@pytest.mark.parametrize("width", [768, 4096, 14336])
def test_both_passes_beside_a_copy(
    width: int, how: str, card: torch.device, page: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, dtype = torch.get_device_module(card), DTYPES[how]
    p = torch.nn.Parameter(torch.randn(ELEMENTS // width, width, device=card).to(dtype))
    p.grad = torch.randn_like(p)
    rounding = "stochastic" if how == "stochastic" else "nearest"
    optimizer, other = Adafactor([p], backend="triton", rounding=rounding), torch.empty_like(p.grad)
    for _ in range(3):
        optimizer.step()
    clock, run = Clock(module), Launch.__call__

    def timed(launch: Launch, *given: Tensor | None) -> None:
        clock(launch.kernel.__name__, lambda: run(launch, *given))

    monkeypatch.setattr(Launch, "__call__", timed)
    for _ in range(ROUNDS):
        clock("copy", lambda: other.copy_(p.grad))  # type: ignore[arg-type]
        clock("step", optimizer.step)
    found = clock.seconds()
    moved = {"copy": 2, "first_pass": 1, "last_pass": 3, "step": 4}  # the least, in sizes of X
    cells = [f"{name} {1e3 * t:.3f} ms" + _speed(moved.get(name), p, t) for name, t in sorted(found.items())]
    page.append(f"- {p.shape[0]} × {width}, {how}: " + "; ".join(cells))


def _speed(sizes: int | None, p: Tensor, seconds: float) -> str:
    return "" if sizes is None else f" ({sizes * p.nbytes / seconds / 1e9:,.0f} GB/s)"


def test_whole_steps_of_gpt2_beside_others(card: torch.device, page: list[str]) -> None:
    from studies.gpu_counts import MODELS

    module = torch.get_device_module(card)
    cells = []
    for name, make in {
        "adafactor, triton": lambda params: Adafactor(params, backend="triton"),
        "adafactor, eager": lambda params: Adafactor(params, backend="eager"),
        "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
        "torch.optim.Adafactor": torch.optim.Adafactor,
    }.items():
        params = MODELS["gpt2"].make(str(card))
        for p in params:
            torch.nn.init.normal_(p)
            torch.nn.init.normal_(p.grad)  # type: ignore[arg-type]
        optimizer, clock = make(params), Clock(module)
        for _ in range(3):
            optimizer.step()
        for _ in range(ROUNDS):
            clock("step", optimizer.step)
        cells.append(f"{name} {1e3 * clock.seconds()['step']:.2f} ms")
    page.append("- GPT-2 small, float32: " + "; ".join(cells))
