"""A step that is captured in a graph: what lies on the host at that time must not matter when it is replayed.

There is no graph on a CPU, so this one is a list: of launches, which a graph does not run while it is captured, and of
copies, which it repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adafactor import Adafactor
from adafactor.kernels.triton import executor as work
from adafactor.kernels.triton import upload
from tests.interpreted.guarded import distance, random_steps, starts


class Copies(TorchDispatchMode):
    """Notes every copy."""

    def __init__(self, note: Callable[[Tensor, Tensor], None]):
        """Tell `note` where to and what from."""
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation comes here."""
        if func is torch.ops.aten.copy_.default:
            self.note(args[0], args[1])
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Fails where the host would read something from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation comes here."""
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host would wait"
        return func(*args, **(kwargs or {}))


def capture(optimizer: Adafactor) -> list[Callable[[], object]]:
    """What a graph of one step would do."""
    found: list[Callable[[], object]] = []
    run = work.launch
    with pytest.MonkeyPatch.context() as patch:
        for module in (work, upload):
            patch.setattr(module, "is_capturing", lambda device: True)
        patch.setattr(work, "launch", lambda *args: found.append(lambda: run(*args)))
        with Copies(lambda to, of: found.append(lambda: to.copy_(of))):
            optimizer.step()
    return found


def test_a_replayed_step_sees_new_gradients_and_a_new_learning_rate() -> None:
    begin = starts([(20, 16), (16, 20), (24,)])
    steps = random_steps(begin, 7)
    ends = []
    for captured in (True, False):
        params = [p.clone().requires_grad_() for p in begin]
        lr = torch.tensor(0.1, dtype=torch.float64)
        optimizer = Adafactor(params, backend="triton", lr_decay=None)
        patch = pytest.MonkeyPatch()  # a tensor on a CPU would be read there: let it pass for one on a device
        patch.setattr("adafactor.core.settings._learning_rate", lambda value: value)
        patch.setattr(
            "adafactor.core.settings._comparable", lambda value: id(value) if isinstance(value, Tensor) else value
        )
        optimizer.param_groups[0]["lr"] = lr
        static, other = ([torch.zeros_like(p) for p in params] for _ in range(2))
        graph: list[Callable[[], object]] | None = None
        for number, step in enumerate(steps):
            lr.fill_(0.1 / (number + 1))
            replays = captured and number in (2, 3, 5)
            for p, g, place in zip(params, step, static if replays else other, strict=True):
                assert g is not None
                p.grad = place.copy_(g)
            if replays and graph is None:
                graph = capture(optimizer)
            if replays and graph is not None:
                for action in graph:
                    action()
            else:
                optimizer.step()  # with gradients elsewhere, between the replays
        patch.undo()
        ends.append([p.detach() for p in params])
        assert all(optimizer.state[p]["step"].item() == len(steps) for p in params)
    assert distance(ends[0], ends[1], begin) == 0


def test_the_host_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "launch", lambda *args: None)
    params = [p.requires_grad_() for p in starts([(20, 16), (7, 5), (24,)])]
    optimizer = Adafactor(params, backend="triton")
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        with Waits():
            optimizer.step()


def test_tables_are_uploaded_only_when_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "launch", lambda *args: None)
    p = torch.ones(20, 16, requires_grad=True)
    optimizer = Adafactor([p], backend="triton")
    uploads = []
    p.grad = torch.ones(20, 16)
    for i in range(6):
        if i == 4:
            p.grad = torch.ones(20, 16)
        optimizer.param_groups[0]["lr"] = 0.01 if i < 5 else 0.02
        optimizer.step()
        one = optimizer._buckets.of[None].executors[0]
        assert isinstance(one, work.Executor)
        uploads.append(one.given.uploads + one.numbers.uploads)
    # the first step measures X and the second one no longer; a gradient elsewhere; another learning rate
    assert uploads == [2, 3, 3, 3, 4, 5]
