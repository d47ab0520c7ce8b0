"""Any set of recorded runs side by side: a table for the terminal, a page with their curves, a test of their BLEU."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from itertools import cycle
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from lab import results, tables
from lab.clean import Pair
from lab.evaluate import unpack
from lab.page import charts, html, page
from lab.report import curves, ways_chart
from lab.results import Record
from lab.tables import Table
from lab.train import WAYS

Groups = dict[str, list[Record]]


def group(records: list[Record], wanted: list[str], scale: str) -> Groups:
    """Runs by setting, their seeds together: `wanted` are rows at a scale, or names of runs, with `*` if you like."""
    found: Groups = {}
    for name in wanted:
        runs = results.select(records, scale, row=name)
        for run in runs or [record for record in records if fnmatch(record["name"], name)]:
            label = run["name"].rpartition("-s")[0]
            if run not in found.setdefault(label, []):
                found[label].append(run)
    return found


def table(records: list[Record], groups: Groups) -> Table:
    """A line for each setting."""
    rows = []
    for label, runs in groups.items():
        scales = {run["config"]["scale"]["name"] for run in runs}
        cells = [label, tables.count_seeds(runs)]
        for bleu in (False, True):
            for way in WAYS:
                cells.append(tables.over_seeds(runs, results.noise(records, scales, way, bleu, of=runs), way, bleu))
        rows.append([*cells, f"{runs[0]['state_bytes']:,}"])
    heads = ["runs", "seeds", *(f"{what} {way}" for what in ("loss", "BLEU") for way in WAYS)]
    return Table("Comparison", "", [*heads, "state bytes"], rows)


def draw(records: list[Record], groups: Groups) -> str:
    """The page."""
    styles = dict(zip(groups, cycle(["c1", "c0", "c3", "c2", "c4", "faint"]), strict=False))
    drawn = [curves("Training loss", groups, styles)]
    drawn += [ways_chart(records, groups, styles, bleu) for bleu in (False, True)]
    return page("Runs compared", charts(drawn) + html(table(records, groups)))


def significance(records: list[Record], pairs: Sequence[Pair], way: str) -> list[str]:
    """Lines for the terminal: sacreBLEU's paired bootstrap of every other run's translations against the first's."""
    texts = {record["name"]: unpack(record["translations"])[way] for record in records if "translations" in record}
    count = min(map(len, texts.values()), default=0)
    references = [[pair.german for pair in pairs[:count]]]
    base, lines = next(iter(texts), ""), []
    for other in list(texts)[1:]:
        systems: list[tuple[str, Any]] = [(name, texts[name][:count]) for name in (base, other)]
        test: Any = PairedTest(systems, {"BLEU": BLEU()}, references, test_type="bs")
        theirs, ours = test()[1]["BLEU"]
        lines.append(f"{other} − {base}: {ours.score - theirs.score:+.2f} BLEU, p = {ours.p_value:.3f}")
    return lines
