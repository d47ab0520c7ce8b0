"""The paper's claims, each with what the records say and a verdict that the intervals decide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from lab import results
from lab.experiments import BEST, LONG_SEEDS, UNTUNED
from lab.presets import SCALES
from lab.results import FAILS, HOLDS, SAME_LOSS, UNDECIDED, Difference, Record
from lab.tables import PATTERN_ROWS, Table, agreement, number, pattern_losses

Finding = tuple[str, str]  # what was measured, and the verdict
Judge = Callable[["Runs"], Finding]
DECIDING = "decayed"  # the evaluation that decides, where there are several


@dataclass(frozen=True)
class Runs:
    """The records that claims are judged by."""

    records: list[Record]

    def of(self, name: str, scale: str = "mini") -> list[Record]:
        """The runs of `A` (with warm-up) or `A-` (without)."""
        return results.select(self.records, scale, row=name.rstrip("-"), warmup=not name.endswith("-"))

    def minus(self, first: str, second: str, scale: str = "mini") -> Difference:
        """Dev loss of the first minus that of the second; at `pattern`, where rows differ in noise, of these alone."""
        ours, theirs = self.of(first, scale), self.of(second, scale)
        if scale == "pattern":
            return results.paired(ours, theirs, "last")
        return results.difference(ours, theirs, results.noise(self.records, (scale,), of=[*ours, *theirs]))

    def compare(self, first: str, second: str) -> tuple[str, Difference]:
        """The deciding difference, with that of the other scale below it."""
        scales = ("pattern", "mini") if "-" in first + second else ("mini", "pattern")
        deciding, other = (self.minus(first, second, scale) for scale in scales)
        text = shown(f"{named(first)} − {named(second)} at `{scales[0]}`:", deciding)
        return text + (f"\n{shown(f'at `{scales[1]}`:', other)}" if other.seeds else ""), deciding

    def o_minus_b(self, scale: str, relative: float, absolute: float) -> Difference:
        """O without warm-up minus B with it, at these multipliers, in the loss that decides."""
        ours = results.compared(self.records, "O", scale, relative)
        theirs = results.compared(self.records, "B", scale, absolute)
        return results.paired(ours, theirs, DECIDING)

    def loss(self, name: str) -> float:
        """The mean dev loss at `mini`."""
        return results.mean(results.dev_loss(r) for r in self.of(name))


def shown(name: str, difference: Difference) -> str:
    """A difference with its name and its seeds."""
    return f"{name} {difference} ({count(difference.seeds)})"


def count(seeds: int) -> str:
    """So many seeds, in words."""
    return f"{seeds} seed{'s' * (seeds != 1)}"


def as_good(first: str, second: str) -> Judge:
    """The first does as well as the second."""

    def judge(runs: Runs) -> Finding:
        text, difference = runs.compare(first, second)
        return text, difference.as_good(SAME_LOSS)

    return judge


def better(first: str, second: str) -> Judge:
    """The first does better than the second."""

    def judge(runs: Runs) -> Finding:
        text, difference = runs.compare(first, second)
        return text, difference.better(SAME_LOSS)

    return judge


def named(name: str) -> str:
    """A row as it stands in a table."""
    return f"{name[:-1]} without warm-up" if name.endswith("-") else f"{name} with warm-up"


def rms_update(runs: Runs) -> Finding:
    """RMS(U) near 1 with fast decay, fluctuating with slow."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in ("G", "A"):
        for run in runs.of(row):
            values = [value for step, value in run["rms_update"]["values"] if step > run["steps"] / 10]
            found.setdefault(row, []).append((statistics.mean(values), statistics.pstdev(values)))
    if len(found) < 2:
        return "no runs", UNDECIDED
    text = "; ".join(f"{row}: " + ", ".join(f"{m:.2f} ± {s:.2f}" for m, s in pairs) for row, pairs in found.items())
    fast, slow = ([s for _, s in found[row]] for row in ("G", "A"))
    return f"mean ± deviation over the steps after the first tenth, by seed. {text}", (
        HOLDS if min(slow) > max(fast) else UNDECIDED
    )


def headline(runs: Runs) -> Finding:
    """O without warm-up like B with it, by the rule that was set before the runs at `long`, when all seeds are there.

    Below it what shorter runs say, which decides nothing: at one step size for both, as in the paper, and at the best
    of each row.
    """
    decided = runs.o_minus_b("long", UNTUNED["O"], UNTUNED["B"])
    is_complete = decided.seeds == len(LONG_SEEDS)
    found = {
        f"at `long` ({SCALES['long'].steps:,} steps), nothing tuned": decided,
        "at `small`, both at ×3": runs.o_minus_b("small", 3.0, 3.0),
        "at `small`, each at its best": runs.o_minus_b("small", BEST["small"]["O"], BEST["small"]["B"]),
        "at `mini`, both at ×3": runs.minus("O-", "B"),
    }
    lines = [f"{each} {where} ({count(each.seeds)})" for where, each in found.items()]
    lines[0] += "" if is_complete else f"; {len(LONG_SEEDS)} seeds will decide"
    return "\n".join(lines), decided.as_good(SAME_LOSS) if is_complete else UNDECIDED


def embeddings(scheme: str) -> Judge:
    """Adafactor loses less than Adam when embeddings are scaled otherwise."""

    def judge(runs: Runs) -> Finding:
        lost: dict[str, dict[int, float]] = {}
        used: list[Record] = []
        for row in ("O", "Adam"):
            both = [results.select(runs.records, "mini", tied=False, embedding=name, row=row)
                    for name in (scheme, "scaled")]  # fmt: skip
            one, other = ({r["config"]["seed"]: results.dev_loss(r) for r in side} for side in both)
            lost[row] = {seed: one[seed] - other[seed] for seed in one if seed in other}
            used += [r for side in both for r in side]
        pairs = [lost["O"][seed] - lost["Adam"][seed] for seed in lost["O"] if seed in lost["Adam"]]
        half = results.noise(runs.records, ("mini",), tied=False, of=used).half(len(pairs), settings=4)
        found = Difference(results.mean(pairs), half, len(pairs))
        losses = [number(results.mean(lost[row].values())) for row in ("Adam", "O")]
        text = shown(f"Adam loses {losses[0]}, Adafactor {losses[1]}: difference", found)
        return text, found.better(SAME_LOSS)

    return judge


def sgd(runs: Runs) -> Finding:
    """SGD worse than A, and dependent on its learning rate."""
    rates = ("Q1", "Q10", "Q100", "Q150", "Q200", "Q300")
    found = {q: math.nan if any(r["diverged"] for r in runs.of(q)) else runs.loss(q) for q in rates}
    best = min((q for q in rates if math.isfinite(found[q])), key=lambda q: found[q], default="Q1")
    a = runs.minus("A", best)
    text = ", ".join(f"{q[1:]}·s {'diverged' if math.isnan(v) else number(v)}" for q, v in found.items())
    return f"with warm-up: {text}; {shown('A − the best of them', a)}", a.better(SAME_LOSS)


def memory(runs: Runs) -> Finding:
    """Sublinear state."""
    bytes_of = {row: some[0]["state_bytes"] for row in "ABO" if (some := runs.of(row))}
    weights = next((r["parameter_bytes"] for r in runs.of("O")), math.nan)
    text = ", ".join(f"{row} {size:,} ({100 * size / weights:.1f} %)" for row, size in bytes_of.items())
    small = "O" in bytes_of and "A" in bytes_of and bytes_of["O"] < 0.05 * bytes_of["A"]
    return f"bytes of state at `mini`, and of the weights: {text}", HOLDS if small else UNDECIDED


CLAIMS: tuple[tuple[str, Judge], ...] = (
    ("Adafactor without momentum or warm-up (O) does as well as Adam with both (B)", headline),
    ("Momentum adds little to Adafactor (P beside O)", as_good("O-", "P-")),
    ("Increasing decay with clipping (N) does as well as Adam (B), with warm-up", as_good("N", "B")),
    ("Factored second moments (C) do as well as full ones (A), with warm-up", as_good("C", "A")),
    ("Factored (J) as well as full (H), clipped and without warm-up", as_good("J-", "H-")),
    ("Row means alone (D) suffice", as_good("D", "A")),
    ("Column means alone (E) do not", better("A", "E")),
    ("Fast decay (G) converges worse than slow (A)", better("A", "G")),
    ("Slow decay (A) needs warm-up", better("A", "A-")),
    ("Clipping (H) cures its instability", better("H-", "A-")),
    ("Variable decay (K) helps against it", better("K-", "A-")),
    ("Momentum (B) helps against it", better("B-", "A-")),
    ("Without warm-up, clipping at 1 (H) is better than at 2 (I)", better("H-", "I-")),
    ("RMS(U) stays near 1 with fast decay and fluctuates with slow (Figure 1)", rms_update),
    ("Relative steps suffer less from unit embeddings without a multiplier (Table 3)", embeddings("unit")),
    ("Relative steps suffer less from small embeddings without a multiplier (Table 3)", embeddings("plain")),
    ("SGD is worse, and depends on its learning rate (Q)", sgd),
    ("Sublinear memory", memory),
)


def judge_all(records: list[Record]) -> list[tuple[str, str, str]]:
    """Each claim with its verdict and what was measured."""
    return [(claim, verdict, text) for claim, judge in CLAIMS for text, verdict in (judge(Runs(records)),)]


def answer(records: list[Record]) -> str:
    """The answer in five sentences: how many claims hold, the first of them, the order of Table 2's rows, the size."""
    verdicts = judge_all(records)
    counts = [sum(verdict == kind for _, verdict, _ in verdicts) for kind in (HOLDS, FAILS, UNDECIDED)]
    deciding, *shorter = verdicts[0][2].splitlines()
    text = (
        f"Of {len(verdicts)} claims of the paper {counts[0]} hold here, {counts[1]} do not, and {counts[2]} are not "
        "decided. The first is that Adafactor without momentum or warm-up (row O) does as well as Adam with both "
        f"(row B), **{verdicts[0][1]}**: O − B in dev loss, where up to +{SAME_LOSS:g} counts as equal, is {deciding}. "
        f"Shorter runs, which decide nothing, have {', '.join(shorter)}."
    )
    order = agreement(records, warm=False)
    if order is not None:
        losses = pattern_losses(records, warm=False)
        failed = {name for name, values in losses.items() if results.mean(values) > results.FAILED}
        fail, learn = ({row.name for row in PATTERN_ROWS if (row.cold < 1) == kind} for kind in (True, False))
        text += (
            f"\n\nWithout warm-up, the losses of rows A to P have a rank correlation of {order} with the paper's BLEU: "
            f"of its {len(fail)} rows that fail {len(fail & failed)} fail here{_but(fail - failed)}, and of its "
            f"{len(learn)} that learn {len(learn - failed)} learn{_but(learn & failed)}."
        )
    longest = max(record["config"]["scale"]["steps"] for record in records)
    largest = max(record["parameter_bytes"] for record in records) / 4e6
    return f"{text} No run is longer than {longest:,} steps, no model larger than {largest:.1f} million parameters."


def advice(records: list[Record]) -> str:
    """A line for whoever pre-trains, which follows from the first claim's verdict."""
    measured, verdict = headline(Runs(records))
    told = {
        HOLDS: "They do as well as Adam with momentum and warm-up, in small models",
        FAILS: "They do less well than Adam with momentum and warm-up, in small models",
        UNDECIDED: "Whether they do as well as Adam with momentum and warm-up is not decided",
    }[verdict]
    return (
        "Start with the defaults (Algorithm 6), without warm-up and with nothing tuned. Paper: 25.5 BLEU (row O), "
        f"where Adam with warm-up has 25.4 (row B). {told}. Measured: their dev loss minus Adam's is "
        f"{measured.splitlines()[0]} ([details](reproduction.md)).\n"
    )


def _but(names: set[str]) -> str:
    return f" (not {' and '.join(sorted(names))})" if names else ""


def table(records: list[Record]) -> Table | None:
    """Claims, verdicts, measurements."""
    if not records:
        return None
    note = (
        "Differences are of the dev loss, all rows at one multiplier of the paper's step size, with half their 95 % "
        "interval over seeds: negative where the first is better. Claims on runs without warm-up are decided at "
        "`pattern`, where such runs can fail, the others at `mini`; what the other scale says stands below, and "
        f"decides nothing. “As well as” holds if the whole interval is below +{SAME_LOSS:g}, and does not if all of "
        "it is beyond. “Better” holds if the whole interval is below 0, and does not if a lead of more than "
        f"{SAME_LOSS:g} is excluded. Anything else is not decided at this scale. At `pattern` the interval is "
        "Student's over the seeds of the two rows; at `mini` the noise is that of all rows that learn."
    )
    rows = [list(line) for line in judge_all(records)]
    return Table("The claims", note, ["claim of the paper", "verdict", "measured"], rows, 3)
