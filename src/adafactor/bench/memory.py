"""Extra memory during a step: the peak of the resident set, in a process of its own for each contender."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adafactor.bench.contenders import Contender
    from adafactor.bench.place import Place

STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Freed memory goes back to the system at once. Otherwise what one step freed is still resident in the next, whose
# need would not show.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}


def extra_bytes(contender: str, shapes: Sequence[tuple[int, ...]], dtype: str, threads: int) -> int | None:
    """The most memory that a step held beyond parameters, gradients and state; None where it cannot be known.

    The first two steps are not looked at: they make the state, compile, and start threads. The kernel counts pages
    in batches, so that small figures are rough.
    """
    if not PEAK.exists():  # Linux has it
        return None
    request = json.dumps({"contender": contender, "shapes": shapes, "dtype": dtype, "threads": threads})
    environment = {**os.environ, **ENVIRONMENT, "NPROC": str(threads)}
    command = [sys.executable, "-m", "adafactor.bench.memory", request]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        return None
    return int(child.stdout.split()[-1])


def extra_bytes_on(place: Place, contender: Contender, shapes: Sequence[tuple[int, ...]], dtype: str) -> int | None:
    """The same for a place that counts its own memory, in this process: the third step, as in a process of its own."""
    from adafactor.bench.contenders import parameters

    runner = contender.make(parameters(shapes, dtype, device=place.device))
    runner.step()
    runner.step()
    return place.peak(runner.step)


def peak(function: Callable[[], object]) -> int:
    """How far the resident set of this process rises above what it is now while the function runs."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    PEAK.write_text("5")  # the peak is now what is resident
    before = status("VmRSS")
    function()
    return max(0, status("VmHWM") - before)


def status(field: str) -> int:
    """Bytes that the system counts for this process: `VmRSS` resident, `VmHWM` their peak, `VmData` allocated."""
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), flags=re.M)
    assert found
    return int(found[1]) << 10


def main(request: str) -> None:
    """In the child: three steps, the peak of the last."""
    import torch

    from adafactor.bench.contenders import find, parameters

    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    shapes = [tuple(shape) for shape in asked["shapes"]]
    runner = find(asked["contender"]).make(parameters(shapes, asked["dtype"]))
    runner.step()
    runner.step()
    print(peak(runner.step))


if __name__ == "__main__":
    main(sys.argv[1])
