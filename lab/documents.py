"""What the records say, for people: the answer in short, and the parts of docs/ that are written from the records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lab import claims, pictures, results, rules, tables
from lab.claims import judge_all
from lab.results import (
    FAILED,
    FAILS,
    HOLDS,
    SAME_LOSS,
    UNDECIDED,
    Difference,
    Record,
    mean,
    of_row,
    paired,
    test_bleu,
)
from lab.rows import ROWS

MARKS = "<!-- from the records: python -m lab report --documents -->\n", "<!-- end -->\n"
DOCS = Path(__file__).parents[1] / "docs"


def report(records: list[Record]) -> str:
    """One Markdown page of all that the records say."""
    made = [tables.of_claims(records), *tables.papers_own(records), *_every_table(records)]
    return "\n".join([f"# What the records say\n\n{answer(records)}\n", *(table.markdown() for table in made if table)])


def documents(records: list[Record]) -> dict[Path, str]:
    """What stands between the marks of each document: the answer and the claims, the tables, the advice."""
    first = [f"{answer(records)}\n"]
    if pictures.can_draw_pattern(records):
        first.append(f"![Table 2 of the paper beside the lab's losses, row by row]({pictures.PATTERN.name})\n")
    verdicts = tables.of_claims(records)
    first += [verdicts.markdown()] if verdicts else []
    every = {"reproduction.md": first, "settings.md": [advice(records)]}
    every["reproduction-tables.md"] = [table.markdown() for table in _every_table(records)]
    return {DOCS / name: "\n".join(parts) for name, parts in every.items()}


def _every_table(records: list[Record]) -> list[tables.Table]:
    found = [*(tables.comparison(records, scale) for scale in ("long", "small", "quarter"))]
    found += [tables.table_2(records), tables.other_models(records), tables.of_updates(records)]
    return [table for table in (*found, tables.table_3(records), tables.of_rules()) if table]


def answer(records: list[Record]) -> str:
    """The answer in short: Adafactor beside Adam, which rows fail, how many claims hold and which do not."""
    return "\n\n".join(part for part in (_first_claim(records), _pattern(records), _count(records)) if part)


@dataclass(frozen=True)
class Beside:
    """O without warm-up beside B with it: the verdict, the difference in dev loss, and both BLEU."""

    verdict: str
    loss: Difference
    bleu: Difference  # O's minus B's
    ours: float  # BLEU
    theirs: float


def beside_adam(records: list[Record], scale: str, way: str = "decayed") -> Beside:
    """What the first claim that compares O and B at a scale by these weights says.

    Raises:
        ValueError: there is no such claim.
    """
    for claim in rules.claims():
        pair = claim.pairs[0]
        if (pair.first, pair.second, pair.scale, claim.evaluation) == ("O-", "B", scale, way) and pair.multipliers:
            some = [record for record in records if record["config"]["seed"] in pair.seeds]
            ours = of_row(some, pair.first, scale, pair.multipliers[0])
            theirs = of_row(some, pair.second, scale, pair.multipliers[1])
            found = claims.judge(claim, records)
            scores = [mean(test_bleu(record, way) for record in side) for side in (ours, theirs)]
            return Beside(
                found.verdict if found else UNDECIDED,
                claims.deciding_difference(claim, pair, records),
                paired(ours, theirs, lambda record: test_bleu(record, way)),
                *scores,
            )
    raise ValueError(f"scale, way are {scale!r}, {way!r}: no claim compares O and B there")


def _first_claim(records: list[Record]) -> str:
    """Adafactor beside Adam: with the decay, without it, in short runs, and with a warm-up."""
    long, last = beside_adam(records, "long"), beside_adam(records, "long", "last")
    if not long.loss.seeds:
        return ""
    ends = {HOLDS: "ends level with", FAILS: "ends behind", UNDECIDED: "is not shown to be level with"}[long.verdict]
    text = (
        f"Adafactor without momentum or warm-up (row O) {ends} Adam with both (row B), by a rule set before the runs: "
        f"after 16,000 steps and a decay of the step size to zero its dev loss is {_higher(long.loss, 3)} "
        f"({long.loss.seeds} seeds; up to {SAME_LOSS:g}, here about {claims.bleu_of_the_margin(records):.0f} BLEU, "
        f"counts as level), its BLEU {long.ours:.1f} beside {long.theirs:.1f}. Without the decay, as in the paper, it "
        f"is {_behind(last.bleu, ' BLEU')}; the paper has it 0.1 ahead."
    )
    short = [f"{_behind(found.loss)} after {steps} steps" for scale, steps in (("small", "4,000"), ("quarter", "1,000"))
             if (found := beside_adam(records, scale)).loss.seeds]  # fmt: skip
    if short:
        text += f" In shorter runs, each row at its best step size, its dev loss is {_list(short)}"
        ours, theirs = (of_row(records, name, "quarter", 6.0) for name in ("O", "B"))
        warm = paired(ours, theirs, lambda record: results.final_loss(record, "decayed"))
        text += f"; with a warm-up, {_behind(warm)} after 1,000." if warm.seeds else "."
    largest = max(record["parameter_bytes"] for record in records) / 4e6
    return f"{text} The models have up to {largest:.1f} million parameters."


def _higher(loss: Difference, digits: int) -> str:
    return f"{abs(loss.mean):.{digits}f} ± {loss.half:.{digits}f} {'higher' if loss.mean >= 0 else 'lower'}"


def _behind(found: Difference, unit: str = "") -> str:
    """A difference in words: of losses, of which less is better or, with their unit, of BLEU."""
    is_behind, digits = (found.mean < 0, 1) if unit else (found.mean >= 0, 2)
    return f"{abs(found.mean):.{digits}f} ± {found.half:.{digits}f}{unit} {'behind' if is_behind else 'ahead'}"


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _pattern(records: list[Record]) -> str:
    """Which rows fail without warm-up and with it, beside the paper's."""
    if not pictures.can_draw_pattern(records):
        return ""
    losses, warm = (claims.pattern_losses(records, is_warm) for is_warm in (False, True))
    against = [_outcome(name, found) for name, found in losses.items() if not claims.is_as_in_the_paper(name, found)]
    text = (
        f"Without warm-up {len(losses) - len(against)} of {len(losses)} rows fail or learn as in the paper, in a "
        "post-norm model chosen so that row A fails and row N learns."
    )
    text += f" Against the paper {_list(against)}." if against else ""
    failed = [f"{name} fails in {times} of {len(found)} seeds" for name, found in warm.items()
              if (times := sum(loss > FAILED for loss in found)) and ROWS[name].warm >= 1]  # fmt: skip
    text += f" With warm-up, where only E fails in the paper, {_list(failed)} here." if failed else ""
    for claim, finding in judge_all(records):
        if claim.rule == "sides":
            counts = finding.measured.replace("\n", "; ")
            text += f" In two other post-norm models, selected for no row, so many do as in the paper: {counts}."
    return text


def _outcome(name: str, losses: list[float]) -> str:
    row, failed = ROWS[name.rstrip("-")], sum(loss > FAILED for loss in losses)
    how = "learns" if failed == 0 else f"fails in {failed} of {len(losses)} seeds"
    return f"{row.name} ({row.describe()}) {how}"


def _count(records: list[Record]) -> str:
    """How many claims have which verdict, of those whose runs are newer than the rule and of the others."""
    found = judge_all(records)
    if not found:
        return ""
    counts = []
    for is_new in (True, False):
        verdicts = [finding.verdict for claim, finding in found if (claim.known == "none") == is_new]
        counts.append([len(verdicts), *(verdicts.count(kind) for kind in (HOLDS, FAILS, UNDECIDED))])
    (new, *new_counts), (old, *old_counts) = counts
    text = (
        f"Of {new} claims of the paper that are judged by runs made after the rule was set, {new_counts[0]} hold, "
        f"{new_counts[1]} do not and {new_counts[2]} are not decided; of {old} for which runs were known when it was "
        f"set, {old_counts[0]} hold, {old_counts[1]} do not and {old_counts[2]} are not decided. All of this is of "
        "short runs of small models, and what is said of runs without warm-up is of a model selected to be unstable."
    )
    failing = [f"- {claim.claim}" for claim, finding in found if finding.verdict == FAILS]
    return text + ("\n\n**What the paper says and these runs do not:**\n\n" + "\n".join(failing) if failing else "")


def advice(records: list[Record]) -> str:
    """A line for whoever pre-trains, which follows from the records of O beside B."""
    long, last, short = (beside_adam(records, *each) for each in (("long",), ("long", "last"), ("quarter",)))
    ends = {HOLDS: "level with", FAILS: "behind", UNDECIDED: "not shown to be level with"}[long.verdict]
    return (
        "Start with the defaults (Algorithm 6), without warm-up and with nothing tuned. Paper: 25.5 BLEU (row O), "
        f"where Adam with warm-up has 25.4 (row B). Measured, in small models: {ends} Adam after 16,000 steps and a "
        f"decay of the step size, {_behind(last.bleu, ' BLEU')} without the decay, and {_behind(short.loss)} in dev "
        "loss after 1,000 steps ([details](reproduction.md)).\n"
    )
