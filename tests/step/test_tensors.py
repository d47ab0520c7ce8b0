"""Any shape, stride, dtype and magnitude that a gradient can have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adafactor import Adafactor, schedules
from adafactor.core.factoring import find_factoring
from adafactor.core.sums import divide
from tests import oracle
from tests.compare import gradients, start, trained

# the cpu backend leaves some orders of memory to eager PyTorch, and says so
pytestmark = pytest.mark.usefixtures("backend")


def strided(t: Tensor, kind: str) -> Tensor:
    """The same values in other memory."""
    if kind == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "strided":
        wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
        return wide[..., ::2].copy_(t)
    return t.clone()


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "strided"])
def test_chunks_follow_the_memory_and_cover_the_tensor_once(kind: str) -> None:
    t = strided(torch.zeros(3, 1000, 700), kind)
    pieces = list(divide(t, 2**20))
    assert len(pieces) > 1
    for piece in pieces:
        t[piece] += 1
        assert t[piece].numel() <= 2**20
    assert bool((t == 1).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_keep_float32_statistics_and_round_once(dtype: torch.dtype) -> None:
    x, grads = start((9, 7)), gradients((9, 7), 1)
    low_x, low_g = torch.tensor(x).to(dtype), torch.tensor(grads[0]).to(dtype)
    p = low_x.clone().requires_grad_()
    optimizer = Adafactor([p], beta1=0.9, weight_decay=0.1)
    p.grad = low_g
    optimizer.step()
    assert {v.dtype for v in optimizer.state[p].values()} == {torch.float32}
    row = oracle.Row("outer", 0.9, "update", d=1.0, relative=True, multiplier=1.0, weight_decay=0.1)
    exact = oracle.run(row, low_x.double().numpy(), [low_g.double().numpy()], schedules.without_warmup).x[-1]
    # one rounding: the nearest number of the dtype, but for ties that float32 decides
    wrong = (p.detach() != torch.tensor(exact).to(dtype)).sum()
    assert int(wrong) <= 1
    torch.testing.assert_close(p.detach().double(), torch.tensor(exact), rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)


@given(
    st.lists(st.floats(-30, 18), min_size=6, max_size=6),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.sampled_from(["outer", "row", "column", "none"]),
)
def test_magnitudes_from_1e_30_to_1e18_and_zero_rows_match_the_oracle(
    exponents: list[float], zero: list[bool], estimator: str
) -> None:
    scale = np.where(zero, 0.0, 10.0 ** np.array(exponents))[:, None]
    grads = [np.asarray(np.float32(g * scale), dtype=np.float64) for g in np.clip(gradients((6, 500), 5), -1, 1)]
    row = oracle.Row(estimator, d=1.0, relative=True, multiplier=1.0)
    x = np.zeros((6, 500))  # from zero, so that the last digits of the way are not lost in those of the start
    path = oracle.run(row, x, grads, schedules.without_warmup)
    ours = trained(row, x, grads, schedules.without_warmup, torch.float32).double().numpy()
    assert np.isfinite(ours).all()
    travelled = sum(np.abs(b - a).max() for a, b in zip(path.x, path.x[1:], strict=False))
    assert np.abs(ours - path.x[-1]).max() <= 1e-5 * travelled


def test_many_rows_keep_their_digits() -> None:
    n = 1_000_000
    g = (torch.rand(n, 3, generator=torch.Generator().manual_seed(0)) + 0.5).float()
    p = torch.ones(n, 3, requires_grad=True)
    optimizer = Adafactor([p])
    p.grad = g
    optimizer.step()
    exact = g.double().square()
    torch.testing.assert_close(optimizer.state[p]["col"].double(), exact.mean(0, keepdim=True), rtol=1e-7, atol=0)
    torch.testing.assert_close(optimizer.state[p]["row"].double(), exact.mean(1, keepdim=True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("factored", ["outer", "row", "column", False])
def test_empty_tensors_pass_through(shape: tuple[int, ...], factored: str | bool) -> None:
    """The others step as if they were not there."""
    p, q, alone = torch.zeros(shape), torch.ones(2, 2), torch.ones(2, 2)
    optimizers = [Adafactor(params, factored=factored, beta1=0.9) for params in ([p, q], [alone])]
    for g in gradients((2, 2), 3):
        p.grad = torch.zeros(shape)
        q.grad, alone.grad = (torch.tensor(g, dtype=torch.float32) for _ in range(2))
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(q, alone) and bool((q != 1).all())
    assert all(v.isfinite().all() for v in optimizers[0].state[p].values())
    assert [record.shape for record in optimizers[0].report()] == [shape, (2, 2)]


@pytest.mark.parametrize(
    ("shape", "factored", "expected"),
    [
        ((), "outer", {"full": ()}),
        ((5,), "outer", {"full": (5,)}),
        ((5, 3), "outer", {"row": (5, 1), "col": (1, 3)}),
        ((5, 3), "row", {"row": (5, 1)}),
        ((5, 3), "column", {"col": (1, 3)}),
        ((5, 3), False, {"full": (5, 3)}),
        ((1, 3), "outer", {"full": (1, 3)}),  # exact either way, and smaller
        ((64, 32, 3, 3), "outer", {"row": (64, 1, 3, 3), "col": (1, 32, 3, 3)}),
        ((12, 8, 8), "outer", {"row": (12, 8, 1), "col": (1, 8, 8)}),
    ],
    ids=str,
)
def test_the_factoring_gives_the_shapes_of_the_state(
    shape: tuple[int, ...], factored: str | bool, expected: dict[str, tuple[int, ...]]
) -> None:
    factoring = find_factoring(shape, factored)
    p = torch.zeros(shape, requires_grad=True)
    optimizer = Adafactor([p], factored=factored, beta1=0.5)
    state = dict(optimizer.state[p])
    assert state.pop("step").shape == () and state.pop("momentum_of_update").shape == shape
    assert {key: tuple(v.shape) for key, v in state.items()} == expected == factoring.statistics


def test_a_transposed_parameter_is_divided_by_the_mean_of_its_rows_too() -> None:
    """R and C of one G² have one mean; those of a state that was edited, or came from elsewhere, need not."""
    ends = []
    for transposed in (False, True):
        x, g = (torch.tensor(values, dtype=torch.float32) for values in (start((8, 16)), *gradients((8, 16), 1)))
        p = torch.nn.Parameter(x.t().contiguous().t() if transposed else x)
        optimizer = Adafactor([p], clip=None, relative=False, lr=1.0, lr_decay=None)
        optimizer.state[p]["step"].fill_(1000)
        optimizer.state[p]["row"].fill_(1.0)
        optimizer.state[p]["col"].fill_(4.0)
        p.grad = g.t().contiguous().t() if transposed else g
        optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-7)
