"""How long each pass of the step in Triton takes on a card, and whole steps beside those of other optimizers.

Times are those of the device's own events. A pass is compared with the least that it must move at the card's nominal
bandwidth: the first reads G, the last reads G and X and writes X.
"""

from __future__ import annotations

import gc
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from adafactor.check.selftest import BF16, Make, Variant

COLUMNS = (768, 2304, 4096, 5120, 28672)  # of GPT-2, of its QKV, of Llama 7B and 13B, and of a 70B's down projection
VARIANTS = (Variant(), Variant(BF16, BF16), Variant(BF16, BF16, None, "stochastic"))
ELEMENTS = 2**27  # of each matrix: several times what any cache holds
WARM_UP = 3  # steps; the first compiles
OURS = "adafactor, triton"
OTHERS: dict[str, Make] = {
    "torch.optim.AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "torch.optim.Adafactor": partial(torch.optim.Adafactor, foreach=False),
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
    number, count = device.index or 0, torch.get_device_module(device).device_count()
    if number >= count:
        raise ValueError(
            f"--device {name}: there is no {device.type} device here with number {number}; torch {torch.__version__} "
            f"can use {count} of them"
        )
    return torch.device(device.type, number)


def seconds(module: Any, device: torch.device, function: Callable[[], object], repeats: int = 1) -> float:
    """Return the seconds of one call, between two events in the device's queue, which is empty before the first.

    The events are those of torch's module for the device, or of a stand-in.
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


@contextmanager
def note_launches(module: Any = None) -> Iterator[list[tuple[str, Any, Any]]]:
    """Stand in for the launcher of the Triton backend; yield every kernel's name, and the events before and after it.

    The events are those of this module of torch's. Without it none of the kernels is run.
    """
    from unittest.mock import patch

    from adafactor.kernels.triton import executor

    real = executor.launch
    noted: list[tuple[str, Any, Any]] = []

    def launch(kernel: Any, programs: int, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        if not programs:
            return
        first, last = (module and module.Event(enable_timing=True) for _ in range(2))
        if module is not None:
            first.record()
            real(kernel, programs, arguments, options)
            last.record()
        noted.append((str(kernel.__name__).replace("_", " "), first, last))

    with patch.object(executor, "launch", launch):
        yield noted


@dataclass
class Times:
    """Median seconds of the steps of one matrix."""

    variant: str
    rows: int
    columns: int
    copy_bandwidth: float = 0.0  # bytes a second, of those read and those written
    steps: dict[str, float] = field(default_factory=dict)  # of each optimizer
    passes: dict[str, float] = field(default_factory=dict)  # of each kernel in our step
    bytes: dict[str, int] = field(default_factory=dict)  # the least that our step and each pass over the data move
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
    """Time every variant with matrices of every width, and of about so many elements.

    In every round each optimizer has its turn. `tick` is called with what comes next; `module` is torch's for the
    device, or a stand-in.
    """
    module = torch.get_device_module(device) if module is None else module
    all_times = []
    for variant in VARIANTS:
        for width in columns:
            tick(f"{variant}, {width} columns")
            times = Times(str(variant), max(1, elements // width), width)
            with _noted(times, "all"):
                _take_turns(times, make, device, module, variant, rounds)
            all_times.append(times)
            gc.collect()
    return all_times


def _take_turns(times: Times, make: Make, device: torch.device, module: Any, variant: Variant, rounds: int) -> None:
    """Let ours, the others and a copy take turns on one gradient."""
    shape = times.rows, times.columns
    generator = torch.Generator(device).manual_seed(0)
    g = torch.empty(shape, dtype=variant.g, device=device).normal_(0.0, 1e-3, generator=generator)
    copy = torch.empty_like(g)
    turns: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(g)}
    optimizers: dict[str, Make] = {OURS: partial(make, backend="triton", **variant.keywords), **OTHERS}
    for name, optimizer in optimizers.items():
        with _noted(times, name):
            p = torch.nn.Parameter(torch.zeros(shape, dtype=variant.x, device=device))
            p.grad = g
            step = optimizer([p]).step
            for _ in range(WARM_UP):
                step()
            turns[name] = step
    samples: dict[str, list[float]] = defaultdict(list)  # of each turn, and of each kernel in ours
    for _ in range(rounds):
        for name, turn in turns.items():
            with note_launches(module) as launches:
                samples[name].append(seconds(module, device, turn))
            sums: dict[str, float] = defaultdict(float)
            for kernel, first, last in launches:
                sums[kernel] += first.elapsed_time(last) / 1e3
            for kernel, value in sums.items():
                samples[kernel].append(value)
    medians = {name: median(values) for name, values in samples.items()}
    times.copy_bandwidth = 2 * g.nbytes / medians.pop("copy")
    times.steps = {name: medians.pop(name) for name in optimizers if name in turns}
    times.passes = medians
    passes = {"first pass": g.nbytes, "last pass": g.nbytes + 2 * g.numel() * variant.x.itemsize}
    times.bytes = {OURS: sum(passes.values()), **passes}


@contextmanager
def _noted(times: Times, name: str) -> Iterator[None]:
    """Note an exception as a problem of what is timed, and go on with the rest."""
    try:
        yield
    except Exception as problem:
        times.problems[name] = "".join(traceback.format_exception(problem, limit=-6)).strip()


def show(all_times: Sequence[Times], nominal: float | None) -> str:
    """Write a table for each variant, in plain text for a terminal and for an issue."""
    base = f"the nominal {nominal / 1e9:,.0f} GB/s" if nominal else "a copy's speed"
    parts = []
    for variant in dict.fromkeys(times.variant for times in all_times):
        group = [times for times in all_times if times.variant == variant]
        rows = {"columns": [f"{times.columns}" for times in group]}
        for name in dict.fromkeys(name for times in group for name in (*times.passes, *times.steps)):
            rows[name] = [_cell(times, name, nominal) for times in group]
        rows["a copy, GB/s"] = [f"{times.copy_bandwidth / 1e9:,.0f}" for times in group]
        lines = [f"  {name:<26}" + "".join(f"{cell:>16}" for cell in cells) for name, cells in rows.items()]
        head = f"{variant}: ms, and share of {base}; matrices of about {ELEMENTS // 2**20} M elements"
        parts.append("\n".join([head, *(line.rstrip() for line in lines)]))
    for times in all_times:
        for name, problem in times.problems.items():
            parts.append(f"{name}, {times.variant}, {times.rows}×{times.columns}:\n{problem}")
    return "\n\n".join(parts)


def _cell(times: Times, name: str, nominal: float | None) -> str:
    """Write milliseconds, and the share of the bandwidth where bytes are what counts."""
    duration = {**times.passes, **times.steps}.get(name)
    if not duration:
        return "-"
    share = times.bytes.get(name, 0) / duration / (nominal or times.copy_bandwidth)
    return f"{1e3 * duration:.3f}" + (f" {100 * share:3.0f} %" if share else " " * 6)
