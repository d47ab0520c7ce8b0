"""A sharded run is the unsharded one: every placement, shape, dtype and keyword, and every way to shard a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adafactor.core import equations
from tests.distributed.faults import KINDS

LIMIT = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}
BOTH = pytest.mark.parametrize("launch", ["on_two", pytest.param("on_four", marks=pytest.mark.slow)])


@BOTH
def test_every_placement_of_every_shape_ends_where_a_plain_tensor_does(
    launch: str, request: pytest.FixtureRequest
) -> None:
    table: dict[str, dict[str, float]] = request.getfixturevalue(launch)["placements"]
    assert len(table) >= 15 and all(len(row) >= 25 for row in table.values())
    bad = {
        f"{name} | {case}": error
        for name, row in table.items()
        for case, error in row.items()
        if not error < LIMIT[name.split(" | ")[0]]
    }
    assert not bad


@BOTH
def test_every_way_to_shard_a_model_trains_it_as_one_process_does(launch: str, request: pytest.FixtureRequest) -> None:
    table: dict[str, float] = request.getfixturevalue(launch)["models"]
    assert len(table) >= 12
    assert not {name: error for name, error in table.items() if not error < LIMIT[name.split(" | ")[0]]}


@BOTH
def test_a_shard_is_rounded_to_the_bits_of_the_whole(launch: str, request: pytest.FixtureRequest) -> None:
    table: dict[str, list[str]] = request.getfixturevalue(launch)["rounding"]
    assert len(table) >= 4 and not {name: cases for name, cases in table.items() if cases}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kernel_averages_a_factor_to_the_same_bits(dtype: torch.dtype) -> None:
    """A rank whose part of a tensor is empty keeps the same copy of a factor as those whose kernel walks theirs."""
    pytest.importorskip("numba")
    from numba import njit

    from adafactor.kernels.cpu.native import factors

    average, store = factors._average, factors._store
    stat = {torch.float32: np.float32, torch.float64: np.float64}[dtype]

    @njit
    def compiled(new: Any, state: int, scratch: Any, beta2: float) -> None:
        average(new, state, 0, scratch, beta2, 1 - beta2, stat)
        store(new, state, 0, stat)

    generator = torch.Generator().manual_seed(0)
    for t in (1, 2, 5, 100):
        old = torch.rand(1001, generator=generator, dtype=dtype)
        new = torch.rand(1001, generator=generator, dtype=torch.float64)
        decay = 1 - t**-0.8
        ours = equations.average(old, new, decay, 1 - decay)
        compiled(new.numpy(), old.data_ptr(), np.empty(1001), decay)
        assert ours is not None and torch.equal(ours, new) and torch.equal(ours.to(dtype), old)


def same_everywhere(ranks: list[dict[str, Any]], key: str) -> Any:
    assert all(rank[key] == ranks[0][key] for rank in ranks)
    return ranks[0][key]


@BOTH
@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_a_nan_on_one_rank_is_skipped_by_all(launch: str, backend: str, request: pytest.FixtureRequest) -> None:
    ranks = request.getfixturevalue(launch)["faults"][f"nan skip {backend}"]
    assert same_everywhere(ranks, "message") == ""
    assert same_everywhere(ranks, "changed") == ["columns", "copies", "plain"]
    assert same_everywhere(ranks, "skipped") == {"rows": 1, "columns": 0, "vector": 1, "copies": 0, "plain": 0}
    same_everywhere(ranks, "bits")


@BOTH
@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_a_nan_on_one_rank_raises_on_all_before_anything_changes(
    launch: str, backend: str, request: pytest.FixtureRequest
) -> None:
    ranks = request.getfixturevalue(launch)["faults"][f"nan raise {backend}"]
    assert "FloatingPointError: the gradient of rows (shape (6, 5))" in same_everywhere(ranks, "message")
    assert same_everywhere(ranks, "changed") == []
    same_everywhere(ranks, "bits")


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_a_step_that_is_lost_between_its_reductions_changes_nothing_and_can_be_taken_again(
    launch: str, backend: str, kind: str, request: pytest.FixtureRequest
) -> None:
    ranks = request.getfixturevalue(launch)["faults"][f"lost {kind} {backend}"]
    assert same_everywhere(ranks, "message") == "RuntimeError: lost between the reductions"
    assert same_everywhere(ranks, "changed") == []
    assert same_everywhere(ranks, "continues")


@pytest.mark.slow
def test_pipeline_stages_may_have_parameters_and_settings_of_their_own(on_four: dict[str, Any]) -> None:
    assert all(rank["error"] < LIMIT["float64"] for rank in on_four["faults"]["stages"])


@BOTH
def test_a_parameter_without_a_gradient_anywhere_stays_as_it_was(launch: str, request: pytest.FixtureRequest) -> None:
    everything = ["rows", "columns", "vector", "copies", "plain"]
    ranks = request.getfixturevalue(launch)["faults"]["unused"]
    assert same_everywhere(ranks, "changed") == [everything[1:], [], everything]


def test_a_gradient_of_another_kind_than_its_parameter_is_refused(on_two: dict[str, Any]) -> None:
    assert all("plain is a Tensor, but its gradient a DTensor" in message for message in on_two["faults"]["other kind"])
