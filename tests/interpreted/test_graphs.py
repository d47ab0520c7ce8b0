"""A step that is captured in a graph: what lies on the host at that time must not matter when it is replayed.

There is no graph on a CPU, so this one is a list: of launches, which a graph does not run while it is captured, and of
torch's operations, whose results it writes to the same memory again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adafactor import Adafactor
from adafactor.kernels.triton.executor import Executor
from adafactor.kernels.triton.launch import Launch
from tests.interpreted.guarded import random_steps, starts

Graph = list[Callable[[], object]]


class Recorder(TorchDispatchMode):
    """Notes every operation; to replay it fills what it returned then with what it returns now."""

    def __init__(self, graph: Graph):
        """Note operations here."""
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation comes here."""
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host would wait"
        results = func(*args, **(kwargs or {}))

        def again() -> None:
            new = func(*args, **(kwargs or {}))
            for old, value in zip(tree_leaves(results), tree_leaves(new), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != value.data_ptr():
                    old.copy_(value)

        if func is not torch.ops.aten.empty.memory_format:
            self.graph.append(again)
        return results


def capture(optimizer: Adafactor) -> Graph:
    """What a graph of one step would do."""
    graph: Graph = []
    run = Launch.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", lambda *args: graph.append(lambda: run(*args)))
        patch.setattr(Executor, "_is_capturing", lambda self: True)
        with Recorder(graph):
            optimizer.step()
    return graph


def test_a_report_counts_replayed_steps_also_after_the_report_before() -> None:
    (p,) = (t.requires_grad_() for t in starts([(20, 16)]))
    optimizer, p.grad = Adafactor([p], backend="triton"), torch.ones_like(p)
    optimizer.step()
    graph = capture(optimizer)
    for steps in (3, 5):
        for action in 2 * graph:
            action()
        (record,) = optimizer.report()
        assert record.steps == steps and record.beta2 == pytest.approx(1 - steps**-0.8)


def test_a_replayed_step_sees_new_gradients_and_a_new_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    # a tensor on a CPU would be read there: let it pass for one on a device
    monkeypatch.setattr("adafactor.core.settings._learning_rate", lambda value: value)
    monkeypatch.setattr(
        "adafactor.core.settings._comparable", lambda value: id(value) if isinstance(value, Tensor) else value
    )
    begin = starts([(20, 16), (16, 20), (24,), (3000,)])
    steps = random_steps(begin, 7)
    ends = []
    for is_captured in (True, False):
        params = [p.clone().requires_grad_() for p in begin]
        lr = torch.tensor(0.1, dtype=torch.float64)
        optimizer = Adafactor(params, backend="triton", weight_decay=0.1)
        optimizer.param_groups[0]["lr"] = lr
        static, other = ([torch.zeros_like(p) for p in params] for _ in range(2))
        graph: Graph | None = None
        for number, step in enumerate(steps):
            lr.fill_(0.1 / (number + 1))
            replays = is_captured and number in (3, 4, 6)
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
        ends.append([p.detach() for p in params])
        assert all(optimizer.state[p]["step"].item() == len(steps) for p in params)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
