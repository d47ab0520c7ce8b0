"""The paper's claims with their rules, as they stand in `claims.json`: data that is older than the runs it judges."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "claims.json"
# What claims take from the one before them in the list.
BEGUN = {
    "The same in": "Adafactor (O) does as well as Adam (B) in",
    "relieves that": "relieves the instability of A without warm-up",
    "relieves it": "relieves the instability of A without warm-up",
    "(I) does not: A": "(I) does not relieve the instability of A without warm-up: A",
}
STATED: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Pair:
    """Two rows, "-" after a name being without warm-up, with the scale and the seeds that decide between them."""

    first: str
    second: str
    scale: str
    other: str | None  # the scale that is shown beside
    seeds: tuple[int, ...]
    multipliers: tuple[float, float] | None = None  # of the paper's step size; None: the scale's


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and how it is judged here."""

    claim: str
    sentence: str
    section: str
    rule: str  # a key of the rules in `claims.json`
    evaluation: str  # the weights that decide: "last" or "decayed"
    known: str  # which of its runs were known when the rule was set: "none", "all" or some seeds
    set: str  # when that was
    pairs: tuple[Pair, ...]

    @property
    def place(self) -> str:
        """Where in the paper the sentence is."""
        return f"§{self.section}" if self.section[0].isdigit() else self.section

    @property
    def title(self) -> str:
        """The claim in words that need no other claim before them."""
        words = self.claim
        for begun, whole in BEGUN.items():
            words = words.replace(begun, whole)
        return words


def claims() -> list[Claim]:
    """All claims, in the order of the page."""
    return [_claim(**stated) for stated in STATED["claims"]]


def _claim(
    rows: list[tuple[str, str]],
    scale: str | list[str],
    other: str | list[str] | None,
    seeds: list[Any],
    multipliers: tuple[float, float] | None = None,
    **words: str,
) -> Claim:
    if words["rule"] == "sides":  # every row in every model
        pairs = [Pair(one, two, where, None, tuple(seeds)) for where in scale for one, two in rows]
    elif isinstance(other, list):  # each pair has its own scales and seeds
        parts = zip(rows, scale, other, seeds, strict=True)
        pairs = [Pair(one, two, where, beside, tuple(some)) for (one, two), where, beside, some in parts]
    else:
        pairs = [Pair(one, two, str(scale), other, tuple(seeds), multipliers) for one, two in rows]
    return Claim(**words, pairs=tuple(pairs))
