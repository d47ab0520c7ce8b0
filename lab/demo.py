"""The demo's page: Adam and Adafactor side by side, what they cost and what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from sacrebleu.metrics.chrf import CHRF

from lab.charts import Chart, Line, frame
from lab.clean import Pair
from lab.evaluate import unpack
from lab.page import bars, charts, page
from lab.results import Record, dev_loss, test_bleu

NAMES = {"B": "Adam (row B, with warm-up)", "O": "Adafactor (row O, no warm-up)"}
STYLES = {"B": "c1", "O": "c0"}
SENTENCES = (
    "Inserts a new table into the document.",
    "Specifies the color of the selected object.",
    "Select the font for the selected text.",
)  # none of them is in the text it learns from
SHOWN = 9  # held-out sentences, from the worst to the best

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


def render(
    records: list[Record], say: dict[str, Callable[[str], str]], sentences: list[str], pairs: Sequence[Pair]
) -> str:
    """The page."""
    own = [(sentence, {row: translate(sentence) for row, translate in say.items()}) for sentence in sentences]
    said, ranks = held_out(records, pairs)
    count = len(unpack(records[0]["translations"])["decayed"])
    lead = " ".join(
        f"{NAMES[row]} ends at a dev loss of {dev_loss(r, 'decayed'):.2f} and {score(r)} BLEU with "
        f"{r['state_bytes']:,} bytes of state." for row, r in _by_row(records).items()
    )  # fmt: skip
    lead += f" {verdict(records)}"
    body = (
        f"<p>{escape(lead)}</p>{charts([_curves(records, False), _curves(records, True)])}"
        f"<h2>What it costs</h2>{_cost(records)}"
        f"<h2>What they say</h2>{''.join(_said(*one) for one in own)}"
        f"<h2>Held-out sentences, from the worst to the best</h2><p>Number {', '.join(map(str, ranks))} of {count} "
        "test sentences, ordered by how near both translations come to the reference (chrF).</p>"
        f"{''.join(_said(*one) for one in said)}"
        "<p>Translated with the weights after the step size has fallen to zero.</p>"
    )
    return page("Adam and Adafactor, side by side", body)


def _by_row(records: list[Record]) -> dict[str, Record]:
    return {record["config"]["row"]["name"]: record for record in records}


def _curves(records: list[Record], seconds: bool) -> str:
    lines = []
    for row, record in _by_row(records).items():
        scale = step_seconds(record) if seconds else 1.0
        lines.append(Line(NAMES[row], [(step * scale, float(loss)) for step, loss in record["curve"]], STYLES[row]))
    wide = max(x for line in lines for x, _ in line.points)
    height = frame([y for line in lines for x, y in line.points if x > wide / 50])
    label = "seconds of training, at each run's mean speed" if seconds else "step"
    return Chart(f"Training loss over {'seconds' if seconds else 'steps'}", label, "loss", (0, wide), height).svg(lines)


def step_seconds(record: Record) -> float:
    """The mean wall time of a step."""
    config = record["config"]["scale"]
    return float(record["train_seconds"] / (config["steps"] + config.get("branch", 0)))


def _cost(records: list[Record]) -> str:
    found = _by_row(records)
    most = max(r["state_bytes"] for r in found.values())
    slow = max(map(step_seconds, found.values()))
    sizes = [(NAMES[row], f"{r['state_bytes']:,} bytes", r["state_bytes"] / most, STYLES[row])
             for row, r in found.items()]  # fmt: skip
    times = [(NAMES[row], f"{1000 * step_seconds(r):.0f} ms", step_seconds(r) / slow, STYLES[row])
             for row, r in found.items()]  # fmt: skip
    weights = next(iter(found.values()))["parameter_bytes"]
    return (
        f"<p>Optimizer state, beside {weights:,} bytes of weights:</p>{bars(sizes)}"
        f"<p>A whole training step, forward and backward included:</p>{bars(times)}"
    )


def _said(sentence: str, texts: dict[str, str]) -> str:
    lines = [f"<p><b>{escape(sentence)}</b></p>"]
    for who, text in texts.items():
        name = {"B": "Adam", "O": "Adafactor"}.get(who, who)
        lines.append(f'<p><span class="who">{name}</span>{escape(text)}</p>')
    return f'<div class="pair">{"".join(lines)}</div>'
