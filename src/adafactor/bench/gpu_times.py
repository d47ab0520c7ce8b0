"""What `adafactor check --bench` adds: steps against other optimizers on a card, and each launch of ours apart."""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from adafactor.bench.contenders import CONTENDERS, TorchRunner, find, parameters
from adafactor.bench.launches import Launches, moved
from adafactor.bench.measure import Entry, Tick
from adafactor.bench.measure import measure as measure_steps
from adafactor.bench.place import Card
from adafactor.bench.present import significant, size
from adafactor.bench.results import Measured
from adafactor.bench.suites import SUITES, Suite

OURS = "triton"
KEYS = (OURS, "eager", "adamw-fused", "torch-loop", "torch-foreach")
LAYER = Suite(
    "layer",
    "a layer of Llama 7B",
    ((4096, 4096),) * 4 + ((11008, 4096), (11008, 4096), (4096, 11008), (4096,), (4096,)),
)
# suite, dtype
MODELS = (
    (SUITES["gpt2"], "float32"),
    (SUITES["gpt2"], "bfloat16"),
    (LAYER, "bfloat16"),
    (SUITES["bert"], "float32"),
)


@dataclass(frozen=True)
class Launch:
    """The launches of one kernel in a step."""

    name: str
    number: int
    seconds: float
    bytes: int  # read and written, whatever the cache holds

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Times:
    """A model: steps of all contenders, launches of ours."""

    measured: Measured
    dtype: str
    launches: list[Launch]
    missing: dict[str, str]


def measure(
    card: Card,
    rounds: int,
    tick: Tick,
    models: Sequence[tuple[Suite, str]] = MODELS,
    keys: Sequence[str] = KEYS,
) -> list[Times]:
    """Everything, model after model; contenders that cannot run here are left out and named."""
    from adafactor.bench.contenders import why_not

    found = []
    for suite, dtype in models:
        missing = {key: reason for key in keys if (reason := why_not(CONTENDERS[key], dtype, card.device))}
        entries = [Entry(CONTENDERS[key], dtype) for key in keys if key not in missing]
        measured = measure_steps(suite, entries, rounds, tick, card)
        tick(f"{suite.name}: launches")
        launches = [] if OURS in missing or OURS not in keys else time_launches(card, suite, dtype, rounds)
        found.append(Times(measured, dtype, launches, missing))
        gc.collect()
    return found


def time_launches(card: Card, suite: Suite, dtype: str, rounds: int) -> list[Launch]:
    """Medians of a few steps, each launch between two events."""
    runner = find(OURS).make(parameters(suite.shapes, dtype, device=card.device))
    assert isinstance(runner, TorchRunner)
    for _ in range(3):
        runner.step()
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        with Launches(card) as launches:
            runner.step()
        for name, value in launches.seconds().items():
            seconds[name].append(value)
    sizes = moved(runner.optimizer._buckets[None].executors)  # type: ignore[attr-defined]
    sizes.pop("measure")  # nothing, after the first step
    counts = launches.counts
    return [Launch(name, counts[name], statistics.median(s), sizes.get(name, 0)) for name, s in seconds.items()]


def show(found: Sequence[Times]) -> str:
    """Plain text, for a terminal and for an issue."""
    parts = []
    for times in found:
        measured = times.measured
        ours = measured.timing(OURS, times.dtype)
        head = f"{measured.title}, {times.dtype}: {measured.tensors} tensors, {measured.parameters:,} parameters"
        lines = [head, f"  a copy moves {significant(measured.bandwidth / 1e9)} GB/s"]
        for t in measured.timings:
            ratio = f"{t.median / ours.median:6.2f} x" if ours else ""
            label = find(t.contender).label
            lines.append(f"  {label:<32} {significant(1e3 * t.median):>8} ms {ratio}  state {size(t.state_bytes)}")
        for launch in times.launches:
            share = 100 * launch.bandwidth / measured.bandwidth
            speed = f"{significant(launch.bandwidth / 1e9):>8} GB/s {share:4.0f} % of a copy" if launch.bytes else ""
            name = f"{launch.name}, {launch.number} launches" if launch.number > 1 else launch.name
            lines.append(f"    {name:<30} {significant(1e3 * launch.seconds):>8} ms {speed}".rstrip())
        lines += [f"  {CONTENDERS[key].label}: {reason}" for key, reason in times.missing.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
