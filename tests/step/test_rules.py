"""Keywords by the names of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor

Rules = dict[str, dict[str, Any]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7), "norm": nn.LayerNorm(4)})


def names_by_rule(optimizer: Adafactor) -> dict[str, list[str]]:
    return {group["rule"]: group["param_names"] for group in optimizer.param_groups}


def test_the_first_pattern_that_matches_decides() -> None:
    rules: Rules = {"*.bias": {"beta1": 0.9}, "norm.*": {"lr": 0.5}, "*embed*": {"factored": False}}
    optimizer = Adafactor(model().named_parameters(), lr=0.1, rules=rules)
    assert names_by_rule(optimizer) == {
        "": ["head.weight"],
        "*.bias": ["head.bias", "norm.bias"],
        "norm.*": ["norm.weight"],
        "*embed*": ["embed.weight"],
    }
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1, 0.5, 0.1]
    assert [group["beta1"] for group in optimizer.param_groups] == [0.0, 0.9, 0.0, 0.0]


def test_rules_divide_every_group_and_win_over_its_keywords() -> None:
    named = dict(model().named_parameters())
    groups = [
        {"params": [(name, p) for name, p in named.items() if p.ndim > 1], "lr": 0.2},
        {"params": [(name, p) for name, p in named.items() if p.ndim == 1], "lr": 0.3},
    ]
    optimizer = Adafactor(groups, rules={"head.*": {"lr": 0.4}})
    assert [(group["rule"], group["lr"], len(group["params"])) for group in optimizer.param_groups] == [
        ("", 0.2, 1), ("head.*", 0.4, 1), ("", 0.3, 2), ("head.*", 0.4, 1),
    ]  # fmt: skip


def test_the_report_names_the_rule_and_a_checkpoint_keeps_it() -> None:
    rules = {"norm.*": {"clip": 2.0}}
    optimizer, other = (Adafactor(model().named_parameters(), rules=rules) for _ in range(2))
    assert {r.name: r.rule for r in optimizer.report()}["norm.bias"] == "norm.*"
    assert {r.name: r.rule for r in optimizer.report()}["head.bias"] == ""
    other.load_state_dict(optimizer.state_dict())
    assert names_by_rule(other) == names_by_rule(optimizer)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"decoder.*": {"lr": 1.0}}, r"no parameter is left for 'decoder\.\*'"),
        ({"*": {"lr": 1.0}, "head.*": {"lr": 2.0}}, r"no parameter is left for 'head\.\*'; the first match counts"),
        ({"head.*": {"betas": (0.9, 0.99)}}, r"rules\['head\.\*'\] has 'betas', which is not a keyword of a group"),
        ({"head.*": {"lr": -1.0}}, "lr=-1.0 must be"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(rules: Rules, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Adafactor(model().named_parameters(), rules=rules)


def test_rules_need_names() -> None:
    with pytest.raises(ValueError, match="model.named_parameters"):
        Adafactor(model().parameters(), rules={"head.*": {"lr": 1.0}})


@pytest.mark.parametrize("rules", [{"": {"lr": 0.5}}, {"bias": None}, [("bias", {"lr": 1.0})], "bias"], ids=str)
def test_what_are_no_rules_is_refused_by_name(rules: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="rules"):
        Adafactor(nn.Linear(4, 4).named_parameters(), rules=rules)
