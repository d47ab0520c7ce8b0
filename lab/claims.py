"""The paper's claims, each with what the records say and a verdict that the intervals decide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from lab import results
from lab.experiments import BEST, UNTUNED
from lab.results import HOLDS, SAME_LOSS, UNDECIDED, Difference, Record
from lab.tables import Table, number

Finding = tuple[str, str]  # what was measured, and the verdict
Executor = Callable[["Mini"], Finding]
DECIDING = "decayed"  # the evaluation that decides, where there are several


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


def shown(name: str, difference: Difference) -> str:
    """A difference with its name and its seeds."""
    return f"{name} {difference} ({difference.seeds} seed{'s' * (difference.seeds != 1)})"


def as_good(first: str, second: str) -> Executor:
    """The first does as well as the second, at `mini`."""

    def work(mini: Mini) -> Finding:
        found = mini.minus(first, second)
        return shown(f"{named(first)} − {named(second)}", found), found.as_good(SAME_LOSS)

    return work


def better(first: str, second: str, scale: str = "mini", multiplier: float | None = None) -> Executor:
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


def headline(mini: Mini) -> Finding:
    """O without warm-up like B with it, by the rule that was set before the runs at `long`.

    Below it what shorter runs say, which decides nothing: at one step size for both, as in the paper, and at the best
    of each row.
    """
    both = [results.select(mini.records, "long", row=row, warmup=warm, multiplier=UNTUNED[row])
            for row, warm in (("O", False), ("B", True))]  # fmt: skip
    decided = results.paired(both[0], both[1], DECIDING)
    lines = [shown("O − B at `long`, nothing tuned:", decided) if decided.seeds else "the runs at `long` are to come"]
    for scale, name, multipliers in (("small", "", (3.0, 3.0)), ("small", " each at its best", (BEST["O"], BEST["B"]))):
        both = [results.select(mini.records, scale, row=row, warmup=warm, multiplier=multiplier)
                for (row, warm), multiplier in zip((("O", False), ("B", True)), multipliers, strict=True)]  # fmt: skip
        found = results.paired(both[0], both[1], DECIDING)
        steps = name or f" both at ×{multipliers[0]:g}"
        lines.append(shown(f"at `{scale}`,{steps}:", found))
    lines.append(shown("at `mini`, both at ×3:", mini.minus("O-", "B")))
    return "\n".join(lines), decided.as_good(SAME_LOSS)


def embeddings(scheme: str) -> Executor:
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


CLAIMS: tuple[tuple[str, Executor], ...] = (
    ("Adafactor without momentum or warm-up (O) does as well as Adam with both (B)", headline),
    ("Momentum adds little to Adafactor (P beside O)", as_good("O-", "P-")),
    ("Increasing decay with clipping (N) does as well as Adam (B), with warm-up", as_good("N", "B")),
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
        "Differences are of the dev loss at `mini` unless another scale is named, all rows at one multiplier of the "
        "paper's step size, with half their 95 % interval over seeds: negative where the first is better. “As well as” "
        f"holds if the whole interval is below +{SAME_LOSS:g}, and does not if all of it is beyond. “Better” holds if "
        f"the whole interval is below 0, and does not if a lead of more than {SAME_LOSS:g} is excluded. Anything else "
        "is not decided at this scale. Where a run has a decay to zero, the weights after it are compared."
    )
    return Table("The claims", note, ["claim of the paper", "verdict", "measured"], rows, 3)
