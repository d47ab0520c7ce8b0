"""The answer in sentences, each made of records: Adafactor beside Adam, which rows fail, how many claims hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab import claims, results, rules
from lab.claims import Finding, judge_all
from lab.experiments import ADAPTIVE, OTHER_MODELS
from lab.results import (
    FAILED,
    FAILS,
    HOLDS,
    SAME_LOSS,
    TOO_FEW,
    UNDECIDED,
    Difference,
    Record,
    mean,
    of_row,
    paired,
    test_bleu,
)
from lab.rows import ROWS
from lab.rules import Claim

ENDS = {HOLDS: "ends level with", FAILS: "ends behind", UNDECIDED: "is not shown to be level with"}
SHAPES = {"pattern-broad": "2 + 2 layers of width 128", "pattern-deep": "6 + 6 layers of width 64"}


@dataclass(frozen=True)
class Beside:
    """O without warm-up beside B with it: the verdict, the difference in dev loss, and both BLEU."""

    verdict: str
    loss: Difference
    bleu: Difference  # O's minus B's
    ours: float  # BLEU
    theirs: float


def beside_adam(records: list[Record], scale: str, way: str = "decayed", again: bool = False) -> Beside:
    """What the claim that compares O and B at a scale by these weights says; `again`: the second such claim."""
    found = [claim for claim in rules.claims() if claim.evaluation == way and claim.pairs[0].multipliers]
    claim = [claim for claim in found if claim.pairs[0].scale == scale][again]
    (pair,) = claim.pairs
    some = [record for record in records if record["config"]["seed"] in pair.seeds]
    steps = pair.multipliers or (None, None)
    ours, theirs = (of_row(some, row, scale, step) for row, step in zip((pair.first, pair.second), steps, strict=True))
    finding = claims.judge(claim, records)
    return Beside(
        finding.verdict if finding and finding.verdict != TOO_FEW else UNDECIDED,
        claims.deciding_difference(claim, pair, records),
        paired(ours, theirs, lambda record: test_bleu(record, way)),
        *(mean(test_bleu(record, way) for record in side) for side in (ours, theirs)),
    )


def headline(records: list[Record]) -> list[str]:
    """Three sentences for the first pages: in long runs, in short ones, and the claims."""
    long, last = beside_adam(records, "long"), beside_adam(records, "long", "last")
    seeds = claims.count(long.loss.seeds)
    first = (
        f"In small models Adafactor without momentum or warm-up {ENDS[long.verdict]} Adam with both after 16,000 steps "
        f"and a decay of the step size to zero (dev loss {_higher(long.loss, 3)}, {seeds}), and "
        f"is {behind(last.bleu, ' BLEU')} without the decay."
    )
    return [*[first] * bool(long.loss.seeds), *_short_runs(records), *_counted(judge_all(records))[:1]]


def answer(records: list[Record]) -> str:
    """The opening of the page, as paragraphs."""
    parts = [_first_claim(records), _pattern(records), " ".join(_counted(judge_all(records)))]
    failing = [f"- {claim.title}" for claim, finding in judge_all(records) if finding.verdict == FAILS]
    if failing:
        parts.append("**What the paper says and these runs do not:**\n\n" + "\n".join(failing))
    return "\n\n".join(part for part in parts if part)


def _first_claim(records: list[Record]) -> str:
    """Adafactor beside Adam: with the decay, without it, again with other seeds, in short runs; the size of models."""
    long, last, again = (beside_adam(records, "long", *each) for each in ((), ("last",), ("decayed", True)))
    if not long.loss.seeds:
        return ""
    text = (
        f"Adafactor without momentum or warm-up (row O) {ENDS[long.verdict]} Adam with both (row B), by a rule set "
        "before the runs: after 16,000 steps and a decay of the step size to zero its dev loss is "
        f"{_higher(long.loss, 3)} ({claims.count(long.loss.seeds)}; up to {SAME_LOSS:g}, here about "
        f"{claims.bleu_of_the_margin(records):.0f} BLEU, counts as level), its BLEU {long.ours:.1f} beside "
        f"{long.theirs:.1f}."
    )
    if again.loss.seeds:
        ends = {HOLDS: "again level", FAILS: "behind", UNDECIDED: "not decided"}[again.verdict]
        seeds = f"{claims.count(again.loss.seeds)} more, all on one text"
        text += f" With {seeds}, it is {_higher(again.loss, 3)}: {ends}."
    text += f" Without the decay, as in the paper, O is {behind(last.bleu, ' BLEU')}; the paper has it 0.1 ahead."
    short = _short_runs(records)
    largest = max(record["parameter_bytes"] for record in records) / 4e6
    return f"{text}\n\n{' '.join([*short, f'The models have up to {largest:.1f} million parameters.'])}"


def _short_runs(records: list[Record]) -> list[str]:
    """O beside B in runs of 4,000 and 1,000 steps, and what a warm-up makes of it."""
    found = [(beside_adam(records, scale).loss, steps) for scale, steps in (("small", "4,000"), ("quarter", "1,000"))]
    short = [f"{behind(loss)} after {steps} steps" for loss, steps in found if loss.seeds]
    if not short:
        return []
    warm = decayed_difference(records, "quarter", ("O", 6.0), ("B", 6.0))
    more = f"; with a warm-up, {behind(warm)} after 1,000" if warm.seeds else ""
    best = "each row at the best step size that was run three times on one text"
    return [f"In shorter runs, {best}, its dev loss is {listed(short)}{more}."]


def decayed_difference(
    records: list[Record], scale: str, first: tuple[str, float], second: tuple[str, float]
) -> Difference:
    """A row at a step size minus another in dev loss, over all pairs that there are."""
    ours, theirs = (of_row(records, row, scale, multiplier) for row, multiplier in (first, second))
    return paired(ours, theirs, lambda record: results.final_loss(record, "decayed"))


def _higher(loss: Difference, digits: int) -> str:
    return f"{_size(loss, digits)} {'higher' if loss.mean >= 0 else 'lower'}"


def behind(found: Difference, unit: str = "") -> str:
    """A difference in words: of losses, of which less is better or, with their unit, of BLEU."""
    is_behind, digits = (found.mean < 0, 1) if unit else (found.mean >= 0, 2)
    return f"{_size(found, digits)}{unit} {'behind' if is_behind else 'ahead'}"


def _size(found: Difference, digits: int) -> str:
    return found.text(digits).lstrip("+−")


def listed(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def span(values: Sequence[float], digits: int = 2) -> str:
    """The lowest and the highest."""
    low, high = (f"{value:.{digits}f}".replace("-", "−") for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def is_pattern_whole(records: list[Record]) -> bool:
    """Whether every row was run with and without warm-up."""
    return all(len(claims.pattern_losses(records, warm)) == len(ADAPTIVE) for warm in (True, False))


def _pattern(records: list[Record]) -> str:
    """Which rows fail without warm-up and with it, beside the paper's."""
    if not is_pattern_whole(records):
        return ""
    losses, warm = (claims.pattern_losses(records, is_warm) for is_warm in (False, True))
    against = [_outcome(name, found) for name, found in losses.items() if not claims.is_as_in_the_paper(name, found)]
    text = (
        f"Without warm-up {len(losses) - len(against)} of {len(losses)} rows fail or learn as in the paper, in a "
        "post-norm model chosen so that row A fails and row N learns."
    )
    text += f" Against the paper {listed(against)}." if against else ""
    mixed = [_outcome(name, found) for name, found in losses.items()
             if claims.is_as_in_the_paper(name, found) and len({loss > FAILED for loss in found}) > 1]  # fmt: skip
    text += f" In the mean as in the paper, but not in every seed: {listed(mixed)}." if mixed else ""
    failed = [f"{name} fails in {times} of {len(found)} seeds" for name, found in warm.items()
              if (times := sum(loss > FAILED for loss in found)) and ROWS[name].warm >= 1]  # fmt: skip
    text += f" With warm-up, where only E fails in the paper, {listed(failed)} here." if failed else ""
    counts = claims.as_in_the_paper(records)
    others = [f"{SHAPES[scale]}: {claims.text_of_sides(*counts[scale])}" for scale in OTHER_MODELS if scale in counts]
    return text + (
        f" In other post-norm models, selected for no row, so many do ({'; '.join(others)})." if others else ""
    )


def _outcome(name: str, losses: list[float]) -> str:
    row, failed = ROWS[name.rstrip("-")], sum(loss > FAILED for loss in losses)
    how = "learns" if failed == 0 else f"fails in {failed} of {len(losses)} seeds"
    return f"{row.name} ({row.describe()}) {how}"


def _counted(found: Sequence[tuple[Claim, Finding]]) -> list[str]:
    """How many claims have which verdict: of those whose runs are newer than the rule, then of the others."""
    judged = [each for each in found if each[1].verdict != TOO_FEW]
    new, known = ([each for each in judged if (each[0].known == "none") == is_new] for is_new in (True, False))
    sentences = []
    if new:
        dates = listed(sorted({claim.set for claim, _ in new}))
        cold = sum(claim.pairs[-1].scale in ("pattern", "updates") for claim, _ in new)
        selected = f"{cold} of the {len(new)} {_are(cold)} of runs without warm-up, in a model selected to fail"
        sentences.append(
            f"Of {_number(new)} of the paper that {_are(len(new))} judged by runs newer than the rule ({dates}) "
            f"{verdicts(new)}; {selected}; all runs are "
            "short, and no interval is corrected for the number of claims."
        )
    if known:
        sentences.append(f"Of {_number(known)} judged by runs that were known when the rule was set {verdicts(known)}.")
    return sentences


def _number(found: Sequence[object]) -> str:
    return f"{len(found)} claim{'s' * (len(found) != 1)}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def verdicts(found: Sequence[tuple[Claim, Finding]]) -> str:
    """`9 hold, 1 does not and 3 are not decided`."""
    holds, fails, rest = (sum(f.verdict == kind for _, f in found) for kind in (HOLDS, FAILS, UNDECIDED))
    words = f"{holds} hold{'s' * (holds == 1)}, {fails} do{'es' * (fails == 1)} not"
    return f"{words} and {rest} {_are(rest)} not decided"
