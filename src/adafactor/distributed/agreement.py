"""Whether all ranks step the same parameters in the same way: asked at the first step, and after a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from hashlib import sha256
from itertools import zip_longest
from typing import Any

from adafactor.core.contract import Parameter
from adafactor.core.settings import RATES, Settings
from adafactor.distributed.shard import Shard

ROUNDS = 3  # in a mesh of so many dimensions, all ranks then know what one of them has found
Facts = dict[str, Any]


def check_agreement(members: Sequence[tuple[Parameter, Shard]]) -> None:
    """Raise, on all ranks, unless they are about to step the same sharded parameters in the same way."""
    problem = ""
    # in an order that does not depend on the parameters, or two ranks could wait for each other in two groups
    groups = sorted({g for _, shard in members for g in shard.everyone}, key=lambda g: (g.ranks(), g.handle.group_name))
    for group in ROUNDS * groups:
        own = [_facts_of(parameter, shard) for parameter, shard in members if group in shard.everyone]
        answers = group.ask((sha256(repr(own).encode()).hexdigest(), problem))
        if len({digest for digest, _ in answers}) > 1:
            problem = _first_difference(group.ranks(), group.ask(own))
        problem = problem or next((text for _, text in answers if text), "")
    if problem:
        raise RuntimeError(
            f"{problem}: all ranks of a mesh need the same parameters in the same order, with the same settings and "
            "step, and gradients of the same ones; nothing was updated"
        )


def _facts_of(parameter: Parameter, shard: Shard) -> Facts:
    settings = {f.name: getattr(parameter.settings, f.name) for f in fields(Settings)}
    # machines of different kinds may compute a schedule with different last bits
    rates = {name: f"{settings[name]:.6g}" for name in RATES if isinstance(settings[name], float)}
    return {
        "parameter": f"{parameter.name} (shape {parameter.shape}, {parameter.x.dtype}, {shard.placements})",
        **settings,
        **rates,
        "step": int(parameter.state["step"]) if parameter.slices is None else None,  # each rank has its own slices'
        "gradient": getattr(parameter.p.grad, "placements", None),
    }


def _first_difference(ranks: list[int], lists: list[list[Facts]]) -> str:
    """The first fact that differs, and its value on two ranks."""
    for number, (first, *others) in enumerate(zip_longest(*lists, fillvalue={"parameter": "not there"})):
        for rank, other in zip(ranks[1:], others, strict=True):
            if first != other:
                key = next(key for key in first if first[key] != other.get(key))
                what = f"{key} of {first['parameter']}" if key != "parameter" else f"sharded parameter {number}"
                return f"{what} is {first[key]} on rank {ranks[0]} but {other.get(key)} on rank {rank}"
    return ""
