"""The ratios that say whether the step is what it is meant to be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from adafactor.bench.contenders import CONTENDERS
from adafactor.bench.results import Measured, Results, Timing

OURS, YARDSTICK = "cpu", "adamw-fused"


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
    fused = _ratios(results, lambda m: _over(m.timing(OURS), m.timing(YARDSTICK)))
    momentum = _ratios(results, lambda m: _over(m.timing("cpu-momentum"), m.timing(YARDSTICK)))
    short = _ratios(results, lambda m: _over(m.timing(OURS, "bfloat16"), m.timing(YARDSTICK, "bfloat16")))
    peers = _ratios(results, lambda m: _over(fastest_peer(results, m), m.timing(OURS)))
    extra = _ratios(results, lambda m: _extra(m) if m.large else None)
    floor = _ratios(results, lambda m: floor_share(m, m.timing(OURS)) if m.large else None)
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


def floor_share(measured: Measured, timing: Timing | None) -> float | None:
    """The least time that memory allows, as a share of the time taken."""
    if timing is None or timing.floor_bytes is None:
        return None
    return timing.floor_bytes / measured.bandwidth / timing.median


def mean(ratios: dict[str, float]) -> float | None:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else None


def worst(ratios: dict[str, float], choose: Callable[..., float]) -> float | None:
    """The largest or the smallest."""
    return choose(ratios.values()) if ratios else None


def _ratios(results: Results, ratio: Callable[[Measured], float | None]) -> dict[str, float]:
    found = {measured.name: ratio(measured) for measured in results.suites}
    return {name: value for name, value in found.items() if value is not None}


def _over(a: Timing | None, b: Timing | None) -> float | None:
    return a.median / b.median if a and b else None


def _extra(measured: Measured) -> float | None:
    timing = measured.timing(OURS)
    return timing.extra_bytes / (4 * measured.parameters) if timing and timing.extra_bytes is not None else None


def _flatness(results: Results) -> float | None:
    found = {m.name: (m.timing(OURS), m.parameters) for m in results.cost}
    (large, many), (small, few) = found.get("1B", (None, 1)), found.get("10M", (None, 1))
    return (large.median / many) / (small.median / few) if large and small else None


def _each(ratios: dict[str, float], percent: bool = False) -> str:
    return ", ".join(f"{k} {100 * v:.3g} %" if percent else f"{k} {v:.2f}" for k, v in ratios.items())
