"""Named recipes construct and step, and Table 2's rows are the oracle's; β₂ from a half-life."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor, recipes, schedules
from adafactor.core.settings import Settings
from tests import oracle
from tests.compare import arguments

RECIPES: dict[str, dict[str, Any]] = {name: getattr(recipes, name) for name in recipes.__all__ if name != "TABLE_2"}
PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_constructs_and_steps(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 128), nn.Linear(128, 40)).bfloat16()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Adafactor(model.named_parameters(), **RECIPES[name], backend="eager")
    for _ in range(3):
        model(torch.randn(8, 40).bfloat16()).square().mean().backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    is_lost = RECIPES[name].get("lr") == 4e-7  # bfloat16 rounds such steps off, as the recipe says
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)) or is_lost


def test_the_papers_recipe_is_the_defaults() -> None:
    assert Settings(**recipes.PAPER) == Settings()


@pytest.mark.parametrize("name", oracle.TABLE_2)
def test_a_row_of_table_2_is_the_oracles(name: str) -> None:
    ours, theirs = recipes.TABLE_2[name], arguments(oracle.TABLE_2[name])
    if not theirs["beta1"]:
        theirs["momentum_of"] = Settings.momentum_of  # which then says nothing
    assert recipes.TABLE_2.keys() == oracle.TABLE_2.keys() and Settings(**ours) == Settings(**theirs)


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_every_recipe_with_its_keywords(name: str) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    written = row.split("|")[2].strip().strip("`")
    keywords = {key: value for key, value in RECIPES[name].items() if value != getattr(Settings, key)}
    assert written == ", ".join(f"{key}={value!r}".replace("'", '"') for key, value in keywords.items())


def test_after_a_half_life_a_squared_gradient_weighs_half_as_much() -> None:
    assert schedules.beta2_from_half_life(13.5) ** 13.5 == pytest.approx(0.5)
    assert schedules.beta2_from_half_life(6.8e6, per_step=0.5e6) == pytest.approx(0.95, abs=1e-3)
    in_tokens = [schedules.beta2_from_half_life(1e7, per_step) for per_step in (2048, 4096)]
    assert in_tokens[0] ** 2 == pytest.approx(in_tokens[1])


def test_the_half_life_of_the_state_is_what_was_asked_for() -> None:
    p = torch.ones(6, requires_grad=True)
    optimizer = Adafactor([p], beta2=schedules.beta2_from_half_life(20), backend="eager")
    for g in [1.0] * 400 + [0.0] * 20:  # long enough for Adam's correction to be over
        p.grad = torch.full_like(p, g)
        optimizer.step()
    assert optimizer.state[p]["full"].mean().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(("name", "arguments"), [("half_life", (0.0,)), ("per_step", (10.0, float("nan")))])
def test_a_half_life_that_is_none_is_refused_by_name(name: str, arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* must be a finite number above 0"):
        schedules.beta2_from_half_life(*arguments)
