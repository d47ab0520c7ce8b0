"""Whether all ranks step the same parameters in the same way, and in what they differ if not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from itertools import zip_longest
from typing import Any

from adafactor.core.contract import Parameter
from adafactor.core.settings import RATES, Settings
from adafactor.distributed.shard import Group, Shard

SWEEPS = 3  # of a question: in a mesh of three dimensions an answer has reached every rank after so many
SAME = "all ranks of a mesh need the same parameters in the same order, with the same settings and step"
ALONE = "state, parameters or settings changed on some ranks of a mesh and not on others"
Facts = dict[str, Any]  # what of a parameter must be the same on all ranks


@dataclass
class Agreement:
    """What the ranks last agreed on. It outlives a bucket.

    They ask each other at the first step. A rank where something has changed since then takes part in the first
    reduction of its next step with the sizes that the others expect, and says so in place of which gradients it has. So
    all of them know it at once, and steps between which nothing changes send nothing more.
    """

    shards: list[Shard] = field(default_factory=list)
    facts: list[Facts] | None = None  # one for each shard; None: never asked, or a state was loaded since


def facts_of(parameter: Parameter, shard: Shard) -> Facts:
    """What must be the same on all ranks, except for what may differ from step to step."""
    is_named = not parameter.name.startswith("parameter ")  # else it has a number
    settings = {f.name: getattr(parameter.settings, f.name) for f in fields(Settings) if f.name not in RATES}
    return {
        "name": parameter.name if is_named else None,
        "shape": parameter.shape,
        "dtype": str(parameter.x.dtype),
        "placements": str(shard.placements),
        **settings,
    }


def find_difference(
    members: list[tuple[Parameter, Shard]], facts: list[Facts], groups: list[Group], rates: Sequence[str] = ()
) -> str:
    """Ask all ranks of some groups for their facts, and say in what they differ, if they do."""
    problem = ""
    # in an order that does not depend on the parameters, or two ranks could wait for each other in two groups
    for group in SWEEPS * sorted(groups, key=lambda group: (group.ranks(), group.handle.group_name)):
        own = [
            {**known, **{key: rounded(getattr(p.settings, key)) for key in rates}, "step": _step_of(p)}
            for (p, shard), known in zip(members, facts, strict=True)
            if group in shard.everyone
        ]
        answers = group.ask((sha256(repr(own).encode()).hexdigest(), problem))
        if len({digest for digest, _ in answers}) > 1:
            difference = first_difference(group.ranks(), group.ask(own), "sharded parameter")
            problem = f"{difference}: {SAME}; nothing was updated"
        problem = problem or next((text for _, text in answers if text), "")
    return problem


def _step_of(parameter: Parameter) -> int | None:
    """t, which all ranks have; of slices, each rank has its own."""
    return int(parameter.state["step"]) if parameter.slices is None else None


def rounded(value: Any) -> Any:
    """A rate to six digits: machines of different kinds may compute a schedule with different last bits."""
    return value if value is None or isinstance(value, str) else float(f"{float(value):.6g}")


def first_difference(ranks: list[int], lists: list[list[Facts]], what: str) -> str:
    """The first fact that differs, and its value on two ranks; nothing where they agree."""
    for number, (first, *others) in enumerate(zip_longest(*lists)):
        for rank, other in zip(ranks[1:], others, strict=True):
            if first == other:
                continue
            which = f"{what} {number}"
            values = _called(first), _called(other)
            if first and other and first["name"] == other["name"]:
                key = next(key for key in first if first[key] != other[key])
                which, values = f"{key} of {which}, {_called(first)},", (repr(first[key]), repr(other[key]))
            return f"{which} is {values[0]} on rank {ranks[0]} but {values[1]} on rank {rank}"
    return ""


def _called(facts: Facts | None) -> str:
    return "not there" if facts is None else f"{facts['name'] or 'unnamed'} (shape {facts['shape']})"
