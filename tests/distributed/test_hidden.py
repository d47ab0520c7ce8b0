"""What a write to a shard between two steps does: docs/distributed.md tells it, where something fails."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.hidden import WAYS, WRITES
from tests.distributed.test_equal import BOTH

UNSEEN = {"auto | through_data_of_part | scale_light_line", "auto | through_numpy | scale_light_line"}


@BOTH
def test_a_write_unseen_by_torch_to_a_light_line_makes_one_step_as_long_as_before_it(
    launch: str, request: pytest.FixtureRequest
) -> None:
    """RMS(X) is that of before the write, once, and the step has exactly that share of its right length everywhere."""
    found: dict[str, Any] = request.getfixturevalue(launch)["hidden"]
    for case in UNSEEN:
        for rank in found[case]:
            assert rank["after"] > 1.2 * rank["before"]
            assert rank["used"] == pytest.approx(rank["before"], rel=1e-9)
            ratio = pytest.approx(rank["before"] / rank["after"], rel=1e-6)
            assert rank["shortest"] == ratio and rank["longest"] == ratio
            assert rank["next"] == pytest.approx(rank["then"], rel=1e-9)


@BOTH
def test_every_other_write_is_seen_before_the_next_step(launch: str, request: pytest.FixtureRequest) -> None:
    """Any that torch counts, `p.data` of the DTensor among them; the heaviest lines; a new tensor; all with `eager`."""
    found: dict[str, Any] = request.getfixturevalue(launch)["hidden"]
    assert len(found) == 2 * len(WAYS) * len(WRITES)
    for case in found.keys() - UNSEEN:
        for rank in found[case]:
            assert rank["after"] > 1.2 * rank["before"], case
            assert rank["used"] == pytest.approx(rank["after"], rel=1e-9), case
            assert rank["shortest"] == pytest.approx(1.0, rel=1e-6), case
            assert rank["longest"] == pytest.approx(1.0, rel=1e-6), case
            assert rank["next"] == pytest.approx(rank["then"], rel=1e-9), case
