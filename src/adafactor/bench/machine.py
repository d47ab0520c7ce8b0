"""What the numbers were measured on: processor, caches, memory, versions; nothing that names the machine."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from adafactor.bench.place import Place

COPIED = 128 << 20  # bytes of each buffer of a copy, at least; and four times the cache


def describe() -> dict[str, Any]:
    """Processor, cores, last-level cache, memory, system."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "cache_bytes": cache_bytes(),
        "memory_bytes": _memory("MemTotal"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions(packages: set[str]) -> dict[str, str]:
    """Versions of torch, adafactor and these packages, where they are installed."""
    found = {"torch": str(torch.__version__)}
    for name in sorted({"adafactor", "numpy", *packages}):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_bytes() -> int | None:
    """The size of the last-level cache, where the system says."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if found := re.fullmatch(r"(\d+)([KM])", path.read_text().strip()):
            sizes.append(int(found[1]) << {"K": 10, "M": 20}[found[2]])
    return max(sizes, default=None)


def available_bytes() -> int | None:
    """The memory that is free for us, where the system says."""
    return _memory("MemAvailable")


class Copy:
    """The copy that bandwidth is measured with, one of the contenders in every round."""

    def __init__(self, place: Place) -> None:
        """Two buffers, touched."""
        size = max(COPIED, 4 * (place.cache_bytes() or 0))
        self.place = place
        self.source: Tensor = torch.ones(size // 4, device=place.device)
        self.target: Tensor = torch.zeros(size // 4, device=place.device)

    def bandwidth(self) -> float:
        """Bytes a second, of those read and those written."""
        return 2 * self.source.nbytes / self.place.seconds(lambda: self.target.copy_(self.source))


def _memory(field: str) -> int | None:
    path = Path("/proc/meminfo")
    found = re.search(rf"^{field}:\s+(\d+) kB", path.read_text(), flags=re.M) if path.exists() else None
    return int(found[1]) << 10 if found else None


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), flags=re.M) if path.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
