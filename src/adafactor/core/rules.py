"""Keywords by the names of parameters: the first pattern that matches a name decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

from torch.optim.optimizer import ParamsT

from adafactor.core.settings import Settings

Rules = Mapping[str, Mapping[str, Any]]  # pattern, as of file names → keywords


def divide_by_rules(params: ParamsT, rules: Rules) -> list[dict[str, Any]]:
    """Divide named parameters, or groups of them, by rules: the rest of a group first, then a group for each rule."""
    _check_keywords(rules)
    items: list[Any] = list(params)
    groups = items if all(isinstance(item, dict) for item in items) else [{"params": items}]
    divided, unmatched = [], set(rules)
    for group in groups:
        members: dict[str, list[Any]] = {pattern: [] for pattern in ("", *rules)}
        for item in group["params"]:
            if not isinstance(item, tuple):
                raise ValueError("rules go by the names of parameters: give model.named_parameters(), or groups of it")
            members[_rule_of(item[0], rules)].append(item)
        unmatched -= {pattern for pattern, items in members.items() if items}
        for pattern, items in members.items():
            if items:
                divided.append({**group, **rules.get(pattern, {}), "params": items, "rule": pattern})
    if unmatched:
        raise ValueError(
            f"rules: no parameter is left for {', '.join(map(repr, sorted(unmatched)))}; the first match counts"
        )
    return divided


def _rule_of(name: str, rules: Rules) -> str:
    return next((pattern for pattern in rules if fnmatchcase(name, pattern)), "")


def _check_keywords(rules: Rules) -> None:
    allowed = sorted(field.name for field in fields(Settings))
    for pattern, keywords in rules.items():
        for name in keywords.keys() - set(allowed):
            raise ValueError(
                f"rules[{pattern!r}] has {name!r}, which is not a keyword of a group: {', '.join(sorted(allowed))}"
            )
