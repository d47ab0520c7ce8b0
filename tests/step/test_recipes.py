"""Named recipes construct and step, and are what `like` makes of their sources' arguments; β₂ from a half-life."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import adafactor
from adafactor import Adafactor, recipes, schedules
from adafactor.core.settings import Settings

RECIPES: dict[str, dict[str, Any]] = {name: getattr(recipes, name) for name in recipes.__all__}
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


FROM: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("T5", "t5x", {"learning_rate": 1e-3}, {"min_factored", "weight_decay_by"}),
    (
        "T5_TRANSFORMERS",
        "transformers",
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False},
        {"axes", "weight_decay_by"},
    ),
    (
        "PALM",
        "t5x",
        {"learning_rate": 1e-2, "beta1": 0.9, "factored": False, "weight_decay_rate_lr_exponent": 2},
        {"lr_decay", "min_factored"},  # its lr is a schedule there
    ),
    ("BIG_VISION", "timm_bv", {"lr": 1e-3, "min_dim_size_to_factor": 32}, set()),
]


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
@pytest.mark.parametrize(("name", "source", "arguments", "besides"), FROM, ids=[case[0] for case in FROM])
def test_a_recipe_is_what_like_makes_of_its_sources_arguments(
    name: str, source: str, arguments: dict[str, Any], besides: set[str]
) -> None:
    p = [("p", torch.ones(4, 3, requires_grad=True))]
    ours, like = (
        Settings.of(o.param_groups[0]) for o in (Adafactor(p, **RECIPES[name]), adafactor.like(source, p, **arguments))
    )
    assert {f.name for f in fields(Settings) if getattr(ours, f.name) != getattr(like, f.name)} == besides


def test_the_papers_recipe_is_the_defaults() -> None:
    assert Settings(**recipes.PAPER) == Settings()


def test_palms_weight_decay_is_the_square_of_its_learning_rate() -> None:
    rates = [Settings(**recipes.PALM).rates(t) for t in (1, 10_000, 40_000)]
    assert [rate.decay for rate in rates] == pytest.approx([1e-4, 1e-4, 2.5e-5])


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
