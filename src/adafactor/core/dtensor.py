"""Tensors that torch has cut between ranks: told apart, made for the state, and filled from checkpoints.

Nothing of torch.distributed is imported before there is a DTensor: that takes as long as the rest of torch, and is not
there on every platform.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adafactor.core.factoring import summed
from adafactor.core.momentum import Blocks, scale_shape

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import TypeIs


def is_sharded(t: object) -> TypeIs[DTensor]:
    """Is it a DTensor? Without their module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor as it is. Call it under `no_grad`."""
    if not is_sharded(t):
        return t
    part = t.to_local()
    waited: Tensor = part.wait() if hasattr(part, "wait") else part  # a gradient may still be on its way
    return waited


def parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts of tensors that may be DTensors: what `local` gives, quickly for many."""
    kind = sys.modules["torch.distributed.tensor"].DTensor
    found = [t._local_tensor if isinstance(t, kind) else t for t in tensors]
    return [t.wait() if type(t) is not Tensor and hasattr(t, "wait") else t for t in found]


def cut_axis(place: Placement) -> int | None:
    """The axis that a placement cuts; torch has more than one kind that does, and not all say so of themselves."""
    return None if place.is_replicate() or place.is_partial() else int(place.dim)  # type: ignore[attr-defined]


def beginning(p: DTensor) -> tuple[int, ...]:
    """Where this rank's part begins in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)[1])


def zero_means(p: DTensor, axis: int, dtype: torch.dtype) -> Tensor:
    """A statistic of `p` that is a mean over an axis: cut as `p` is, but for where that axis is what is cut."""
    from torch.distributed.tensor import Replicate

    part = p.to_local()
    means = torch.zeros(summed(tuple(part.shape), axis), dtype=dtype, device=part.device)
    places = [Replicate() if cut_axis(place) == axis else place for place in p.placements]
    return _whole(means, p, summed(tuple(p.shape), axis), places)


def zero_counts(p: DTensor, dtype: torch.dtype) -> Tensor:
    """A number for each slice of `p` along its first axis, cut as that axis is."""
    from torch.distributed.tensor import Replicate

    part = p.to_local()
    counts = torch.zeros(part.shape[:1], dtype=dtype, device=part.device)
    return _whole(
        counts, p, tuple(p.shape[:1]), [place if cut_axis(place) == 0 else Replicate() for place in p.placements]
    )


def zero_scales(p: DTensor, blocks: Blocks, name: str) -> Tensor:
    """The scales of an int8 momentum, cut as `p` is; where that would divide blocks, all ranks raise alike."""
    from torch.distributed.tensor import Replicate

    ranks = 1
    for k, place in enumerate(p.placements):
        cut = cut_axis(place)
        if cut is not None and cut >= blocks.axis and p.device_mesh.size(k) > 1:
            ranks *= p.device_mesh.size(k)
            if cut > blocks.axis or p.shape[cut] % (ranks * blocks.length):
                raise ValueError(
                    f"{name} of shape {tuple(p.shape)} is sharded along axis {cut} over {ranks} ranks, within blocks "
                    f"of an int8 momentum, which are {blocks.length} indices along axis {blocks.axis}: keep its "
                    f"momentum in bfloat16, for example with rules={{{name!r}: {{'momentum_dtype': 'bfloat16'}}}}"
                )
    part = p.to_local()
    flat = torch.zeros(scale_shape(tuple(part.shape), blocks), dtype=torch.float32, device=part.device)
    # an axis behind the blocks is still whole, on a mesh of one rank; the scales do not have it
    places = [Replicate() if (cut_axis(place) or 0) > blocks.axis else place for place in p.placements]
    return _whole(flat, p, scale_shape(tuple(p.shape), blocks), places)


def _whole(part: Tensor, p: DTensor, shape: tuple[int, ...], placements: Sequence[Placement]) -> Tensor:
    """The tensor of this shape of which a part is here, on the mesh of `p`."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    made = DTensor.from_local(part, p.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return made.to(part.device)  # with CPU offload, where the parameter is and not where its mesh is


def copy_(to: Tensor, value: Tensor) -> None:
    """Copy whole or sharded values into a whole or sharded tensor of the same shape."""
    if is_sharded(value) and not (is_sharded(to) and value.device_mesh == to.device_mesh):
        value = value.full_tensor()
    if is_sharded(to):
        from torch.distributed.tensor import DTensor, Replicate

        mesh, everywhere = to.device_mesh, [Replicate()] * to.device_mesh.ndim
        if not is_sharded(value):
            value = DTensor.from_local(value.to(to.device, to.dtype), mesh, everywhere, run_check=False)
        value = value.redistribute(placements=to.placements)  # from copies each rank takes its part, alone
    to.copy_(value)
