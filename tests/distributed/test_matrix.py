"""Pipelines, experts, ZeRO of torch, three-dimensional meshes, torch's state dicts with every option."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import found
from tests.distributed.test_equal import BOTH, same_everywhere


@BOTH
def test_a_state_continues_on_the_same_bits_through_every_option_of_torch(
    launch: str, request: pytest.FixtureRequest
) -> None:
    """But `flatten_optimizer_state_dict` with `full_state_dict`, which torch cannot set for AdamW either."""
    results: dict[str, Any] = request.getfixturevalue(launch)["matrix"]
    restored = {name: ranks for name, ranks in results.items() if name.startswith("state dict | ")}
    assert len(restored) == 6 and not {name: ranks for name, ranks in restored.items() if not all(ranks)}
    assert all(results["async_save"])


@BOTH
def test_a_zero_redundancy_optimizer_steps_as_one_process_does(launch: str, request: pytest.FixtureRequest) -> None:
    ranks = request.getfixturevalue(launch)["matrix"]["ZeroRedundancyOptimizer"]
    assert max(rank["error"] for rank in ranks) < 1e-12 and ranks[0]["count"] == 11
    same_everywhere(ranks, "bits")


@BOTH
def test_experts_keep_their_factors_to_themselves(launch: str, request: pytest.FixtureRequest) -> None:
    for rank in request.getfixturevalue(launch)["matrix"]["experts"]:
        assert rank["sent"] == [["allreduce_.default", 16]] * 2, "two numbers, twice, whatever the size of an expert"
        assert rank["error"] < 1e-12


@BOTH
@pytest.mark.parametrize("keywords", ["Algorithm 6", "row P", "stochastic", "raise"])
def test_slices_step_where_they_are_and_send_nothing(
    launch: str, keywords: str, request: pytest.FixtureRequest
) -> None:
    for rank in request.getfixturevalue(launch)["slices"][keywords]:
        assert rank["differs"] == [] and rank["sent"] == [] and rank["names"]
        assert rank["skipped"] == (0 if keywords == "raise" else 2)


@BOTH
def test_slices_go_with_what_is_reduced_and_through_torchs_state_dicts(
    launch: str, request: pytest.FixtureRequest
) -> None:
    results = request.getfixturevalue(launch)["slices"]
    for rank in results["among others"]:
        assert max(rank["errors"].values()) < 1e-12 and set(rank["steps"]) == {4}
    assert [rank["error"] for rank in results["FSDP2"]] == [0.0] * len(results["FSDP2"])
    shapes = {"step": [5], "row": [5, 4, 1], "col": [5, 1, 6], "momentum_of_update": [5, 4, 6]}
    assert all(rank["shapes"] == shapes for rank in results["FSDP2"])
    assert all("axis 1 of experts (shape (4, 6, 8)) is cut" in said for said in results["across"])


@BOTH
def test_a_stage_of_a_pipeline_steps_alone_and_not_inside_backward_under_fsdp(
    launch: str, request: pytest.FixtureRequest
) -> None:
    results: dict[str, Any] = request.getfixturevalue(launch)["matrix"]
    assert max(rank["error"] for rank in results["pipeline"]) < 1e-12
    for rank in results["pipeline with FSDP2"]:
        assert "came outside of any backward(), as a pipeline's schedule reduces it" in rank["said"]


@pytest.mark.slow
def test_a_mesh_of_three_dimensions() -> None:
    results = found(["cube"], ranks=8)["cube"]
    assert results["error"] < 1e-12
    assert all(rank["units"] for rank in results["inside"])
