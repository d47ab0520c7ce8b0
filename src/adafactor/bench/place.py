"""Where a step is measured: a clock for the processor, events for a GPU, and what each knows about itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from adafactor.bench import machine


class Place(Protocol):
    """A device, seen by the benchmark."""

    device: torch.device

    def seconds(self, function: Callable[[], object], repeats: int = 1) -> float:
        """Seconds of one call, from so many in a row."""

    def peak(self, function: Callable[[], object]) -> int | None:
        """Bytes held while this runs, beyond those that are held now; None: ask a process of its own."""

    def cache_bytes(self) -> int | None:
        """The size of the last-level cache."""

    def available_bytes(self) -> int | None:
        """The memory that is free."""

    def describe(self) -> dict[str, Any]:
        """What it is; nothing that names the machine."""


class Processor:
    """The CPU: every step is finished when the call returns."""

    device = torch.device("cpu")

    def seconds(self, function: Callable[[], object], repeats: int = 1) -> float:
        """By the clock."""
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats

    def peak(self, function: Callable[[], object]) -> int | None:
        """Only the peak of a whole process is known: `memory.py`."""
        return None

    def cache_bytes(self) -> int | None:
        """Of the processor."""
        return machine.cache_bytes()

    def available_bytes(self) -> int | None:
        """Of the machine."""
        return machine.available_bytes()

    def describe(self) -> dict[str, Any]:
        """Processor, cores, cache, memory, system."""
        return machine.describe()


class Card:
    """A GPU: a call returns before the work is done, so the device's own events say how long it took."""

    def __init__(self, device: torch.device, module: Any = None):
        """Take a device and torch's module for it, or a stand-in with the same functions."""
        self.device = device
        self.module = torch.get_device_module(device) if module is None else module

    def seconds(self, function: Callable[[], object], repeats: int = 1) -> float:
        """Between two events in the queue of the device; the queue is empty before the first."""
        first, last = (self.module.Event(enable_timing=True) for _ in range(2))
        self.module.synchronize(self.device)
        first.record()
        for _ in range(repeats):
            function()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / repeats

    def peak(self, function: Callable[[], object]) -> int | None:
        """As torch's allocator counts it."""
        self.module.synchronize(self.device)
        self.module.reset_peak_memory_stats(self.device)
        before = self.module.memory_allocated(self.device)
        function()
        self.module.synchronize(self.device)
        return max(0, int(self.module.max_memory_allocated(self.device)) - int(before))

    def cache_bytes(self) -> int | None:
        """L2, where torch says."""
        size = getattr(self.module.get_device_properties(self.device), "L2_cache_size", None)
        return int(size) if size else None

    def available_bytes(self) -> int | None:
        """As the driver says."""
        return int(self.module.mem_get_info(self.device)[0])

    def describe(self) -> dict[str, Any]:
        """The card beside the machine it is in."""
        properties = self.module.get_device_properties(self.device)
        found = {
            "card": str(properties.name),
            "card_memory_bytes": int(properties.total_memory),
            "card_cache_bytes": self.cache_bytes(),
        }
        return {**machine.describe(), **found}


def find(name: str) -> Place:
    """The place of this name, as torch writes devices; a ValueError if there is no such device here."""
    try:
        device = torch.device(name)
    except RuntimeError as wrong:
        raise ValueError(f"--device {name} is not a device that torch knows") from wrong
    if device.type == "cpu":
        return Processor()
    if device.type not in ("cuda", "xpu"):
        raise ValueError(f"--device {name}: there are cpu, cuda (also for ROCm) and xpu")
    module = torch.get_device_module(device)
    if not module.is_available():
        raise ValueError(f"there is no {device.type} device here that torch {torch.__version__} can use")
    number = module.current_device() if device.index is None else device.index
    if not 0 <= number < module.device_count():
        raise ValueError(f"--device {name}: there are {module.device_count()} {device.type} devices, from number 0")
    return Card(torch.device(device.type, number))
