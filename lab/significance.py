"""Paired bootstrap between the translations of two runs (sacrebleu's), in all and per domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from lab.clean import Pair
from lab.evaluate import by_domain, unpack
from lab.results import Record


def paired(first: Record, second: Record, pairs: Sequence[Pair], way: str) -> list[dict[str, Any]]:
    """BLEU of both and the p-value of their difference: of all test sentences, then of each domain."""
    texts = [unpack(record["translations"])[way] for record in (first, second)]
    count = min(map(len, texts))
    pairs = pairs[:count]
    found = []
    for domain, indices in {"all": list(range(count)), **by_domain(pairs)}.items():
        systems: list[tuple[str, Any]] = [
            (name, [text[i] for i in indices]) for name, text in zip(("second", "first"), texts[::-1], strict=True)
        ]
        test: Any = PairedTest(systems, {"BLEU": BLEU()}, [[pairs[i].german for i in indices]], test_type="bs")
        theirs, ours = test()[1]["BLEU"]
        found.append({"domain": domain, "way": way, "first": first["name"], "second": second["name"],
                      "bleu": [round(ours.score, 2), round(theirs.score, 2)], "p": round(ours.p_value, 4)})  # fmt: skip
    return found


def differences(records: list[Record], pairs: Sequence[Pair], way: str) -> list[str]:
    """Lines for the terminal: every other run against the first, where both have translations."""
    kept = [record for record in records if "translations" in record]
    lines = []
    for other in kept[1:]:
        one = paired(other, kept[0], pairs, way)[0]
        lines.append(
            f"{one['first']} − {one['second']}: {one['bleu'][0] - one['bleu'][1]:+.2f} BLEU, p = {one['p']:.3f}"
        )
    return lines
