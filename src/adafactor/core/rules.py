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
        members: dict[str | None, list[Any]] = {pattern: [] for pattern in (None, *rules)}
        for item in group["params"]:
            if not isinstance(item, tuple):
                raise ValueError("rules go by the names of parameters: give model.named_parameters(), or groups of it")
            members[_rule_of(item[0], rules)].append(item)
        unmatched -= {pattern for pattern, items in members.items() if items}
        for pattern, items in members.items():
            if items:
                keywords = {} if pattern is None else rules[pattern]
                divided.append({**group, **keywords, "params": items, "rule": pattern or ""})
    if unmatched:
        raise ValueError(
            f"rules: no parameter is left for {', '.join(map(repr, sorted(unmatched)))}; the first match counts"
        )
    return divided


def _rule_of(name: str, rules: Rules) -> str | None:
    return next((pattern for pattern in rules if fnmatchcase(name, pattern)), None)


def _check_keywords(rules: Rules) -> None:
    if not isinstance(rules, Mapping):
        raise TypeError(f"rules={rules!r} must be a dict: of patterns of names, and the keywords for each")
    allowed = sorted(field.name for field in fields(Settings))
    for pattern, keywords in rules.items():
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"rules has the pattern {pattern!r}; it must be a text, such as '*.bias', and not empty")
        if not isinstance(keywords, Mapping):
            raise TypeError(f"rules[{pattern!r}]={keywords!r} must be a dict of keywords")
        for name in keywords.keys() - set(allowed):
            raise ValueError(
                f"rules[{pattern!r}] has {name!r}, which is not a keyword of a group: {', '.join(sorted(allowed))}"
            )
