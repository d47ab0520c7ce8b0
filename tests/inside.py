"""The only place where tests look into the optimizer and its kernels, or turn a screw that no user has.

Kernels are imported where they are needed: `conftest` imports this, and a test without them shall not need Numba.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from adafactor import Adafactor


def prepared(optimizer: Adafactor) -> object | None:
    """What a step left for the next one: the same object for as long as it is used again."""
    return optimizer._standing


def forget(optimizer: Adafactor) -> None:
    """Make the next step find out everything anew, as after loading a checkpoint."""
    optimizer._known.clear()
    optimizer._standing = None


def job_of(optimizer: Adafactor, p: Tensor) -> Any:
    """The compiled kernel's notes of a parameter, a NumPy record."""
    table = next(table for table in optimizer._known[p].fleet.tables if any(u.x is p for u in table.updates))
    return table.jobs[[u.x is p for u in table.updates].index(True)]


def read_squares(optimizer: Adafactor, p: Tensor) -> bool:
    """Whether the last compiled step had to read the parameter to know ΣX²."""
    return bool(job_of(optimizer, p)["looks"])


def carried_squares(optimizer: Adafactor, p: Tensor) -> float:
    """ΣX² as the last compiled step left it to the next; NaN if it must be read."""
    return float(job_of(optimizer, p)["left"])


def forget_paths() -> None:
    """Forget how tensors were cut into units."""
    from adafactor.kernels import paths

    paths._path.cache_clear()
    paths._flat_path.cache_clear()


def cut_into_units(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let so many elements be worth a thread's while; `conftest.small_units` is this with the cleaning up."""
    from adafactor.kernels import paths

    patch.setattr(paths, "UNIT", size)
    forget_paths()


def leave_to_one_thread(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let tensors up to this size be one thread's alone; 0: all threads share each."""
    from adafactor.kernels import cpu

    patch.setattr(cpu, "SMALL", size)


def cut_into_blocks(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let plain torch work on so many elements at a time."""
    from adafactor.kernels import eager

    patch.setattr(eager, "BLOCK_CPU", size)


def block() -> int:
    """The elements that plain torch works on at a time on a CPU."""
    from adafactor.kernels import eager

    return eager.BLOCK_CPU


def keep_scalars_on_the_device(patch: pytest.MonkeyPatch) -> None:
    """Treat CPU tensors as those of a device, where reading a scalar would make the host wait."""
    from adafactor import step
    from adafactor.kernels import eager

    patch.setattr(step, "scalar", lambda t: t.double())
    patch.setattr(eager, "scalar", lambda t: t.double())
