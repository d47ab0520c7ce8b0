"""The demo's page: Adam and Adafactor side by side, what they cost and what they say."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape

from sacrebleu.metrics.chrf import CHRF

from lab.clean import Pair
from lab.evaluate import unpack
from lab.results import Record, dev_loss, test_bleu
from lab.style import OURS, styled

NAMES = {"B": "Adam (row B, with warm-up)", "O": "Adafactor (row O, no warm-up)"}
COLOURS = {"B": "#d9863d", "O": OURS}
SENTENCES = (
    "Inserts a new table into the document.",
    "Specifies the color of the selected object.",
    "Select the font for the selected text.",
)  # none of them is in the text it learns from
SHOWN = 9  # held-out sentences, from the worst to the best
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
p, table { max-width: 46rem; overflow-wrap: anywhere; }
.charts { display: flex; flex-wrap: wrap; } figure { flex: 1 1 20rem; margin: 0; }
svg { width: 100%; height: auto; } td, th { text-align: left; padding-right: 1.5em; }
.pair { border-left: 3px solid #8886; padding-left: .8rem; margin: 0 0 1rem; } .pair p { margin: .1rem 0; }
small { opacity: .7; margin-right: .5em; }
"""

Said = list[tuple[str, dict[str, str]]]  # a sentence, and what each row makes of it


def held_out(records: list[Record], pairs: Sequence[Pair]) -> tuple[Said, list[int]]:
    """Held-out sentences evenly from the worst to the best translated (chrF, the mean of all rows), and their ranks."""
    texts = {r["config"]["row"]["name"]: unpack(r["translations"])["decayed"] for r in records}
    metric = CHRF()
    count = len(next(iter(texts.values())))
    quality = [sum(float(metric.sentence_score(found[i], [pairs[i].german]).score) for found in texts.values())
               for i in range(count)]  # fmt: skip
    order = sorted(range(count), key=lambda i: quality[i])
    ranks = sorted({round(k * (count - 1) / (SHOWN - 1)) for k in range(SHOWN)})
    said = [(pairs[order[k]].english, {"reference": pairs[order[k]].german,
             **{row: found[order[k]] for row, found in texts.items()}}) for k in ranks]  # fmt: skip
    return said, [rank + 1 for rank in ranks]


def verdict(records: list[Record]) -> str:
    """Whether the two scores, as they are shown, differ by more than chance, in a sentence."""
    (first, mine), (second, theirs) = ((round(test_bleu(r, "decayed"), 1), _interval(r)) for r in records)
    noise = (mine**2 + theirs**2) ** 0.5
    told = "level within noise" if abs(first - second) <= noise else "further apart than noise"
    return (
        f"With {abs(first - second):.1f} BLEU between them, ± {noise:.1f}, the two are {told}; so short a run of one "
        "seed decides nothing. docs/reproduction.md tells what longer ones say."
    )


def score(record: Record) -> str:
    """Test BLEU with half its 95 % interval over the sentences."""
    return f"{test_bleu(record, 'decayed'):.1f} ± {_interval(record):.1f}"


def _interval(record: Record) -> float:
    return float(record["ways"]["decayed"]["bleu"]["test"]["interval"])


def render(records: list[Record], own: Said, pairs: Sequence[Pair], headline: Sequence[str]) -> str:
    """The page, from the runs, what they make of some sentences and the test set, and what longer runs say."""
    found = {record["config"]["row"]["name"]: record for record in records}
    said, ranks = held_out(records, pairs)
    lead = " ".join(
        f"{NAMES[row]} ends at a dev loss of {dev_loss(r, 'decayed'):.2f} and {score(r)} BLEU."
        for row, r in found.items()
    )
    cells = "".join(
        f"<tr><td>{NAMES[row]}<td>{r['state_bytes']:,} bytes<td>{1000 * step_seconds(r):.0f} ms</tr>"
        for row, r in found.items()
    )
    title = "Adam and Adafactor, side by side"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{escape(lead)} {escape(verdict(records))}</p>"
        f'<div class="charts">{_curves(found, False)}{_curves(found, True)}</div>'
        f"<h2>What it costs</h2><table><tr><th>optimizer<th>its state<th>a training step</tr>{cells}</table>"
        f"<p>The weights are {records[0]['parameter_bytes']:,} bytes.</p>"
        f"<h2>What longer runs say</h2><p>{escape(' '.join(headline))} "
        '<a href="../docs/reproduction.md">Claim by claim</a>; <a href="../README.md">what it is</a>.</p>'
        f"<h2>What they say</h2>{''.join(_said(*one) for one in own)}"
        f"<h2>Held-out sentences, from the worst to the best</h2><p>Number {', '.join(map(str, ranks))} of "
        f"{len(unpack(records[0]['translations'])['decayed'])} test sentences, ordered by how near both translations "
        f"come to the reference (chrF).</p>{''.join(_said(*one) for one in said)}"
        "<p>Translated with the weights after the step size has fallen to zero.</p></body></html>\n"
    )


@styled
def _curves(found: dict[str, Record], seconds: bool) -> str:
    """The training losses over steps or over seconds, drawn for light and dark pages."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.8), layout="constrained")
    axes = figure.subplots()
    for row, record in found.items():
        steps, losses = zip(*record["curve"], strict=True)
        scale = step_seconds(record) if seconds else 1.0
        axes.plot([step * scale for step in steps], losses, color=COLOURS[row], label=NAMES[row])
    axes.set_title(f"Training loss over {'seconds' if seconds else 'steps'}", fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False)
    axes.grid(axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    stream = io.StringIO()
    figure.savefig(stream, format="svg")
    drawn = stream.getvalue()
    return f"<figure>{drawn[drawn.index('<svg') :]}</figure>"


def step_seconds(record: Record) -> float:
    """The mean wall time of a step."""
    config = record["config"]["scale"]
    return float(record["train_seconds"] / (config["steps"] + config.get("branch", 0)))


def _said(sentence: str, texts: dict[str, str]) -> str:
    names = {"B": "Adam", "O": "Adafactor"}
    lines = (f"<p><small>{names.get(who, who)}</small>{escape(text)}</p>" for who, text in texts.items())
    return f'<div class="pair"><p><b>{escape(sentence)}</b></p>{"".join(lines)}</div>'
