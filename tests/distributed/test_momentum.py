"""A sharded momentum in bfloat16 or int8 is that of one process, moves with checkpoints, and has whole blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import found
from tests.distributed.test_checkpoints import link
from tests.distributed.test_equal import BOTH, same_everywhere

FORMATS = pytest.mark.parametrize("format", ["bfloat16", "int8"])
# In float64 no sum of another order can move a number across a threshold; in float32 it may, rarely, and then the
# momentum is another neighbour, which shows in X.
LIMITS = {
    "float64": {"moved": 1e-12, "far": 0, "units": 1e-6, "flipped": 0, "scale": 1e-7},
    "float32": {"moved": 2e-2, "far": 1e-2, "units": 2, "flipped": 1e-3, "scale": 1e-4},
    "bfloat16": {"moved": 5e-2, "far": 1e-2, "units": 2, "flipped": 1e-3, "scale": 1e-4},
}


def beyond(figures: dict[str, Any], dtype: str) -> dict[str, float]:
    return {key: figures[key] for key, limit in LIMITS[dtype].items() if not figures[key] <= limit}


@BOTH
def test_every_placement_has_the_momentum_of_a_plain_tensor(launch: str, request: pytest.FixtureRequest) -> None:
    table: dict[str, Any] = request.getfixturevalue(launch)["momentum"]
    rows = {name: row for name, row in table.items() if name.startswith("placements | ")}
    assert len(rows) >= 8 and all(len(row) >= 18 for row in rows.values())
    for name, row in rows.items():
        for case, figures in row.items():
            assert not beyond(figures, name.split(" | ")[1]), f"{name} | {case}"


@BOTH
def test_shards_that_are_transposed_in_memory_have_it_too(launch: str, request: pytest.FixtureRequest) -> None:
    table: dict[str, Any] = request.getfixturevalue(launch)["momentum"]
    rows = {name: row for name, row in table.items() if name.startswith("turned | ")}
    assert len(rows) == 4
    for name, row in rows.items():
        assert not any(beyond(figures, "float64") for figures in row), name


@BOTH
def test_every_way_to_shard_a_model_has_the_momentum_of_one_process(
    launch: str, request: pytest.FixtureRequest
) -> None:
    table: dict[str, Any] = request.getfixturevalue(launch)["momentum"]
    rows = {name: row for name, row in table.items() if name.startswith("models | ")}
    assert len(rows) >= 12
    for name, row in rows.items():
        assert not beyond(row, name.split(" | ")[1]), name
        assert len(set(row["bits"])) == 1, f"{name}: replicas differ"


REFUSED = {"2": ["(7, 700) S1", "(24, 32, 3, 3) S2", "(24, 32, 3, 3) S3"]}
REFUSED["4"] = [*REFUSED["2"], "(4, 16, 256) S2"]


@BOTH
def test_shards_within_blocks_are_refused_by_name_on_all_ranks_and_nothing_else_is(
    launch: str, request: pytest.FixtureRequest
) -> None:
    refused: dict[str, list[str]] = request.getfixturevalue(launch)["momentum"]["refused"]
    for mesh, cases in REFUSED.items():
        if (mesh == "2") == (launch == "on_two"):
            assert [name.split(" | ")[1] for name in refused if name.startswith(f"{mesh} | ")] == cases
    for said in refused.values():
        assert len(set(said)) == 1 and said[0].startswith("layer.weight of shape (")
        assert "rules={'layer.weight': {'momentum_dtype': 'bfloat16'}}" in said[0]
    assert not any("(16, 512)" in case or "(3, 1536)" in case for case in refused)


@BOTH
def test_a_format_that_the_shards_refuse_in_mid_run_leaves_everything_as_it_was(
    launch: str, request: pytest.FixtureRequest
) -> None:
    ranks = request.getfixturevalue(launch)["momentum"]["switched"]
    assert "layer.weight of shape (16, 384) is sharded along axis 1" in same_everywhere(ranks, "message")
    assert same_everywhere(ranks, "unchanged") is True


def test_every_kind_of_checkpoint_keeps_every_format_and_none_is_loaded_into_another() -> None:
    table: dict[str, Any] = found(["momentum_checkpoints"], ranks=2)["momentum_checkpoints"]
    moves = {name: row for name, row in table.items() if name.startswith("moved | ")}
    assert len(moves) == 8
    for name, row in moves.items():
        assert row["error"] < 1e-12 and f"torch.{name.split()[-1]}" in row["dtypes"], name
    kept = {name: ranks for name, ranks in table.items() if name.startswith("kept | ")}
    assert len(kept) == 2 * 7 and all(all(ranks) for ranks in kept.values()), kept
    for name, key in {"int8 into bfloat16": "weight.momentum", "bfloat16 into int8": "weight.momentum_int8"}.items():
        for rank in table[name]:
            assert "Missing key" in rank["message"] and f"{key}." in rank["message"] and rank["unchanged"], name


@pytest.mark.slow
@FORMATS
def test_a_run_moves_over_2_4_and_1_ranks(format: str, tmp_path: Path) -> None:
    before = "-"
    for step, ranks in enumerate((2, 4, 1, 2)):
        link(ranks, "FSDP2", step, step + 1, before, tmp_path / str(step), MOMENTUM=format)
        before = str(tmp_path / str(step))
        assert json.loads((tmp_path / str(step) / "error.json").read_text()) < 1e-12, ranks
