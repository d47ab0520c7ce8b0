"""The paper's claims, each with what the records say and a verdict that the intervals decide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from lab import results
from lab.results import FAILS, HOLDS, SAME_BLEU, SAME_LOSS, UNDECIDED, Difference, Record
from lab.tables import Table, number
from lab.train import WAYS

Finding = tuple[str, str]  # what was measured, and the verdict
Work = Callable[["Mini"], Finding]


@dataclass(frozen=True)
class Mini:
    """Records at `mini` and `hard`, with the noise of each."""

    records: list[Record]

    def runs(self, name: str, scale: str = "mini", multiplier: float | None = None) -> list[Record]:
        """The runs of `A` (with warm-up) or `A-` (without)."""
        row, warm = name.rstrip("-"), not name.endswith("-")
        found = results.select(self.records, scale, row=row, warmup=warm)
        return [r for r in found if multiplier in (None, r["config"]["multiplier"])]

    def minus(self, first: str, second: str, scale: str = "mini", multiplier: float | None = None) -> Difference:
        """Dev loss of the first minus that of the second."""
        ours, theirs = self.runs(first, scale, multiplier), self.runs(second, scale, multiplier)
        # where the step size is swept, another one has other noise: none where all fail
        alike = [r for r in self.records if multiplier in (None, r["config"]["multiplier"])]
        return results.difference(ours, theirs, results.noise(alike, (scale,), of=[*ours, *theirs]))

    def loss(self, name: str) -> float:
        """The mean dev loss at `mini`."""
        return results.mean(results.dev_loss(r) for r in self.runs(name))


def together(*verdicts: str) -> str:
    """Of the parts of a claim: all have to hold; one that fails is enough."""
    return FAILS if FAILS in verdicts else UNDECIDED if UNDECIDED in verdicts else HOLDS


def shown(name: str, difference: Difference) -> str:
    """A difference with its name and its seeds."""
    return f"{name} {difference} ({difference.seeds} seed{'s' * (difference.seeds != 1)})"


def as_good(first: str, second: str) -> Work:
    """The first does as well as the second, at `mini`."""

    def work(mini: Mini) -> Finding:
        found = mini.minus(first, second)
        return shown(f"{named(first)} − {named(second)}", found), found.as_good(SAME_LOSS)

    return work


def better(first: str, second: str, scale: str = "mini", multiplier: float | None = None) -> Work:
    """The first does better than the second."""

    def work(mini: Mini) -> Finding:
        found = mini.minus(first, second, scale, multiplier)
        where = "" if scale == "mini" else f"at `{scale}`, ×{multiplier:g}, "
        return shown(f"{where}{named(first)} − {named(second)}", found), found.better(SAME_LOSS)

    return work


def named(name: str) -> str:
    """A row as it stands in a table."""
    return f"{name[:-1]} without warm-up" if name.endswith("-") else f"{name} with warm-up"


def rms_update(mini: Mini) -> Finding:
    """RMS(U) near 1 with fast decay, fluctuating with slow."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in ("G", "A"):
        for run in mini.runs(row):
            values = [value for step, value in run["rms_update"]["values"] if step > run["steps"] / 10]
            found.setdefault(row, []).append((statistics.mean(values), statistics.pstdev(values)))
    if len(found) < 2:
        return "no runs", UNDECIDED
    text = "; ".join(f"{row}: " + ", ".join(f"{m:.2f} ± {s:.2f}" for m, s in pairs) for row, pairs in found.items())
    fast, slow = ([s for _, s in found[row]] for row in ("G", "A"))
    return f"mean ± deviation over the steps after the first tenth, by seed. {text}", (
        HOLDS if min(slow) > max(fast) else UNDECIDED
    )


def against(records: list[Record], first: str, second: str) -> list[tuple[str, str, str]]:
    """Two compared rows, each at its best step size, in three ways: what each scale says that has runs of both.

    That is a text, the verdict, and what the verdict would be if there were no noise.
    """
    found = []
    for scale in ("small", "quarter"):
        both = results.at_best(records, first, scale), results.at_best(records, second, scale)
        parts, verdicts, means, seeds = [], [], [], 0
        for way in WAYS:
            of = [*both[0], *both[1]]
            loss = results.difference(*both, results.noise(records, (scale,), way, of=of), way)
            bleu = results.difference(*both, results.noise(records, (scale,), way, True, of=of), way, bleu=True)
            parts.append(f"{way}: loss {loss}, BLEU {Difference(-bleu.mean, bleu.half, bleu.seeds)}")
            verdicts += [loss.as_good(SAME_LOSS), bleu.as_good(SAME_BLEU)]
            means += [replace(loss, half=0.0).as_good(SAME_LOSS), replace(bleu, half=0.0).as_good(SAME_BLEU)]
            seeds = max(seeds, loss.seeds)
        if seeds:
            text = f"{first} − {second} at `{scale}`, {seeds} seed{'s' * (seeds != 1)}: {'; '.join(parts)}"
            found.append((text, together(*verdicts), together(*means)))
    return found


def compared(mini: Mini, first: str, second: str, names: tuple[str, str]) -> Finding:
    """The first as good as the second, at `mini` and at the larger scales.

    What the largest decides counts. What a smaller one decides counts only if the larger ones lean the same way.
    """
    a = mini.minus(*names)
    larger = against(mini.records, first, second)
    decided = [i for i, (_, verdict, _) in enumerate(larger) if verdict != UNDECIDED]
    verdict = larger[decided[0]][1] if decided else UNDECIDED if larger else a.as_good(SAME_LOSS)
    if decided and any(leaning != verdict for _, _, leaning in larger[: decided[0]]):
        verdict = UNDECIDED
    lines = [*(text for text, *_ in larger), shown(f"{first} − {second} at `mini`:", a)]
    return "\n".join(lines), verdict


def increasing_decay(mini: Mini) -> Finding:
    """N like B with warm-up."""
    return compared(mini, "N", "B", ("N", "B"))


def headline(mini: Mini) -> Finding:
    """O without warm-up like B with it."""
    return compared(mini, "O", "B", ("O-", "B"))


def warmed(mini: Mini) -> Finding:
    """O like B, both with warm-up."""
    return compared(mini, "O+", "B", ("O", "B"))


def momentum(mini: Mini) -> Finding:
    """P gains little over O."""
    return compared(mini, "O", "P", ("O-", "P-"))


def embeddings(scheme: str) -> Work:
    """Adafactor loses less than Adam when embeddings are scaled otherwise."""

    def work(mini: Mini) -> Finding:
        lost: dict[str, dict[int, float]] = {}
        used: list[Record] = []
        for row in ("O", "Adam"):
            both = [results.select(mini.records, "mini", tied=False, embedding=name, row=row)
                    for name in (scheme, "scaled")]  # fmt: skip
            one, other = ({r["config"]["seed"]: results.dev_loss(r) for r in runs} for runs in both)
            lost[row] = {seed: one[seed] - other[seed] for seed in one if seed in other}
            used += [r for runs in both for r in runs]
        pairs = [lost["O"][seed] - lost["Adam"][seed] for seed in lost["O"] if seed in lost["Adam"]]
        half = results.noise(mini.records, ("mini",), tied=False, of=used).half(len(pairs), settings=4)
        found = Difference(results.mean(pairs), half, len(pairs))
        losses = [number(results.mean(lost[row].values())) for row in ("Adam", "O")]
        text = shown(f"Adam loses {losses[0]}, Adafactor {losses[1]}: difference", found)
        return text, found.better(SAME_LOSS)

    return work


def sgd(mini: Mini) -> Finding:
    """SGD worse than A, and dependent on its learning rate."""
    rates = ("Q1", "Q10", "Q100", "Q150", "Q200", "Q300")
    found = {q: math.nan if any(r["diverged"] for r in mini.runs(q)) else mini.loss(q) for q in rates}
    best = min((q for q in rates if math.isfinite(found[q])), key=lambda q: found[q], default="Q1")
    a = mini.minus("A", best)
    text = ", ".join(f"{q[1:]}·s {'diverged' if math.isnan(v) else number(v)}" for q, v in found.items())
    return f"with warm-up: {text}; {shown('A − the best of them', a)}", a.better(SAME_LOSS)


def memory(mini: Mini) -> Finding:
    """Sublinear state."""
    bytes_of = {row: runs[0]["state_bytes"] for row in "ABO" if (runs := mini.runs(row))}
    weights = next((r["parameter_bytes"] for r in mini.runs("O")), math.nan)
    text = ", ".join(f"{row} {size:,} ({100 * size / weights:.1f} %)" for row, size in bytes_of.items())
    small = "O" in bytes_of and "A" in bytes_of and bytes_of["O"] < 0.05 * bytes_of["A"]
    return f"bytes of state at `mini`, and of the weights: {text}", HOLDS if small else UNDECIDED


CLAIMS: tuple[tuple[str, Work], ...] = (
    ("Adafactor without momentum or warm-up (O) does as well as Adam with both (B)", headline),
    ("Adafactor without momentum but with warm-up (O+) does as well as Adam with both (B)", warmed),
    ("Momentum adds little to Adafactor (P beside O)", momentum),
    ("Increasing decay with clipping (N) does as well as Adam (B), with warm-up", increasing_decay),
    ("Factored second moments (C) do as well as full ones (A), with warm-up", as_good("C", "A")),
    ("Factored (J) as well as full (H), clipped and without warm-up", as_good("J-", "H-")),
    ("Row means alone (D) suffice", as_good("D", "A")),
    ("Column means alone (E) do not", better("A", "E")),
    ("Fast decay (G) converges worse than slow (A)", better("A", "G")),
    ("Slow decay (A) needs warm-up", better("A", "A-")),
    ("Clipping (H) cures its instability", better("H-", "A-", "hard", 3.0)),
    ("Variable decay (K) helps against it", better("K-", "A-", "hard", 3.0)),
    ("Momentum (B) helps against it", better("B-", "A-", "hard", 3.0)),
    ("Without warm-up, clipping at 1 (H) is better than at 2 (I)", better("H-", "I-")),
    ("RMS(U) stays near 1 with fast decay and fluctuates with slow (Figure 1)", rms_update),
    ("Relative steps suffer less from unit embeddings without a multiplier (Table 3)", embeddings("unit")),
    ("Relative steps suffer less from small embeddings without a multiplier (Table 3)", embeddings("plain")),
    ("SGD is worse, and depends on its learning rate (Q)", sgd),
    ("Sublinear memory", memory),
)


def table(records: list[Record]) -> Table | None:
    """Claims, measurements, verdicts."""
    if not records:
        return None
    mini = Mini(records)
    rows = [[claim, verdict, text] for claim, work in CLAIMS for text, verdict in (work(mini),)]
    note = (
        "Differences are of the dev loss, with half their 95 % interval over seeds: negative where the first is better "
        f"(of BLEU: positive). “As well as” holds if the whole interval is below +{SAME_LOSS:g} (BLEU: above "
        f"−{SAME_BLEU:g}), and does not if all of it is beyond. “Better” holds if the whole interval is below 0, and "
        f"does not if a lead of more than {SAME_LOSS:g} is excluded. Where a run is evaluated in three ways, one that "
        "fails is enough. Anything else is not decided at this scale, and so is what shorter runs decide but the means "
        "of longer ones contradict."
    )
    return Table("The claims", note, ["claim of the paper", "verdict", "measured"], rows, 3)
