"""How long each pass of the step in Triton takes on a card, and whole steps beside those of other optimizers.

Times are those of the device's own events. A pass is compared with the least that it must move at the card's nominal
bandwidth: the first reads G, the last reads G and X and writes X.
"""

from __future__ import annotations

import gc
import statistics
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from adafactor.check.selftest import BF16, Make, Variant

COLUMNS = (768, 2304, 4096, 5120, 28672)  # of GPT-2, of its QKV, of Llama 7B and 13B, and of a 70B's down projection
VARIANTS = (Variant(), Variant(BF16, BF16), Variant(BF16, BF16, None, "stochastic"))
ELEMENTS = 2**27  # of each matrix: several times what any cache holds
WARM_UP = 3  # steps; the first compiles
OTHERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch.optim.AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "torch.optim.Adafactor": lambda params: torch.optim.Adafactor(params, foreach=False),
}


def find_device(name: str) -> torch.device:
    """Return the device of this name, with its number; a ValueError if there is no such device here."""
    try:
        device = torch.device(name)
    except RuntimeError as wrong:
        raise ValueError(f"--device {name} is not a device that torch knows") from wrong
    if device.type == "cpu":
        return device
    if device.type not in ("cuda", "xpu"):
        raise ValueError(f"--device {name}: there are cpu, cuda (also for ROCm) and xpu")
    module = torch.get_device_module(device)
    if not module.is_available():
        raise ValueError(f"there is no {device.type} device here that torch {torch.__version__} can use")
    number = module.current_device() if device.index is None else device.index
    if not 0 <= number < module.device_count():
        raise ValueError(f"--device {name}: there are {module.device_count()} {device.type} devices, from number 0")
    return torch.device(device.type, number)


def seconds(module: Any, device: torch.device, function: Callable[[], object], repeats: int = 1) -> float:
    """Return the seconds of one call, between two events in the device's queue, which is empty before the first.

    Args:
        module: torch's module for the device, or a stand-in with the same functions.
        device: what the calls run on.
        function: what is timed.
        repeats: how many calls in a row.
    """
    first, last = (module.Event(enable_timing=True) for _ in range(2))
    module.synchronize(device)
    first.record()
    for _ in range(repeats):
        function()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / repeats


def nominal_bandwidth(device: torch.device) -> float | None:
    """Return the bytes a second that the card's memory clock and bus allow; None where the driver does not say."""
    try:
        from triton import testing

        return float(testing.get_dram_gbps(device.index)) * 1e9 or None
    except Exception:  # no such driver, or one that has no such numbers: a copy is measured as well
        return None


class Launches:
    """Stands in for the launcher of the Triton backend while it is on, and notes every launch."""

    def __init__(self, module: Any = None):
        """Time launches by the events of this module of torch's; None: run none of them."""
        self.module = module
        self.names: list[str] = []
        self._events: list[tuple[Any, Any]] = []

    def __enter__(self) -> Launches:
        """Take the launcher's place."""
        from adafactor.kernels.triton import executor

        self._real, executor.launch = executor.launch, self._launch
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        from adafactor.kernels.triton import executor

        executor.launch = self._real

    def _launch(self, kernel: Any, programs: int, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        from adafactor.kernels.triton.last_walk import CHECK, MEASURE

        if not programs:
            return
        name = str(kernel.__name__).replace("_", " ")
        if name == "last walk":
            name = {CHECK.value: "check", MEASURE.value: "measure"}.get(arguments[-1], name)
        self.names.append(name)
        if self.module is not None:
            first, last = (self.module.Event(enable_timing=True) for _ in range(2))
            first.record()
            self._real(kernel, programs, arguments, options)
            last.record()
            self._events.append((first, last))

    @property
    def counts(self) -> Counter[str]:
        """How often each was launched."""
        return Counter(self.names)

    def seconds(self) -> dict[str, float]:
        """Return how long the launches of each took together; call it when they are done."""
        sums: dict[str, float] = defaultdict(float)
        for name, (first, last) in zip(self.names, self._events, strict=True):
            sums[name] += float(first.elapsed_time(last)) / 1e3
        return dict(sums)


@dataclass(frozen=True)
class Pass:
    """The launches of one kernel in a step."""

    name: str
    launches: int
    seconds: float
    bytes: int = 0  # the least that it must move; 0: next to nothing


@dataclass
class Times:
    """Steps of one matrix, in medians."""

    variant: str
    rows: int
    columns: int
    copy_bandwidth: float = 0.0  # bytes a second, of those read and those written
    step: float = 0.0  # seconds
    bytes: int = 0  # the least that a step must move
    passes: list[Pass] = field(default_factory=list)
    others: dict[str, float] = field(default_factory=dict)  # seconds of a step
    problems: dict[str, str] = field(default_factory=dict)  # what could not be timed, and why


def measure(
    make: Make,
    device: torch.device,
    rounds: int,
    tick: Callable[[str], None],
    columns: Sequence[int] = COLUMNS,
    elements: int = ELEMENTS,
    module: Any = None,
) -> list[Times]:
    """Time every variant with matrices of every width.

    Args:
        make: the optimizer's class.
        device: a GPU.
        rounds: how often each optimizer has its turn.
        tick: is called with what comes next.
        columns: widths.
        elements: of each matrix, about.
        module: torch's for this device, or a stand-in.
    """
    module = torch.get_device_module(device) if module is None else module
    times = []
    for variant in VARIANTS:
        for width in columns:
            tick(f"{variant}, {width} columns")
            times.append(Times(str(variant), max(1, elements // width), width))
            with _noted(times[-1], "all"):
                _time(times[-1], make, device, module, variant, rounds)
            gc.collect()
    return times


def _time(times: Times, make: Make, device: torch.device, module: Any, variant: Variant, rounds: int) -> None:
    """Let ours, the others and a copy take turns."""
    shape = times.rows, times.columns
    generator = torch.Generator(device).manual_seed(0)
    g = torch.empty(shape, dtype=variant.g, device=device).normal_(0.0, 1e-3, generator=generator)
    copy = torch.empty_like(g)

    def stepper(optimizer: Callable[..., torch.optim.Optimizer], **keywords: Any) -> Callable[[], object]:
        p = torch.nn.Parameter(torch.zeros(shape, dtype=variant.x, device=device))
        p.grad = g
        step = optimizer([p], **keywords).step
        for _ in range(WARM_UP):
            step()
        return step

    steps: dict[str, Callable[[], object]] = {}
    for name, optimizer in OTHERS.items():
        with _noted(times, name):
            steps[name] = stepper(optimizer)
    ours: Callable[[], object] | None = None
    with _noted(times, "adafactor"):
        ours = stepper(make, backend="triton", **variant.keywords)
    whole: list[float] = []
    by_pass: dict[str, list[float]] = defaultdict(list)
    others: dict[str, list[float]] = defaultdict(list)
    copies: list[float] = []
    launches = Launches(module)
    for _ in range(rounds):
        if ours is not None:
            with Launches(module) as launches:
                whole.append(seconds(module, device, ours))
            for name, value in launches.seconds().items():
                by_pass[name].append(value)
        for name, step in steps.items():
            others[name].append(seconds(module, device, step))
        copies.append(seconds(module, device, lambda: copy.copy_(g)))
    least = {"first walk": g.nbytes, "last walk": g.nbytes + 2 * g.numel() * variant.x.itemsize}
    times.copy_bandwidth = 2 * g.nbytes / statistics.median(copies)
    times.others = {name: statistics.median(values) for name, values in others.items()}
    if whole:
        times.step, times.bytes = statistics.median(whole), sum(least.values())
        times.passes = [
            Pass(name, launches.counts[name], statistics.median(values), least.get(name, 0))
            for name, values in by_pass.items()
        ]


@contextmanager
def _noted(times: Times, name: str) -> Iterator[None]:
    """Note an exception as a problem of what is timed, and go on with the rest."""
    try:
        yield
    except Exception as problem:
        times.problems[name] = "".join(traceback.format_exception(problem, limit=-6)).strip()


def show(times: Sequence[Times], nominal: float | None) -> str:
    """Write a table for each variant, in plain text for a terminal and for an issue."""
    parts = []
    for variant in dict.fromkeys(time.variant for time in times):
        group = [time for time in times if time.variant == variant]
        names = list(dict.fromkeys(p.name for time in group for p in time.passes))
        base = "nominal" if nominal else "a copy's"
        speed = f" {nominal / 1e9:,.0f} GB/s" if nominal else " speed"
        lines = [f"{variant}: ms, and share of the {base}{speed}; matrices of about {ELEMENTS // 2**20} M elements"]
        lines.append(_line("columns", [f"{time.columns}" for time in group]))
        for name in names:
            passes = [next((p for p in time.passes if p.name == name), None) for time in group]
            lines.append(_line(name, [_cell(p, t, nominal) for p, t in zip(passes, group, strict=True)]))
        lines.append(_line("whole step", [_cell(time, time, nominal) for time in group]))
        for name in OTHERS:
            cells = [f"{1e3 * time.others[name]:.3f}" if name in time.others else "-" for time in group]
            lines.append(_line(name, cells))
        lines.append(_line("a copy, GB/s", [f"{time.copy_bandwidth / 1e9:,.0f}" for time in group]))
        parts.append("\n".join(lines))
    for time in times:
        for name, problem in time.problems.items():
            parts.append(f"{name}, {time.variant}, {time.rows}×{time.columns}:\n{problem}")
    return "\n\n".join(parts)


def _line(name: str, cells: Sequence[str]) -> str:
    return (f"  {name:<26}" + "".join(f"{cell:>16}" for cell in cells)).rstrip()


def _cell(timed: Pass | Times | None, time: Times, nominal: float | None) -> str:
    """Milliseconds, and the share of the bandwidth where bytes are what counts."""
    duration = timed.step if isinstance(timed, Times) else timed.seconds if timed else 0.0
    if timed is None or not duration:
        return "-"
    base = nominal or time.copy_bandwidth
    share = f" {100 * timed.bytes / duration / base:3.0f} %" if timed.bytes and base else " " * 6
    return f"{1e3 * duration:.3f}{share}"
