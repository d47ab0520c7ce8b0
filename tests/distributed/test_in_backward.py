"""Steps inside backward are those after it: sharded by FSDP2 or tensor parallel, and as copies without a wrapper."""

from __future__ import annotations

from typing import Any

import pytest

from adafactor.backward import units
from tests.distributed.test_equal import BOTH, same_everywhere


@BOTH
def test_a_sharded_model_steps_inside_backward_to_the_bits_of_steps_after_it(
    launch: str, request: pytest.FixtureRequest
) -> None:
    """On more than two ranks the bits of a sum depend on what is summed beside it: there, units are compared."""
    found: dict[str, Any] = request.getfixturevalue(launch)["in_backward"]
    cases = {name: ranks for name, ranks in found.items() if name.startswith("equal | ")}
    assert len(cases) >= 10
    for name, ranks in cases.items():
        assert all(rank == ranks[0] for rank in ranks), name
        assert ranks[0]["together" if launch == "on_two" else "units"], name


@BOTH
def test_each_module_has_two_collectives_inside_backward_and_its_gradients_are_freed(
    launch: str, request: pytest.FixtureRequest
) -> None:
    for rank in request.getfixturevalue(launch)["in_backward"]["memory"]:
        inside, after = rank["inside"], rank["after"]
        assert inside["sent"] == {"backward": 8, "step": 0} and after["sent"] == {"backward": 0, "step": 2}
        assert inside["alive"] == 0 and 3 * inside["peak"] <= after["peak"]  # one of three blocks, and a root


MESSAGES = {
    "keep_gathered": "is still gathered after backward, as set_reshard_after_backward(False) has it",
    "twice": "a second gradient came for blocks.2.",
    "clip": "the gradient of gain is gone: step_in_backward has used and freed it",
    "load_anew": "state, parameters or settings changed on some ranks of a mesh and not on others",
}


@BOTH
def test_what_cannot_work_under_fsdp_says_so_on_all_ranks(launch: str, request: pytest.FixtureRequest) -> None:
    found: dict[str, Any] = request.getfixturevalue(launch)["in_backward"]
    for name, message in MESSAGES.items():
        assert all(message in said for said in found[f"refusal | {name}"]), name
    assert not any(found.get("refusal | go_on", []))


@BOTH
def test_the_norm_of_sharded_gradients_is_that_of_the_whole(launch: str, request: pytest.FixtureRequest) -> None:
    for rank in request.getfixturevalue(launch)["in_backward"]["limited"]:
        told, measured, reference = rank["norms"]
        assert told == pytest.approx(reference, rel=1e-6) and measured == pytest.approx(reference, rel=1e-6)


@BOTH
def test_copies_of_a_model_stay_equal_whatever_data_order_and_gradients_each_rank_has(
    launch: str, request: pytest.FixtureRequest
) -> None:
    """On two ranks also equal to the bits of a loop that averages every gradient alone after backward."""
    found: dict[str, Any] = request.getfixturevalue(launch)["copies"]
    cases = {name: ranks for name, ranks in found.items() if "packs" in name}
    assert len(cases) == 14
    for name, ranks in cases.items():
        inside = [rank["inside"] for rank in ranks]
        assert same_everywhere(inside, "steps") == [0, 4], name
        same_everywhere(inside, "bits")
        if launch == "on_two":
            assert inside[0]["bits"] == ranks[0]["after"]["bits"], name


@BOTH
def test_gradients_of_copies_are_freed_once_their_order_is_known(launch: str, request: pytest.FixtureRequest) -> None:
    found: dict[str, Any] = request.getfixturevalue(launch)["copies"]
    for rank in found["same order, packs of 256"]:
        assert 4 * rank["inside"]["peak"] < rank["after"]["peak"]
    for rank in found[f"same order, packs of {units.PACK}"]:  # one pack for the whole of this small model
        assert rank["inside"]["peak"] == rank["after"]["peak"]


DIFFERENCES = {
    "weights": "checksum of parameter 1, first.bias (shape (24,)), is ",
    "settings": "clip of parameter 0, first.weight (shape (24, 24)), is 1.0 on rank 0 but 2.0 on rank ",
    "rate": "lr of parameter 0, first.weight (shape (24, 24)), is 0.01 on rank 0 but 0.02 on rank ",
    "frozen": "requires_grad of parameter 9, norm.weight (shape (24,)), is True on rank 0 but False on rank ",
}


@BOTH
def test_copies_that_differ_are_refused_on_all_ranks(launch: str, request: pytest.FixtureRequest) -> None:
    found: dict[str, Any] = request.getfixturevalue(launch)["copies"]
    for name, message in DIFFERENCES.items():
        assert all(said.startswith(message) for said in found[f"refusal | {name}"]), name


@BOTH
def test_a_nan_in_one_copy_is_skipped_by_all(launch: str, request: pytest.FixtureRequest) -> None:
    ranks = request.getfixturevalue(launch)["copies"]["nan"]
    assert sum(same_everywhere(ranks, "skipped")) > 10
    same_everywhere(ranks, "bits")


@BOTH
def test_a_reentrant_checkpoint_of_a_copy_is_refused(launch: str, request: pytest.FixtureRequest) -> None:
    for said in request.getfixturevalue(launch)["copies"]["recomputed"]:
        assert said.startswith("a second gradient came for") and "use_reentrant=False" in said
