"""`studies.capacity`: the limit holds, and the search finds the largest model."""

from __future__ import annotations

import pytest
import torch

from studies.capacity import search
from studies.capacity.gpt import GPT, LENGTH, VOCABULARY, count, layers_of

LIMIT = 900 << 20


def test_a_model_that_does_not_fit_says_so_and_one_that_fits_learns() -> None:
    assert count(640) * 16 > LIMIT
    assert search.trial("adamw-float32", 640, LIMIT) == {"fits": False}
    small = search.trial("adafactor-bfloat16-backward", 32, LIMIT)
    assert small["fits"] and small["losses"][0] > small["losses"][1] > small["losses"][2]
    assert count(32) * 2 < small["peak_bytes"] < LIMIT and len(small["seconds"]) == 2


@pytest.mark.parametrize("start", [16, 1000, 1008, 4000])
@pytest.mark.parametrize("most", [16, 1007, 1008])
def test_the_search_ends_at_the_largest_width_that_fits(most: int, start: int) -> None:
    asked: list[int] = []

    def fits(width: int) -> bool:
        asked.append(width)
        return width <= most

    assert search.largest(fits, start) == most // 16 * 16
    assert len(asked) == len(set(asked)) <= 20 and all(width % 16 == 0 for width in asked)


def test_the_model_has_the_parameters_that_are_counted_and_guesses_at_first() -> None:
    for width in (16, 64, 304, 1600):
        model = GPT(width, torch.bfloat16, "meta")
        assert sum(p.numel() for p in model.parameters()) == count(width) and len(model.layers) == layers_of(width)
    loss = GPT(32, torch.bfloat16)(torch.arange(LENGTH + 1)).item()
    assert loss == pytest.approx(torch.tensor(VOCABULARY).log().item(), abs=0.1)


@pytest.mark.slow
def test_within_one_gibibyte_ours_trains_more_than_twice_the_parameters_of_adamw() -> None:
    base, ours = (search.search(key, 2**30) for key in ("adamw-float32", "adafactor-bfloat16-backward"))
    assert all(found["losses"][-1] < found["losses"][0] for found in (base, ours))
    assert ours["parameters"] > 2 * base["parameters"]
