"""torchao's `CPUOffloadOptimizer` makes one optimizer per parameter and steps copies in host memory.

It asks for a GPU. Here its own code runs with streams and pinned memory that do nothing, and everything on the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor
from tests.integrations.exact import assert_same, copy_of

# torchao's own business with this torch
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Stream:
    """A stream on which everything has happened already."""

    def wait_stream(self, other: Stream) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def record_event(self) -> Stream:
        """Give something to synchronize with."""
        return self

    def __enter__(self) -> None:
        """Be current."""

    def __exit__(self, *problem: object) -> None:
        """Be current no longer."""


@pytest.fixture
def offload(monkeypatch: pytest.MonkeyPatch) -> Any:
    cpu_offload = pytest.importorskip("torchao.optim.cpu_offload")
    device = SimpleNamespace(Stream=Stream, current_stream=Stream, stream=lambda stream: stream)

    class Torch:
        xpu = device

        def empty_like(self, x: torch.Tensor, pin_memory: bool, **keywords: Any) -> torch.Tensor:
            return torch.empty_like(x, **keywords)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(cpu_offload, "torch", Torch())
    monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cpu", "xpu"])
    return cpu_offload.CPUOffloadOptimizer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 3))  # one of the four is large enough


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for seed in steps:
        model(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_offloaded_run_ends_on_the_same_bits_also_after_a_checkpoint(offload: Any) -> None:
    keywords = {"lr": 1e-2, "beta1": 0.9}
    plain, offloaded, resumed = network(), network(), network()
    train(plain, Adafactor(plain.parameters(), **keywords), range(6))  # type: ignore[arg-type]

    first = offload(offloaded.parameters(), Adafactor, **keywords)
    train(offloaded, first, range(3))
    resumed.load_state_dict(offloaded.state_dict())
    second = offload(resumed.parameters(), Adafactor, **keywords)
    second.load_state_dict(first.state_dict())
    train(resumed, second, range(3, 6))

    assert [type(optimizer) for optimizer in second.optim_dict.values()] == [Adafactor]
    assert_same(copy_of(resumed), copy_of(plain))
