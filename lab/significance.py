"""Paired bootstrap between the translations of two runs (sacrebleu's), in all and per domain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from lab.clean import Pair
from lab.evaluate import by_domain, unpack
from lab.files import write_text
from lab.results import Record, at_best
from lab.tables import WAY_NAMES, Table
from lab.train import WAYS

KEPT = Path(__file__).parent / "significance.json"
COMPARISONS = (("O", "B"), ("O+", "B"), ("P", "B"), ("O", "P"))


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


def compute(records: list[Record], pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """All comparisons of the headline: each scale, each seed, each way to evaluate."""
    found = []
    for scale, (one, other) in product(("small", "quarter"), COMPARISONS):
        seeds = [{r["config"]["seed"]: r for r in at_best(records, row, scale) if "translations" in r}
                 for row in (one, other)]  # fmt: skip
        for seed in sorted(seeds[0].keys() & seeds[1].keys()):
            for way in WAYS:
                found += paired(seeds[0][seed], seeds[1][seed], pairs, way)
    return found


def keep(found: list[dict[str, Any]], path: Path = KEPT) -> None:
    """Write the results, one a line, where the report finds them."""
    lines = ",\n".join(json.dumps(one) for one in found)
    write_text(path, f"[\n{lines}\n]\n")


def table(path: Path = KEPT) -> Table | None:
    """The kept results: a row for each pair of runs and way, a column for each domain."""
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in found:
        difference = one["bleu"][0] - one["bleu"][1]
        text = f"{difference:+.1f} (p {one['p']:.3f})".replace("-", "−")
        rows.setdefault((one["first"], one["second"], one["way"]), {})[one["domain"]] = text
    domains = list(dict.fromkeys(one["domain"] for one in found))
    cells = [[f"{a} − {b}", WAY_NAMES[way], *(by.get(d, "–") for d in domains)] for (a, b, way), by in rows.items()]
    note = (
        "The difference in BLEU between two runs of the same seed, and the chance of as large a one if both were "
        "equally good: sacreBLEU's paired bootstrap over the test sentences, 1,000 resamples. It tells two trained "
        "models apart, not two optimizers: for that there are the seeds."
    )
    return Table("Significance, run by run", note, ["runs", "weights", *domains], cells, 2) if cells else None


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
