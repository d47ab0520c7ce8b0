"""What the records say to whoever chooses settings: parts of docs/settings.md."""

from __future__ import annotations

from collections.abc import Callable

from lab import answer, claims, results
from lab.answer import beside_adam, decayed_difference, listed, span
from lab.claims import Finding, judge_all
from lab.presets import SCALES
from lab.results import FAILED, FAILS, HOLDS, TOO_FEW, UNDECIDED, Record, dev_loss, of_row, paired, test_bleu
from lab.rules import Claim


def pre_training(records: list[Record]) -> str:
    """The defaults, and what the records of O beside B say of changing them."""
    long, last, short = (beside_adam(records, *each) for each in (("long",), ("long", "last"), ("quarter",)))
    ends = answer.ENDS[long.verdict].removeprefix("ends ").removeprefix("is ")
    found = [f"{ends} Adam after 16,000 steps and a decay of the step size"] if long.loss.seeds else []
    found += [f"{answer.behind(last.bleu, ' BLEU')} without the decay"] if last.bleu.seeds else []
    found += [f"{answer.behind(short.loss)} in dev loss after 1,000 steps"] if short.loss.seeds else []
    measured = f" Measured, in small models: {listed(found)} ([details](reproduction.md))." if found else ""
    first = (
        "Start with the defaults (Algorithm 6), without warm-up and with nothing tuned. Paper: 25.5 BLEU (row O), "
        f"where Adam with warm-up has 25.4 (row B).{measured}\n"
    )
    lines = (first, _warm_up(records), _decay(records), _momentum(records), _embeddings(records))
    return "\n".join(line for line in lines if line)


def _warm_up(records: list[Record]) -> str:
    found = {scale: decayed_difference(records, scale, ("O", ours), ("O-", theirs))
             for scale, ours, theirs in (("quarter", 6.0, 3.0), ("small", 6.0, 3.0), ("long", 2.5, 2.5))}  # fmt: skip
    short = found.pop("quarter")
    if not short.high < 0:
        return ""
    others = [f"{loss.text()} in {SCALES[scale].steps:,} ({claims.count(loss.seeds)})"
              for scale, loss in found.items() if loss.seeds > 1]  # fmt: skip
    text = f"{short.text()} in 1,000 steps ({claims.count(short.seeds)})"
    text += f"; in longer runs {listed(others)}" if others else ""
    return f"- **In a run of about 1,000 steps, take warm-up and a step twice as large.** Measured in dev loss: {text}."


def _decay(records: list[Record]) -> str:
    """How much BLEU the decay to zero gains, from the lowest to the highest of the seeds."""
    gains = []
    for scale, *both in (("small", ("O-", 3.0), ("B", 6.0)), ("long", ("O-", 2.5), ("B", 5.0))):
        runs = [of_row(records, row, scale, multiplier) for row, multiplier in both]
        if all(runs):
            ours, theirs = (span([test_bleu(r, "decayed") - test_bleu(r) for r in some], 1) for some in runs)
            gains.append(f"{ours} BLEU in {SCALES[scale].steps:,} steps (Adam {theirs})")
    return (
        f"- **End with a decay of the step size to zero.** Measured: it gains {listed(gains)}. Runs of fewer than "
        "10,000 steps never reach 1/√t: use `lr_decay=None` and, for example, `CosineAnnealingLR(optimizer, "
        "T_max=steps)`."
    ) if gains else ""  # fmt: skip


def _momentum(records: list[Record]) -> str:
    found = _finding(records, lambda claim: (claim.pairs[0].first, claim.pairs[0].second) == ("O-", "P-"))
    if found is None or found.verdict == TOO_FEW:
        return ""
    told = {HOLDS: "none without warm-up", FAILS: "a gain without warm-up", UNDECIDED: "not decided"}[found.verdict]
    return (
        "- **`beta1=0.9` takes 1 to 4 bytes a parameter.** It gains, in the paper: nothing (row P 25.3 BLEU, O 25.5); "
        f"measured: {told} ([O beside P](reproduction.md#the-claims))."
    )


def _embeddings(records: list[Record]) -> str:
    found = _finding(records, lambda claim: claim.rule == "unit")
    return (
        "- **Keep relative steps.** Paper, Table 3: embeddings of another scale cost Adam 0.6 to 2.2 BLEU, Adafactor "
        f"0.2 to 1.2. Measured, from scaled to unit embeddings, in dev loss: {found.measured.rpartition(': ')[2]}."
    ) if found else ""  # fmt: skip


def _finding(records: list[Record], is_it: Callable[[Claim], bool]) -> Finding | None:
    return next((finding for claim, finding in judge_all(records) if is_it(claim)), None)


def no_warm_up(records: list[Record]) -> str:
    """Which rows learn without warm-up in the model that was chosen for it."""
    post = claims.pattern_losses(records, warm=False)
    if not post:
        return ""
    learn, mixed, fail = _sorted(post)
    parts = [f"{listed(learn)} learn in every seed"] if learn else []
    parts += [f"{listed(mixed)} in some"] if mixed else []
    parts += [f"{listed(fail)} in none"] if fail else []
    text = f"Measured in a post-norm model that was chosen because row A fails in it: rows {listed(parts)}"
    clipped = of_row(records, "I-", "pattern")
    if clipped and not claims.is_as_in_the_paper("I-", post["I-"]):
        worse = paired(of_row(records, "H-", "pattern"), clipped)
        text += (
            f". Against the paper `clip=2.0` (I) learns there; `clip=1.0` (H) minus it is {worse.text()} in dev loss"
        )
    text += " ([Table 2 here](reproduction.md#table-2-at-pattern-and-at-mini))."
    cold, warm = (results.mean(map(dev_loss, of_row(records, name, "small", 6.0))) for name in ("O-", "O"))
    if cold > warm + 0.5:
        text += " At six times the paper's step O needs warm-up, too"
        text += " ([its edge](reproduction.md#what-the-differences-look-like))."
    return text


def _sorted(losses: dict[str, list[float]]) -> tuple[list[str], list[str], list[str]]:
    """Rows that learn in every seed, in some, in none."""
    found: tuple[list[str], list[str], list[str]] = [], [], []
    for name, some in losses.items():
        failed = sum(loss > FAILED for loss in some)
        found[0 if failed == 0 else 2 if failed == len(some) else 1].append(name.rstrip("-"))
    return found
