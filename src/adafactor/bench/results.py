"""What a run of the benchmark found, and its JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
    floor_bytes: int | None = None

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def middle(self) -> tuple[float, float]:
        """Between which the middle half of the rounds lies."""
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


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

    def correct(self, contender: str, dtype: str = "float32") -> bool | None:
        """Whether it does what its formula says; None if that was not checked."""
        return next((c.correct for c in self.checks if (c.contender, c.dtype) == (contender, dtype)), None)

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> Results:
    """From JSON."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["checks"] = [Checked(**c) for c in found["checks"]]
        for part in ("suites", "cost"):
            found[part] = [Measured(**{**m, "timings": [Timing(**t) for t in m["timings"]]}) for m in found[part]]
        return Results(**found)
    except (KeyError, TypeError, json.JSONDecodeError) as wrong:
        raise ValueError(f"{path} is not a result of adafactor bench ({wrong})") from wrong
