"""The backend in Triton, for tensors on a GPU: two passes over the data, a handful of launches for a whole model.

| launch | what it does |
|---|---|
| `begin_step` | the rates of the step; is ΣX² what the last step has left? A sample tells |
| `measure` | ΣX² where it is not; mostly there is nothing to do |
| `first_pass` | R, and column sums of G² and of G²/R; one launch for tensors whose rows are held in the same way |
| `fold` | C, ΣU² by columns; is the step taken, α |
| `last_pass` | clipping, X, ΣX², and what is kept of G |

`table.py` describes tensors to the kernels, in the order of `fields.py`; `sizes.py` says how they are divided among
programs, `rates.py` what follows from settings and t, `kind.py` what a kernel is compiled for. Every kernel is given
one `Memory`, with all tables and scratch, and looks up its matrix there (`matrix.py`). `tile.py` has the loop from G to
X. Of shards, `shards.py` hands over sums between the passes. `turns.py` lets one process at a time compile a kernel.

There are no atomics and no program waits for another, so the bits do not depend on the order in which programs run.
Everything that changes from step to step lies on the device, so a step can be captured in a graph. A gradient that does
not begin at a multiple of 16 bytes is stepped by launches of its own: the tensors beside it keep their kernels and
their bits.

With TRITON_INTERPRET=1 in the environment it steps tensors on a CPU, slowly, for whoever wants to check or debug it.
"""

from __future__ import annotations

import torch
from triton import knobs

from adafactor.core.contract import Parameter, why_not_plain
from adafactor.core.factoring import Factored
from adafactor.kernels.memory_order import MemoryOrder, draws_words, numbering, stored
from adafactor.kernels.triton.executor import Executor
from adafactor.kernels.triton.kind import Kind
from adafactor.kernels.triton.layout import LIKE_X, block_lanes, factored_axes, has_blocks, memory_order, number_strides
from adafactor.kernels.triton.sizes import LINE, NARROW

INTERPRETED = knobs.runtime.interpret  # decided when the kernels are imported
DEVICES = ("cuda", "xpu")  # ROCm's are called cuda, too
FAR_APART = "its neighbours in memory are numbered too far apart for stochastic rounding"
LONGEST = 2**30  # elements of a row, and rows: they are counted in 32 bits, and so are steps from row to row


def why_not(parameter: Parameter) -> str | None:
    """What is in the way of stepping this parameter; None if nothing is."""
    x, form = parameter.x, parameter.gradient
    if x.device.type not in DEVICES and not (INTERPRETED and x.is_cpu):
        return f"it is on {x.device}"
    if reason := why_not_plain(parameter):
        return reason
    if not stored(x.dtype, form.dtype):
        return f"there is no kernel for a {x.dtype} parameter with a {form.dtype} gradient"
    for key in LIKE_X:
        if key in parameter.state and parameter.state[key].stride() != x.stride() and x.numel() > 1:
            return "its state has another order in memory"
    if has_blocks(parameter) and (reason := _why_not_blocks(parameter)):
        return reason
    if not isinstance(parameter.factoring, Factored):
        return _why_not_unfactored(parameter)
    p, q = factored_axes(parameter)
    factors = [s for key in ("row", "col") if key in parameter.state for s in parameter.state[key].stride()]
    if max(x.shape) >= LONGEST or max(x.shape[q] * s for s in (x.stride(q), form.stride[q])) >= LONGEST:
        return "its axes are too long"
    if max(x.stride(p), form.stride[p], *factors) >= LONGEST:
        return "its rows are too far apart in memory"
    steps = number_strides(parameter.shape)
    if draws_words(parameter) and max(steps[q], steps[p] if x.shape[q] <= NARROW else 0) * LINE >= 2**31:
        return FAR_APART
    return None


def _why_not_blocks(parameter: Parameter) -> str | None:
    scale = parameter.state["momentum_scale"]
    if block_lanes(parameter) > LINE:
        return f"the blocks of its int8 momentum have more than {LINE} elements"
    if isinstance(parameter.factoring, Factored):
        return None if scale.stride(-1) == 1 else "the scales of its int8 momentum are not side by side in memory"
    if parameter.x.is_contiguous() and scale.is_contiguous():
        return None
    return "it does not lie row by row in memory, as the blocks of its int8 momentum do"


def _why_not_unfactored(parameter: Parameter) -> str | None:
    order = memory_order(parameter)
    if not isinstance(order, MemoryOrder):
        return order
    shape = tuple(parameter.x.shape)
    if draws_words(parameter):
        numbers = numbering(order, shape, parameter.shape, parameter.offset)
        if numbers is None:
            return "its elements, in the order of memory, are not numbered in even steps, as stochastic rounding needs"
        if numbers[2] * LINE >= 2**31:
            return FAR_APART
    return None


def prepare(parameters: list[Parameter]) -> list[Executor]:
    """Make an executor of all parameters of the same kind on the same device."""
    kinds: dict[tuple[Kind, torch.device, bool, bool], list[Parameter]] = {}
    for parameter in parameters:
        sharded, raises = parameter.shard is not None, parameter.settings.on_nonfinite == "raise"
        kinds.setdefault((Kind.of(parameter), parameter.x.device, sharded, raises), []).append(parameter)
    return [Executor(members, kind) for (kind, *_), members in kinds.items()]
