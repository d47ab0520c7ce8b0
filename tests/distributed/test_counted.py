"""What a sharded step sends and keeps: two small all-reduces per sharded mesh dimension, as computed beforehand."""

from __future__ import annotations

from typing import Any

import pytest

from adafactor.core.factoring import find_factoring
from adafactor.planning.communication import fully_sharded, traffic

BOTH = pytest.mark.parametrize("launch", ["on_two", pytest.param("on_four", marks=pytest.mark.slow)])


@BOTH
def test_a_step_sends_what_the_layout_says(launch: str, request: pytest.FixtureRequest) -> None:
    counted: dict[str, Any] = request.getfixturevalue(launch)["counted"]
    cases = {name: case for name, case in counted.items() if name not in ("memory", "TP, sequence parallel")}
    assert len(cases) >= 2
    for name, case in cases.items():
        assert {operation for operation, _ in case["seen"]} == {"allreduce_.default"}, name
        assert len(case["seen"]) == case["collectives"], name
        assert sum(size for _, size in case["seen"]) == case["bytes"], name


def test_two_collectives_per_sharded_dimension_whatever_the_number_of_parameters(on_two: dict[str, Any]) -> None:
    case = on_two["counted"]["FSDP2"]
    assert case["parameters"] == 11 and case["collectives"] == 2


@pytest.mark.slow
def test_each_sharded_dimension_has_its_own_two(on_four: dict[str, Any]) -> None:
    assert on_four["counted"]["FSDP2 × TP 2×2"]["collectives"] == 4
    assert on_four["counted"]["HSDP 2×2"]["collectives"] == 2


def test_partial_gradients_share_one_more_collective(on_two: dict[str, Any]) -> None:
    case = on_two["counted"]["TP, sequence parallel"]
    assert len(case["seen"]) == 1 + case["collectives"]
    assert case["seen"][0][1] == 2 * 12 * 4  # the norm's weight and bias, 12 float32 each
    assert sum(size for _, size in case["seen"][1:]) == case["bytes"]


@BOTH
def test_extra_memory_is_a_small_multiple_of_the_sums(launch: str, request: pytest.FixtureRequest) -> None:
    memory = request.getfixturevalue(launch)["counted"]["memory"]
    assert memory["largest"] <= 20 * memory["sums"] < memory["shard"]


def test_the_traffic_of_a_matrix_is_one_axis_and_a_few_scalars() -> None:
    # C, mean(R), two flags, ΣU² and ΣX²
    assert fully_sharded([(1000, 300)], ranks=8).bytes == 8 * (300 + 1 + 2 + 2)
    assert fully_sharded([(1000,)], ranks=8).bytes == 8 * (2 + 2)
    assert fully_sharded([(1000, 300)], ranks=1).collectives == 0
    both = traffic([(find_factoring((1000, 300), "outer"), (0, 1))], (4, 2))
    assert both.collectives == 4 and both.per_dimension == (8 * (150 + 1 + 4), 8 * (250 + 1 + 4))
