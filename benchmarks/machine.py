"""What a step is measured on: a processor or a GPU with its clock, caches and memory. Nothing names the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

COPIED = 128 << 20  # bytes of each buffer of a copy, at least; and four times the cache
STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Freed memory goes back to the system at once. Otherwise what one step freed is still resident in the next, whose
# need would not show.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}


class Machine(Protocol):
    """A device, seen by the benchmark."""

    device: torch.device

    def seconds(self, function: Callable[[], object], repeats: int = 1) -> float:
        """Return the seconds of one call, from so many in a row."""

    def cache_bytes(self) -> int | None:
        """Return the size of the last-level cache."""

    def available_bytes(self) -> int | None:
        """Return the memory that is free."""

    def describe(self) -> dict[str, Any]:
        """Say what it is; nothing that names the machine."""


class Processor:
    """The CPU: every step is finished when the call returns."""

    device = torch.device("cpu")

    def seconds(self, function: Callable[[], object], repeats: int = 1) -> float:
        """Take the time by the clock."""
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats

    def cache_bytes(self) -> int | None:
        """Return the size of the processor's last-level cache, where the system says."""
        sizes = []
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            if size := re.fullmatch(r"(\d+)([KM])", path.read_text().strip()):
                sizes.append(int(size[1]) << {"K": 10, "M": 20}[size[2]])
        return max(sizes, default=None)

    def available_bytes(self) -> int | None:
        """Return the machine's free memory, where the system says."""
        return _memory("MemAvailable")

    def describe(self) -> dict[str, Any]:
        """Return processor, cores, last-level cache, memory, system."""
        return {
            "processor": _processor(),
            "cores": cores(),
            "cache_bytes": self.cache_bytes(),
            "memory_bytes": _memory("MemTotal"),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        }


class Card:
    """A GPU: a call returns before the work is done, so the device's own events say how long it took."""

    def __init__(self, device: torch.device, module: Any = None):
        """Take a device and torch's module for it, or a stand-in with the same functions."""
        self.device = device
        self.module = torch.get_device_module(device) if module is None else module

    def seconds(self, function: Callable[[], object], repeats: int = 1) -> float:
        """Take the time between two events in the queue of the device."""
        return device_seconds(self.module, self.device, function, repeats)

    def peak(self, function: Callable[[], object]) -> int:
        """Return the bytes that a call holds beyond those that are held now, as torch's allocator counts them."""
        self.module.synchronize(self.device)
        self.module.reset_peak_memory_stats(self.device)
        before = self.module.memory_allocated(self.device)
        function()
        self.module.synchronize(self.device)
        return max(0, int(self.module.max_memory_allocated(self.device)) - int(before))

    def cache_bytes(self) -> int | None:
        """Return the size of the L2 cache, where torch says."""
        size = getattr(self.module.get_device_properties(self.device), "L2_cache_size", None)
        return int(size) if size else None

    def available_bytes(self) -> int | None:
        """Return the card's free memory, as the driver says."""
        return int(self.module.mem_get_info(self.device)[0])

    def describe(self) -> dict[str, Any]:
        """Describe the card beside the machine it is in."""
        properties = self.module.get_device_properties(self.device)
        return {
            **Processor().describe(),
            "card": str(properties.name),
            "card_memory_bytes": int(properties.total_memory),
            "card_cache_bytes": self.cache_bytes(),
        }


def find(name: str) -> Machine:
    """Return the machine of this name, as torch writes devices; a ValueError if there is no such device here."""
    device = find_device(name)
    return Processor() if device.type == "cpu" else Card(device)


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


def device_seconds(module: Any, device: torch.device, function: Callable[[], object], repeats: int = 1) -> float:
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


class Copy:
    """The copy that bandwidth is measured with in every round."""

    def __init__(self, machine: Machine) -> None:
        """Make two buffers, and touch them."""
        size = max(COPIED, 4 * (machine.cache_bytes() or 0))
        self.machine = machine
        self.source: Tensor = torch.ones(size // 4, device=machine.device)
        self.target: Tensor = torch.zeros(size // 4, device=machine.device)

    def bandwidth(self) -> float:
        """Return bytes a second, of those read and those written."""
        return 2 * self.source.nbytes / self.machine.seconds(lambda: self.target.copy_(self.source))


def versions(packages: set[str]) -> dict[str, str]:
    """Return the versions of torch, adafactor and these packages, where they are installed."""
    numbers = {"torch": str(torch.__version__)}
    for name in sorted({"adafactor", "numpy", *packages}):
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            continue
    return numbers


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> list[float] | None:
    """Return how many processes wanted to run in the last 1, 5 and 15 minutes, where the system says."""
    return [round(number, 2) for number in os.getloadavg()] if hasattr(os, "getloadavg") else None


def _memory(field: str) -> int | None:
    path = Path("/proc/meminfo")
    line = re.search(rf"^{field}:\s+(\d+) kB", path.read_text(), flags=re.M) if path.exists() else None
    return int(line[1]) << 10 if line else None


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    line = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), flags=re.M) if path.exists() else None
    return line[1].strip() if line else platform.processor() or platform.machine()


def peak(function: Callable[[], object]) -> int:
    """Return how far the resident set of this process rises above what it is now while the function runs."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    PEAK.write_text("5")  # the peak is now what is resident
    before = status("VmRSS")
    function()
    return max(0, status("VmHWM") - before)


def status(field: str) -> int:
    """Return what the system counts for this process: `VmRSS` resident, `VmHWM` their peak, `VmData` allocated."""
    line = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), flags=re.M)
    assert line
    return int(line[1]) << 10
