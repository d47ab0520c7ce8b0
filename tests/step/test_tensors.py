"""How eager PyTorch divides a tensor, sums of many rows, empty tensors, and factors that were edited."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from adafactor import Adafactor
from adafactor.core.sums import divide
from tests.cases import normal
from tests.exact import assert_same

# the cpu backend leaves some orders of memory to eager PyTorch, and says so
pytestmark = pytest.mark.usefixtures("backend")

KINDS = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda t: torch.cat([t, t], -1)[..., ::2],
}


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_follow_the_memory_and_cover_the_tensor_once(kind: str) -> None:
    t = KINDS[kind](torch.zeros(3, 1000, 700))
    pieces = list(divide(t, 2**20))
    assert len(pieces) > 1
    for piece in pieces:
        t[piece] += 1
        assert t[piece].numel() <= 2**20
    assert bool((t == 1).all())


def test_many_rows_keep_their_digits() -> None:
    g = torch.rand(1_000_000, 3, generator=torch.Generator().manual_seed(0)) + 0.5
    p = torch.ones_like(g, requires_grad=True)
    optimizer = Adafactor([p])
    p.grad = g
    optimizer.step()
    exact = g.double().square()
    torch.testing.assert_close(optimizer.state[p]["col"].double(), exact.mean(0, keepdim=True), rtol=1e-7, atol=0)
    torch.testing.assert_close(optimizer.state[p]["row"].double(), exact.mean(1, keepdim=True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("factored", ["outer", False])
def test_empty_tensors_pass_through_and_the_others_step_as_if_they_were_not_there(
    shape: tuple[int, ...], factored: str | bool
) -> None:
    p, q, alone = torch.zeros(shape), torch.ones(2, 2), torch.ones(2, 2)
    optimizers = [Adafactor(params, factored=factored, beta1=0.9) for params in ([p, q], [alone])]
    for t in range(3):
        p.grad = torch.zeros(shape)
        q.grad, alone.grad = (normal((2, 2), t) for _ in range(2))
        for optimizer in optimizers:
            optimizer.step()
    assert_same(optimizers[0].state[q], optimizers[1].state[alone])
    assert torch.equal(q, alone) and bool((q != 1).all())
    assert [record.shape for record in optimizers[0].report()] == [shape, (2, 2)]


def test_a_transposed_parameter_is_divided_by_the_mean_of_its_rows_too() -> None:
    """R and C of one G² have one mean; those of a state that was edited, or came from elsewhere, need not."""

    def end(turn: bool) -> Tensor:
        x, g = (KINDS["transposed" if turn else "contiguous"](normal((8, 16), seed)) for seed in (0, 1))
        p = Parameter(x)
        optimizer = Adafactor([p], clip=None, relative=False, lr=1.0, lr_decay=None)
        for key, value in {"step": 1000.0, "row": 1.0, "col": 4.0}.items():
            optimizer.state[p][key].fill_(value)
        p.grad = g
        optimizer.step()
        return p.detach()

    torch.testing.assert_close(end(turn=True), end(turn=False), rtol=1e-5, atol=1e-7)
