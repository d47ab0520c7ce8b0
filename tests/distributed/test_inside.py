"""The diagnostics of a sharded run are those of the whole, the same on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import found


@pytest.mark.slow
def test_every_rank_of_a_sharded_run_is_told_what_one_process_is_told() -> None:
    results: dict[str, Any] = found(["inside"], ranks=2)["inside"]
    assert results.keys() == {"relative", "absolute"}
    for kind, result in results.items():
        alone, (first, *others) = result["alone"], result["ranks"]
        assert all(other == first for other in others), kind
        for record, expected in zip(first["records"], alone["records"], strict=True):
            assert record.keys() == expected.keys()
            for name, value in expected.items():
                # of an absolute step one process has RMS(Xₜ) and a sharded run RMS(Xₜ₋₁): a step apart
                apart = kind == "absolute" and name in ("rms_parameter", "relative_change")
                assert record[name] == pytest.approx(value, rel=0.5 if apart else 1e-6), (kind, name)
        assert first["words"] == alone["words"], kind
    assert "overwritten" in [kind for kind, _ in results["absolute"]["alone"]["words"]], "something is said"
