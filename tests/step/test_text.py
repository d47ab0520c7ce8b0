"""Arguments as trainers hand them over: as text from a command line or YAML, and those of torch's own optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adafactor import Adafactor

AS_TEXT: list[tuple[str, Any, Any]] = [
    ("lr", "1e-3", 1e-3),
    ("lr_decay", "None", None),
    ("lr_decay", "rsqrt", "rsqrt"),
    ("relative", "false", False),
    ("factored", "False", False),
    ("factored", "row", "row"),
    ("beta2", "none", None),
    ("eps", "1e-30,1e-3", (1e-30, 1e-3)),
    ("eps", "(1e-30, 1e-3)", (1e-30, 1e-3)),
    ("eps", ["1e-30", "1e-3"], [1e-30, 1e-3]),
    ("axes", "[1, 0]", [1, 0]),
    ("rounding", "'stochastic'", "stochastic"),
    ("seed", "7", 7),
]


@pytest.mark.parametrize(("name", "text", "value"), AS_TEXT, ids=[f"{n}={t}" for n, t, _ in AS_TEXT])
def test_a_value_given_as_text_is_read_where_schedulers_and_loggers_see_it(name: str, text: Any, value: Any) -> None:
    for optimizer in (
        Adafactor([torch.ones(2, 3)], **{name: text}),
        Adafactor([{"params": [torch.ones(2, 3)], name: text}]),
    ):
        group = optimizer.param_groups[0]
        assert group[name] == value and type(group[name]) is type(value)


def test_what_the_user_put_into_a_group_stays_text() -> None:
    assert Adafactor([{"params": [torch.ones(2)], "stage": "3"}]).param_groups[0]["stage"] == "3"


def test_groups_may_hold_what_torchs_optimizers_take() -> None:
    """As torchtitan makes them, with names beside the parameters."""
    p = torch.ones(2, 3, requires_grad=True)
    group = {"params": [p], "param_names": ["weight"], "fused": True, "foreach": False, "lr": 0.5}
    optimizer = Adafactor([group])
    p.grad = torch.ones(2, 3)
    optimizer.step()
    assert optimizer.report()[0].name == "weight" and bool((p < 1).all())
