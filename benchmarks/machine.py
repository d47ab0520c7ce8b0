"""What a step is measured on: caches, memory, cores and load. Nothing names the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

COPIED = 128 << 20  # bytes of each buffer of a copy, at least; and four times the cache
STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Freed memory goes back to the system at once. Otherwise what one step freed is still resident in the next, whose
# need would not show.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
PACKAGES = ("adafactor", "pytorch_optimizer", "timm", "transformers")


def describe(command: str) -> dict[str, Any]:
    """Say what was run, where, when and with what; nothing that names the machine."""
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "cache_bytes": cache_bytes(),
        "memory_bytes": _memory("MemTotal"),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": {"torch": str(torch.__version__), **_versions()},
    }


def seconds(function: Callable[[], object], repeats: int = 1, device: torch.device | None = None) -> float:
    """Return the seconds of one call, from so many in a row; a GPU has finished before and after."""
    wait = (lambda: None) if device is None or device.type == "cpu" else torch.get_device_module(device).synchronize
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    wait()
    return (time.perf_counter() - start) / repeats


class Copy:
    """The copy that bandwidth is measured with in every round."""

    def __init__(self, device: torch.device) -> None:
        """Make two buffers, and touch them."""
        size = max(COPIED, 4 * (cache_bytes() or 0)) // 4
        self.source, self.target, self.device = (
            torch.ones(size, device=device),
            torch.zeros(size, device=device),
            device,
        )

    def bandwidth(self) -> float:
        """Return bytes a second, of those read and those written."""
        return 2 * self.source.nbytes / seconds(lambda: self.target.copy_(self.source), 1, self.device)


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Return how many processes wanted to run in the last minute, where the system says."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def cache_bytes() -> int | None:
    """Return the size of the processor's last-level cache, where the system says."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if size := re.fullmatch(r"(\d+)([KM])", path.read_text().strip()):
            sizes.append(int(size[1]) << {"K": 10, "M": 20}[size[2]])
    return max(sizes, default=None)


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


def _memory(field: str) -> int | None:
    path = Path("/proc/meminfo")
    line = re.search(rf"^{field}:\s+(\d+) kB", path.read_text(), flags=re.M) if path.exists() else None
    return int(line[1]) << 10 if line else None


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    line = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), flags=re.M) if path.exists() else None
    return line[1].strip() if line else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
