"""What a run of the benchmark found, its JSON, and the ratios that say whether the step is what it is meant to be."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contenders import CONTENDERS

OURS, YARDSTICK = "cpu", "adamw-fused"


@dataclass
class Checked:
    """Deviation of a contender from its own formula, relative to the distance travelled; None: it has none."""

    contender: str
    dtype: str
    error: float | None
    correct: bool | None


@dataclass
class Timing:
    """One contender in one suite: seconds of a step in each round, bytes of state, bytes taken during a step."""

    contender: str
    dtype: str
    seconds: list[float]
    state_bytes: int
    extra_bytes: int | None = None

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


class Ratio(NamedTuple):
    """How many times as long one contender took as another, round by round."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, timing: Timing | None, base: Timing | None) -> Ratio | None:
        """Divide what was measured in the same rounds; None where one of them was not measured."""
        if timing is None or base is None:
            return None
        ratios = [a / b for a, b in zip(timing.seconds, base.seconds, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        """Write the median and, in brackets, the range over the rounds if there is one."""
        is_one = self.lowest == self.highest
        return f"{self.median:.2f}" if is_one else f"{self.median:.2f} ({self.lowest:.2f}–{self.highest:.2f})"


@dataclass
class Measured:
    """One suite, or one size of the cost mode."""

    name: str
    title: str
    tensors: int
    parameters: int
    large: bool
    bandwidth: float  # bytes a second of a copy, read and written, in the same rounds
    timings: list[Timing]

    def timing(self, contender: str, dtype: str = "float32") -> Timing | None:
        """That contender's, if it was measured."""
        return next((t for t in self.timings if (t.contender, t.dtype) == (contender, dtype)), None)

    def against_adamw(self, timing: Timing | None) -> Ratio | None:
        """How many times as long as fused AdamW in the same dtype."""
        return None if timing is None else Ratio.of(timing, self.timing(YARDSTICK, timing.dtype))

    def floor_share(self, timing: Timing | None) -> float | None:
        """The time of trivial loops over the same bytes, as a share of the time taken."""
        contender = None if timing is None else CONTENDERS.get(timing.contender)
        if timing is None or contender is None or contender.floor is None:
            return None
        share = Ratio.of(self.timing(contender.floor, timing.dtype), timing)
        return None if share is None else share.median


@dataclass
class Results:
    """A whole run."""

    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    threads: int
    rounds: int
    missing: dict[str, str] = field(default_factory=dict)  # contender → why it was not measured
    checks: list[Checked] = field(default_factory=list)
    suites: list[Measured] = field(default_factory=list)
    cost: list[Measured] = field(default_factory=list)
    device: str = "cpu"  # where the tensors were
    load_before: list[float] | None = None  # processes that wanted to run in the 1, 5 and 15 minutes before
    load_after: list[float] | None = None

    def correct(self, contender: str, dtype: str = "float32") -> bool | None:
        """Whether it does what its formula says; None if that was not checked."""
        return next((c.correct for c in self.checks if (c.contender, c.dtype) == (contender, dtype)), None)

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> Results:
    """Read JSON."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["checks"] = [Checked(**c) for c in found["checks"]]
        for part in ("suites", "cost"):
            found[part] = [Measured(**{**m, "timings": [Timing(**t) for t in m["timings"]]}) for m in found[part]]
        return Results(**found)
    except (KeyError, TypeError, json.JSONDecodeError) as wrong:
        raise ValueError(f"{path} is not a result of this benchmark ({wrong})") from wrong


# ---- the ratios that matter


@dataclass(frozen=True)
class Target:
    """A figure, its bound, and where it comes from; the value is None when something it needs was not measured."""

    text: str
    value: float | None
    bound: float
    most: bool  # the bound is the most it may be; else the least
    percent: bool = False
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the value is within the bound."""
        if self.value is None:
            return None
        return self.value <= self.bound if self.most else self.value >= self.bound

    def show(self, value: float) -> str:
        """A value of this target as text."""
        return f"{100 * value:.3g} %" if self.percent else f"{value:.2f} ×"


def targets(results: Results) -> list[Target]:
    """All of them, in the order of importance."""
    fused = _by_suite(results, lambda m: m.against_adamw(m.timing(OURS)))
    momentum = _by_suite(results, lambda m: m.against_adamw(m.timing("cpu-momentum")))
    short = _by_suite(results, lambda m: m.against_adamw(m.timing(OURS, "bfloat16")))
    peers = _by_suite(results, lambda m: Ratio.of(fastest_peer(results, m), m.timing(OURS)))
    extra = _by_suite(results, lambda m: _extra(m) if m.large else None)
    floor = _by_suite(results, lambda m: m.floor_share(m.timing(OURS)) if m.large else None)
    return [
        Target("time of fused AdamW, geometric mean", mean(fused), 0.85, True, detail=_each(fused)),
        Target("time of fused AdamW, worst suite", worst(fused, max), 1.1, True),
        Target("the same with momentum, geometric mean", mean(momentum), 1.0, True, detail=_each(momentum)),
        Target("the same in bfloat16, geometric mean", mean(short), 1.0, True, detail=_each(short)),
        Target(
            "faster than the fastest correct other Adafactor, geometric mean",
            mean(peers),
            8.0,
            False,
            detail=_each(peers),
        ),
        Target("faster than the fastest correct other Adafactor, worst suite", worst(peers, min), 5.0, False),
        Target(
            "extra memory in a step, of the parameters' bytes, worst large suite",
            worst(extra, max),
            0.01,
            True,
            True,
            _each(extra, True),
        ),
        Target(
            "of the speed that memory allows, worst large suite",
            worst(floor, min),
            0.6,
            False,
            True,
            _each(floor, True),
        ),
        Target("cost of a parameter at 1 B against 10 M", _flatness(results), 1.25, True),
    ]


def fastest_peer(results: Results, measured: Measured) -> Timing | None:
    """The other Adafactor that is fastest in this suite, of those that do what their formula says."""
    others = [
        t
        for t in measured.timings
        if t.dtype == "float32"
        and t.contender in CONTENDERS
        and CONTENDERS[t.contender].role == "peer"
        and results.correct(t.contender)
    ]
    return min(others, key=lambda t: t.median, default=None)


def mean(ratios: dict[str, float]) -> float | None:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else None


def worst(ratios: dict[str, float], choose: Callable[..., float]) -> float | None:
    """The largest or the smallest."""
    return choose(ratios.values()) if ratios else None


def _by_suite(results: Results, measure: Callable[[Measured], Ratio | float | None]) -> dict[str, float]:
    values = {measured.name: measure(measured) for measured in results.suites}
    return {k: v.median if isinstance(v, Ratio) else v for k, v in values.items() if v is not None}


def _extra(measured: Measured) -> float | None:
    timing = measured.timing(OURS)
    return timing.extra_bytes / (4 * measured.parameters) if timing and timing.extra_bytes is not None else None


def _flatness(results: Results) -> float | None:
    found = {m.name: (m.timing(OURS), m.parameters) for m in results.cost}
    (large, many), (small, few) = found.get("1B", (None, 1)), found.get("10M", (None, 1))
    return (large.median / many) / (small.median / few) if large and small else None


def _each(ratios: dict[str, float], percent: bool = False) -> str:
    return ", ".join(f"{k} {100 * v:.3g} %" if percent else f"{k} {v:.2f}" for k, v in ratios.items())
