"""A sharded parameter steps as one process does: every row of `tests/cases.py` under every placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import Parameter

from adafactor import Adafactor
from adafactor.core.dtensor import local
from tests.cases import CASES, Case, crossed
from tests.distributed.rig import Places, assert_same_everywhere, held, line, placements, split, square, whole
from tests.ranks import on_ranks

STEPS = 3
# Between some of these ranks lie blocks of an int8 momentum, which is refused.
CUT_BLOCKS = ("int8 momentum of a convolution", "int8 momentum of a stack")
SHARDABLE = [case for case in CASES if case.order is None and case.name not in CUT_BLOCKS]
MESHES = pytest.mark.parametrize(
    ("size", "mesh"), [(2, line), pytest.param(4, square, marks=pytest.mark.slow)], ids=["2", "2 × 2"]
)


def fitting(case: Case, backend: str, mesh: DeviceMesh) -> list[Places]:
    """The placements that this row can have: slices stay whole, and so do the blocks of an int8 momentum.

    Triton takes tensors whose rows in memory are not cut, and are the paper's where others are.
    """
    found = []
    for places in placements(mesh, case.shape):
        cut = [place.dim for place in places if not place.is_replicate()]  # type: ignore[attr-defined]
        if any(cut) and (case.keywords.get("per_slice") or backend == "triton"):
            continue
        if cut and backend == "triton" and "axes" in case.keywords:
            continue
        if case.keywords.get("momentum_dtype") == "int8" and case.shape[-1] // 128 % 2 ** cut.count(1):
            continue
        found.append(places)
    return found


def assert_steps_as_plain(case: Case, backend: str, make_mesh: Callable[[], DeviceMesh]) -> None:
    """All placements as the parameters of one optimizer, against plain tensors of another."""
    mesh = make_mesh()
    each = fitting(case, backend, mesh)
    plain = [case.start() for _ in each]
    cut = [Parameter(split(x, mesh, places)) for x, places in zip(plain, each, strict=True)]
    # one number for all, so that their random words are the same
    optimizers = [[case.optimizer([p], backend) for p in plain], [case.optimizer([p], backend) for p in cut]]
    for t in range(1, STEPS + 1):
        for p, q, places in zip(plain, cut, each, strict=True):
            case.give(p, case.gradient(t))
            case.give(q, split(case.gradient(t), mesh, places))
        for optimizer in optimizers[0] + optimizers[1]:
            optimizer.step()
    for p, q, places, theirs, ours in zip(plain, cut, each, *optimizers, strict=True):
        assert_same_everywhere(*held(ours))
        if not case.keywords.get("per_slice"):  # there, each rank reports its own slices
            assert_same_everywhere(str(ours.report()))
        assert_near(case, p, whole(q), str(places))
        for key, value in theirs.state[p].items():
            kept = whole(ours.state[q][key])
            if key in ("row", "col", "full", "step"):
                torch.testing.assert_close(kept, value, rtol=1e-5, atol=0, msg=lambda text: f"{key}, {places}: {text}")  # noqa: B023
            assert kept.dtype == value.dtype and kept.shape == value.shape, key


def assert_near(case: Case, expected: torch.Tensor, got: torch.Tensor, what: str) -> None:
    """As near as sums in another order leave it.

    These may round a number near the border the other way: a unit of 16 bits, or of an int8 momentum.
    """
    expected = expected.detach()
    far = (got - expected).abs().double()
    travelled = float((expected - case.start().detach()).abs().max())
    digits = (3e-3 if "momentum_dtype" in case.keywords else 1e-5) * travelled
    assert bool((far <= digits + torch.finfo(case.dtype).eps * expected.abs().double()).all()), what
    if case.dtype.itemsize == 2:
        assert float((far > 0).double().mean()) < 0.03, what


@MESHES
@crossed(SHARDABLE)
def test_every_placement_steps_as_one_process_does(case: Case, backend: str, size: int, mesh: Any) -> None:
    on_ranks(size, assert_steps_as_plain, case, "auto" if backend == "cpu" else backend, mesh)


ROUNDED = [(7, 12), (1, 6), (9,), (), (5, 6, 7)]


def assert_rounded_as_the_whole(rounding: str, backend: str, make_mesh: Callable[[], DeviceMesh]) -> None:
    """Three steps in which all but the rounding is exact: G = 1 makes U = 1."""
    mesh = make_mesh()
    cases = [(shape, places) for shape in ROUNDED for places in placements(mesh, shape)]
    plain = [torch.ones(shape, dtype=torch.bfloat16).requires_grad_() for shape, _ in cases]
    cut = [split(x, mesh, places).requires_grad_() for x, (_, places) in zip(plain, cases, strict=True)]
    for params in (plain, cut):
        keywords: dict[str, Any] = {"lr": 2.0**-11, "relative": False, "lr_decay": None, "rounding": rounding}
        optimizer = Adafactor(params, backend=backend, **keywords)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p).detach()
            optimizer.step()
    for p, q, (shape, places) in zip(plain, cut, cases, strict=True):
        assert torch.equal(p.detach(), whole(q)), f"{shape} {places}"


@MESHES
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_a_shard_is_rounded_to_the_bits_of_the_whole(rounding: str, backend: str, size: int, mesh: Any) -> None:
    on_ranks(size, assert_rounded_as_the_whole, rounding, backend, mesh)


INT8: dict[str, Any] = {"beta1": 0.9, "momentum_dtype": "int8"}


@pytest.mark.parametrize(
    ("shape", "axis"), [((7, 700), 1), ((24, 32, 3, 3), 2), ((24, 32, 3, 3), 3), ((16, 384), 1)], ids=str
)
def test_shards_within_blocks_of_an_int8_momentum_are_refused_by_name(shape: tuple[int, ...], axis: int) -> None:
    def check() -> None:
        p = split(torch.ones(shape), line(), [Shard(axis)]).requires_grad_()
        with pytest.raises(ValueError, match=r"^layer.weight of shape .* momentum in bfloat16"):
            Adafactor([("layer.weight", p)], **INT8)

    on_ranks(2, check)


def test_a_format_that_the_shards_refuse_in_mid_run_leaves_everything_as_it_was() -> None:
    def check() -> None:
        p = split(torch.ones(16, 384), line(), [Shard(1)]).requires_grad_()
        optimizer = Adafactor([("layer.weight", p)], beta1=0.9, momentum_dtype="bfloat16", backend="eager")
        p.grad = torch.ones_like(p).detach()
        optimizer.step()
        before = [whole(t) for t in held(optimizer)]
        optimizer.param_groups[0]["momentum_dtype"] = "int8"
        with pytest.raises(ValueError, match="layer.weight of shape .16, 384. is sharded along axis 1"):
            optimizer.step()
        assert all(torch.equal(whole(a), b) for a, b in zip(held(optimizer), before, strict=True))

    on_ranks(2, check)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_a_counted_edit_of_a_shard_is_measured_before_the_step_and_any_other_one_step_later(backend: str) -> None:
    """On one rank only: the step has the RMS(X) of the whole."""

    def check() -> None:
        mesh = line()
        for is_counted in (True, False):
            x = torch.randn(40, 24, generator=torch.Generator().manual_seed(9))
            p = split(x, mesh, [Shard(0)]).requires_grad_()
            optimizer = Adafactor([p], backend=backend)

            def step(p: Any = p, optimizer: Adafactor = optimizer) -> tuple[float, float]:
                p.grad = torch.ones_like(p).detach()
                before = float(whole(p).square().mean().sqrt())
                optimizer.step()
                return optimizer.report()[0].rms_parameter, before

            step()
            if torch.distributed.get_rank() == 0:
                with torch.no_grad():
                    (local(p) if is_counted else local(p).data)[7] *= 20
            used, right = step()
            if is_counted:
                assert used == pytest.approx(right, rel=1e-5)
            for _ in range(2):
                used, right = step()
                assert used == pytest.approx(right, rel=1e-5)

    on_ranks(2, check)
