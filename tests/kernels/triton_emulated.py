"""Whole steps of the Triton backend in an emulator of a GPU: a tool of the workshop, no part of the project.

It executes the PTX that Triton makes, thread by thread, and raises on races, missing barriers, misaligned accesses and
accesses out of bounds. `find` looks for it in the folder that ADAFACTOR_EMULATOR names, or beside the repository.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from adafactor import Adafactor
from adafactor.kernels import triton as backend
from adafactor.kernels.triton import executor as work
from tests.kernels.triton_ahead import compiled_with

WRITTEN_FIRST = ("vectors_ptr", "inverses_ptr", "scratch_ptr", "sums_ptr")  # by the first pass


def find() -> bool:
    """Whether the emulator is there; if it is, its modules can be imported afterwards."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "emulator"
    folder = Path(os.environ.get("ADAFACTOR_EMULATOR", beside))
    if not (folder / "ptxemu.py").is_file():
        return False
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return True


@dataclass
class Emulator:
    """Stands in for `work.launch`: runs what is launched, and remembers it."""

    target: str
    order: str = "linear"
    reached: list[Tensor] = field(default_factory=list)  # through addresses in tables
    observe: Callable[[Any, tuple[int, int, int], list[Any], list[Tensor]], None] | None = None  # instead of checking
    launched: list[str] = field(default_factory=list)

    def launch(self, kernel: Any, programs: int, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        """Run a kernel."""
        if not programs:
            return
        grid, values = (programs, 1, 1), list(arguments)
        names = dict(zip(kernel.arg_names, values, strict=False))
        stat = "fp64" if options.get("ST") is tl.float64 else "fp32"
        compiled = compiled_with(kernel, options, self.target, stat)
        self.launched.append(kernel.fn.__name__)
        if self.observe is not None:
            self.observe(compiled, grid, values, self.reached)
            return
        emulated = import_module("ptxemu").PtxKernel(
            compiled.asm["ptx"], compiled.metadata.shared, compiled.metadata.num_warps
        )
        assert not emulated.unsupported, emulated.unsupported[:3]
        fresh = [i for i, name in enumerate(names) if name in WRITTEN_FIRST]
        new = tuple(fresh) if self.launched[-1] == "first_pass" else ()
        emulated.launch(grid, values, extra=self.reached, order=self.order, seed=1, races="raise", uninit=new)


def take(
    emulator: Emulator | None,
    monkeypatch: pytest.MonkeyPatch,
    tensors: list[Tensor],
    steps: list[list[Tensor]],
    between: Callable[[Tensor], object] | None = None,
    **settings: Any,
) -> tuple[list[Tensor], Adafactor]:
    """Take steps with these gradients: in the emulator, or with `eager` where there is none.

    Args:
        emulator: where to.
        monkeypatch: puts it in place of a GPU.
        tensors: the parameters as they are at first; they are copied.
        steps: the gradients of every step.
        between: is done to every parameter's `.data` before every step but the first: torch does not notice.
        **settings: of the optimizer.
    """
    parameters = [like_cuda(t).requires_grad_() for t in tensors]
    optimizer = Adafactor(parameters, backend="triton" if emulator else "eager", **settings)
    with monkeypatch.context() as patch:
        if emulator:
            patch.setattr(backend, "INTERPRETED", True)  # it takes tensors on the CPU; the kernels are compiled
            patch.setattr(work, "launch", emulator.launch)
        for gradients in steps:
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = like_cuda(g)
                if between and gradients is not steps[0]:
                    between(p.data)
            if emulator:
                states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
                emulator.reached = [
                    *(p.detach() for p in parameters),
                    *(p.grad for p in parameters if p.grad is not None),
                    *states,
                ]
            optimizer.step()
    return [p.detach() for p in parameters], optimizer


def like_cuda(tensor: Tensor) -> Tensor:
    """A copy that begins at a multiple of 512 bytes, as torch places it on a GPU."""
    size = tensor.element_size()
    room = torch.empty(tensor.numel() + 512 // size, dtype=tensor.dtype)
    first = -room.data_ptr() % 512 // size
    return room[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)
