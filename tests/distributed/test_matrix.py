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
