"""Whole steps: the oracle's cases, bits, bad gradients, large tensors and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from adafactor.kernels.triton import proof
from tests import interpreter, reference
from tests.cases import CASES, Case

STEPPED = [case for case in CASES if "triton" not in case.left_to_eager and not case.keywords.get("per_slice")]
FEW = ("the defaults", "a vector")  # of those that Triton's interpreter is given in `make test`
ROWS = [
    pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (interpreter.IS_THERE and case.name not in FEW))
    for case in STEPPED
]
WIDE = [replace(case, shape=(300, 4100)) for case in STEPPED if len(case.shape) == 2 and case.shape[0] > 1]
WIDE += [
    replace(case, shape=(96, 11008), name=f"{case}, 11008 columns")
    for case in STEPPED
    if case.name in ("the defaults", "bfloat16 stochastic")
]
# Every tensor a few elements off the tiles, and none of it so small that one program has it.
LARGE = [pytest.param(case, id=str(case)) for case in WIDE]


@pytest.fixture(autouse=True)
def nothing_is_put_right(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A wrong first step shall be seen, and not be replaced by eager PyTorch's."""
    monkeypatch.setattr(proof, "LARGEST", -1)
    yield


def run(case: Case, device: torch.device, backend: str, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """X and the state after some steps, on the CPU."""
    p = torch.nn.Parameter(case.start().detach().to(device))
    optimizer = case.optimizer([p], backend)
    for t in range(steps):
        case.give(p, case.gradient(t + 1).to(device))
        optimizer.step()
    return p.detach().cpu(), {key: value.cpu() for key, value in optimizer.state[p].items()}


@pytest.mark.parametrize("case", ROWS)
def test_every_step_is_the_oracles(case: Case, device: torch.device) -> None:
    p = torch.nn.Parameter(case.start().detach().to(device))
    optimizer = case.optimizer([p], "triton")
    group = optimizer.param_groups[0]
    for t in range(4):
        g, state = case.gradient(t + 1), {key: value.cpu() for key, value in optimizer.state[p].items()}
        x = p.detach().cpu()
        expected = reference.outcome(group, x.dtype, reference.exact(x), reference.exact(g), reference.values(state))
        case.give(p, g.to(device))
        optimizer.step()
        found = {key: value.cpu() for key, value in optimizer.state[p].items()}
        problem = reference.difference(group, p.detach().cpu(), found, expected)
        assert not problem, f"step {t}: {problem}"


@pytest.mark.parametrize("case", LARGE)
def test_programs_that_run_at_once_leave_the_same_bits_every_time(case: Case, card: torch.device) -> None:
    """A race would show: thousands of programs, 20 trainings."""
    x, state = run(case, card, "triton", 3)
    for _ in range(20):
        other, found = run(case, card, "triton", 3)
        assert torch.equal(x, other) and all(torch.equal(value, found[key]) for key, value in state.items())


@pytest.mark.parametrize("case", LARGE)
def test_large_matrices_step_as_in_eager(case: Case, card: torch.device) -> None:
    ours, theirs = (run(case, card, backend, 3)[0].double() for backend in ("triton", "eager"))
    travelled = (theirs - case.start().detach().double()).abs().max()
    grain = torch.finfo(case.dtype).eps * theirs.abs() * (case.dtype.itemsize < 4)
    assert (((ours - theirs).abs() > 1e-4 * travelled + 1.01 * grain).double().mean() < 1e-3).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_that_is_not_taken_leaves_every_bit(bad: float, device: torch.device) -> None:
    for shape in ((16, 48), (31,), (70, 2200) if device.type != "cpu" else (5, 300)):
        p = torch.nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(device))
        optimizer = Adafactor([p], backend="triton", beta1=0.9)
        for value in (1.0, bad):
            before, state = p.detach().clone(), {key: t.clone() for key, t in optimizer.state[p].items()}
            p.grad = torch.ones_like(p)
            p.grad.view(-1)[-1] = value
            optimizer.step()
        assert torch.equal(before, p.detach()) and all(
            torch.equal(value, state[key]) for key, value in optimizer.state[p].items()
        )


@pytest.mark.parametrize("shape", [(2**31 // 4096 + 3, 4096), (2**31 + 5,), (70_000, 64, 16)], ids=str)
def test_tensors_beyond_32_bits_and_many_matrices(shape: tuple[int, ...], card: torch.device) -> None:
    """In bfloat16: 4 GB each of X and G, and of an unfactored V̂ 8 GB."""
    size = torch.Size(shape).numel()
    if torch.get_device_module(card).mem_get_info()[0] < 10 * size + 2**30 * 4:
        pytest.skip("the card has too little memory for it")
    p = torch.nn.Parameter(torch.full(shape, 0.5, dtype=torch.bfloat16, device=card))
    p.grad = torch.full_like(p, 1e-3)
    Adafactor([p], backend="triton", lr=0.25, lr_decay=None).step()
    # U is 1 everywhere, and α = 0.25·RMS(X) = 0.125
    assert bool((p.detach() == 0.375).all())


def test_a_graph_replays_the_step(card: torch.device) -> None:
    if card.type != "cuda":
        pytest.skip("graphs are CUDA's and ROCm's")
    grads = [torch.randn(64, 48, device=card) for _ in range(8)]
    ends = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(64, 48, device=card))
        lr = torch.tensor(0.1, device=card)
        optimizer = Adafactor([p], lr=lr, backend="triton")
        p.grad = torch.zeros_like(p)
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        for number, g in enumerate(grads):
            p.grad.copy_(g)
            lr.fill_(0.1 / (number + 1))
            if not is_captured or number < 3:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    optimizer.step()
                torch.cuda.current_stream().wait_stream(side)
                continue
            if number == 3:
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay()
        ends.append(p.detach().clone())
        assert float(optimizer.state[p]["step"]) == len(grads)
    assert torch.equal(*ends)


def test_the_host_never_waits(card: torch.device) -> None:
    params = [torch.nn.Parameter(torch.ones(shape, device=card)) for shape in ((64, 48), (31,), (4, 8, 6), (2**17,))]
    optimizer = Adafactor(params, backend="triton")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    if card.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        if card.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
