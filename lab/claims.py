"""The paper's claims judged by their rules, with what the records say, and the answer in short."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab import results, rules, updates
from lab.results import (
    FAILED,
    FAILS,
    HOLDS,
    TOO_FEW,
    UNDECIDED,
    Difference,
    Record,
    dev_loss,
    final_loss,
    of_row,
    paired,
)
from lab.rows import ROWS, TABLE_2
from lab.rules import Claim, Pair

LEAST_SEEDS = 3
LEAST_STATE = 0.05  # of the second row's, below which a state counts as sublinear


@dataclass(frozen=True)
class Finding:
    """A verdict and what it rests on."""

    verdict: str
    measured: str
    other: str = ""  # what the other scale says
    is_contradicted: bool = False  # by the other scale


def judge_all(records: list[Record]) -> list[tuple[Claim, Finding]]:
    """Each claim of which there are runs, with its finding."""
    return [(claim, found) for claim in rules.claims() if (found := judge(claim, records))]


def judge(claim: Claim, records: list[Record]) -> Finding | None:
    """The finding on one claim by its rule; None without a run."""
    special = {"figure 1": _figure_1, "mechanism": _mechanism, "unit": _embeddings, "plain": _embeddings,
               "memory": _memory, "sides": _sides}  # fmt: skip
    if claim.rule in special:
        return special[claim.rule](claim, records)
    deciding = [deciding_difference(claim, pair, records) for pair in claim.pairs]
    if not any(found.seeds for found in deciding):
        return None
    verdicts = [_verdict(claim.rule, found) if found.seeds >= LEAST_SEEDS else UNDECIDED for found in deciding]
    beside = [other_difference(claim, pair, records) for pair in claim.pairs]
    others = [_verdict(claim.rule, found) for found in beside]
    verdict = _together(verdicts)
    if verdict == UNDECIDED and any(found.seeds < LEAST_SEEDS for found in deciding):
        verdict = TOO_FEW
    is_opposite = verdict in (HOLDS, FAILS) and any(map(_is_beyond_zero, deciding, beside))
    return Finding(
        verdict,
        _shown(claim.pairs, [pair.scale for pair in claim.pairs], deciding, verdicts),
        _shown(claim.pairs, [pair.other or "" for pair in claim.pairs], beside, others),
        is_opposite or {verdict, _together(others)} == {HOLDS, FAILS},
    )


def _is_beyond_zero(deciding: Difference, beside: Difference) -> bool:
    """Whether the whole second interval is on the other side of 0."""
    return beside.high < 0 < deciding.mean or deciding.mean < 0 < beside.low


def deciding_difference(claim: Claim, pair: Pair, records: list[Record]) -> Difference:
    """First minus second over the seeds that judge."""
    return _difference(claim, pair, pair.scale, [r for r in records if r["config"]["seed"] in pair.seeds])


def other_difference(claim: Claim, pair: Pair, records: list[Record]) -> Difference:
    """The same at the other scale, over all seeds that there are."""
    return _difference(claim, pair, pair.other or "", records)


def _difference(claim: Claim, pair: Pair, scale: str, records: list[Record]) -> Difference:
    steps = pair.multipliers or (None, None)
    first, second = (of_row(records, name, scale, m) for name, m in zip((pair.first, pair.second), steps, strict=True))
    return paired(first, second, lambda record: final_loss(record, claim.evaluation))


def _verdict(rule: str, found: Difference) -> str:
    return {"as good": found.as_good, "better": found.better, "alike": found.alike}[rule]()


def _together(verdicts: Sequence[str]) -> str:
    """Of several pairs: one that fails is enough to fail, and all have to hold."""
    return FAILS if FAILS in verdicts else HOLDS if set(verdicts) == {HOLDS} else UNDECIDED


def _shown(pairs: Sequence[Pair], scales: Sequence[str], found: Sequence[Difference], verdicts: Sequence[str]) -> str:
    """Differences with their scales and seeds; of many only how many hold, and those that do not."""
    there = [each for each in zip(pairs, scales, found, verdicts, strict=True) if each[2].seeds]
    if len(pairs) > 2 and there:
        rest = [f"{p.first} − {p.second} {d.text()}" for p, _, d, verdict in there if verdict != HOLDS]
        seeds = sorted({d.seeds for _, _, d, _ in there})
        text = f"`{scales[0]}`: {len(there) - len(rest)} of {len(pairs)} hold ({'/'.join(map(str, seeds))} seeds)"
        return text + (f"; not {', '.join(rest)}" if rest else "")
    lines = []
    for pair, scale, difference, _ in there:
        name = f"{pair.first.rstrip('-')} − {pair.second.rstrip('-')} " if len(pairs) > 1 else ""
        lines.append(f"`{scale}`: {name}{difference.text()} ({count(difference.seeds)})")
    return "\n".join(lines)


def count(seeds: int) -> str:
    """So many seeds, in words."""
    return f"{seeds} seed{'s' * (seeds != 1)}"


def _judging(claim: Claim, records: list[Record], name: str) -> list[Record]:
    pair = claim.pairs[0]
    return [r for r in of_row(records, name, pair.scale) if r["config"]["seed"] in pair.seeds]


def _figure_1(claim: Claim, records: list[Record]) -> Finding | None:
    """RMS(U) near 1 with fast decay, fluctuating with slow."""
    deviations, texts = [], []
    for name in (claim.pairs[0].first, claim.pairs[0].second):
        runs = _judging(claim, records, name)
        after = [[value for step, value in run["rms_update"]["values"] if step > run["steps"] / 10] for run in runs]
        deviations.append([statistics.pstdev(values) for values in after])
        if after:
            means = [statistics.mean(values) for values in after]
            texts.append(f"{name} {_range(means)}, deviation {_range(deviations[-1])} ({count(len(runs))})")
    fast, slow = deviations
    if not fast or not slow:
        return None
    verdict = HOLDS if min(slow) > max(fast) else FAILS if max(slow) < min(fast) else UNDECIDED
    is_enough = min(len(fast), len(slow)) >= LEAST_SEEDS
    return Finding(verdict if is_enough else TOO_FEW, f"`{claim.pairs[0].scale}`: " + "; ".join(texts))


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _mechanism(claim: Claim, records: list[Record]) -> Finding | None:
    """Large updates before the failure, and clipping as the cure."""
    first, second = (_judging(claim, records, name) for name in (claim.pairs[0].first, claim.pairs[0].second))
    verdict, text, seeds = updates.judge(first, second)
    return Finding(verdict, f"{text} ({count(seeds)})") if seeds else None


def _embeddings(claim: Claim, records: list[Record]) -> Finding | None:
    """How much more the first row's loss rises than the second's when embeddings are scaled otherwise."""
    runs = {
        (name, scheme): results.by_pair(results.select(records, "mini", False, embedding=scheme, row=name.rstrip("-")))
        for name in (claim.pairs[0].first, claim.pairs[0].second)
        for scheme in ("scaled", claim.rule)
    }
    common = sorted(set.intersection(*(set(found) for found in runs.values())))
    rises = [[final_loss(runs[name, claim.rule][key]) - final_loss(runs[name, "scaled"][key]) for key in common]
             for name in (claim.pairs[0].first, claim.pairs[0].second)]  # fmt: skip
    if not common:
        return None
    found = results.interval([ours - theirs for ours, theirs in zip(*rises, strict=True)])
    means = [results.mean(rise) for rise in rises]
    text = f"`mini`: {found.text()} ({count(found.seeds)}): O loses {means[0]:.2f}, Adam {means[1]:.2f}"
    return Finding(found.better() if found.seeds >= LEAST_SEEDS else UNDECIDED, text)


def _memory(claim: Claim, records: list[Record]) -> Finding | None:
    """Sublinear state, of which there is no noise."""
    sides = [_judging(claim, records, name)[:1] for name in (claim.pairs[0].first, claim.pairs[0].second)]
    if not all(sides):
        return None
    ours, theirs = (side[0]["state_bytes"] for side in sides)
    verdict = HOLDS if ours < LEAST_STATE * theirs else FAILS
    return Finding(verdict, f"`mini`: {ours:,} bytes, A {theirs:,}: {100 * ours / theirs:.1f} %")


def _sides(claim: Claim, records: list[Record]) -> Finding | None:
    """In how many rows of each model failing or learning is as in the paper."""
    found = as_in_the_paper(records)
    if not found:
        return None
    counts = [as_there for as_there, _, _ in found.values()]
    are_all_there = len(found) == len({pair.scale for pair in claim.pairs})
    verdict = FAILS if min(counts) <= 5 else HOLDS if are_all_there and min(counts) >= 8 else UNDECIDED
    return Finding(verdict, "\n".join(f"`{scale}`: {text_of_sides(*each)}" for scale, each in found.items()))


def as_in_the_paper(records: list[Record]) -> dict[str, tuple[int, int, list[str]]]:
    """Of each other model whose rows have two seeds: how many do as in the paper, of how many, and which do not."""
    found = {}
    pairs = [pair for claim in rules.claims() if claim.rule == "sides" for pair in claim.pairs]
    for scale in dict.fromkeys(pair.scale for pair in pairs):
        losses = {pair.first: [final_loss(run) for run in of_row(records, pair.first, scale)
                  if run["config"]["seed"] in pair.seeds] for pair in pairs if pair.scale == scale}  # fmt: skip
        if all(len(some) > 1 for some in losses.values()):
            against = [name.rstrip("-") for name, some in losses.items() if not is_as_in_the_paper(name, some)]
            found[scale] = len(losses) - len(against), len(losses), against
    return found


def text_of_sides(as_there: int, rows: int, against: Sequence[str]) -> str:
    """`8 of 10, not F, I`."""
    return f"{as_there} of {rows}" + (f", not {', '.join(against)}" if against else "")


def is_as_in_the_paper(name: str, losses: Sequence[float]) -> bool:
    """Whether a row fails or learns here as it does in the paper, where failing is below 1 BLEU."""
    row = ROWS[name.rstrip("-")]
    return ((row.cold if name.endswith("-") else row.warm) < 1) == (results.mean(losses) > FAILED)


def pattern_losses(records: list[Record], warm: bool) -> dict[str, list[float]]:
    """The final dev losses of rows A to P at `pattern`, in the order of the table, over all seeds."""
    names = [row.name + "-" * (not warm) for row in TABLE_2 if row.step != "sgd"]
    runs = {name: of_row(records, name, "pattern") for name in names}
    return {name: [final_loss(run) for run in found] for name, found in runs.items() if found}


def bleu_of_the_margin(records: list[Record]) -> float:
    """How much BLEU goes with the margin of the dev loss, by a line through the decayed runs of `long` and `small`."""
    runs = [
        r for scale in ("long", "small") for r in results.select(records, scale) if r.get("ways", {}).get("decayed")
    ]
    slope, _ = np.polyfit([dev_loss(r, "decayed") for r in runs], [results.test_bleu(r, "decayed") for r in runs], 1)
    return float(-slope * results.SAME_LOSS)
