"""Data parallel without a wrapper: gradients that every rank has for its own data, averaged over a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from adafactor.core.settings import RATES, Settings
from adafactor.distributed.agreement import Facts, first_difference, rounded
from adafactor.distributed.shard import Group

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the number of bytes


class Average:
    """Gradients on their way: started in `__init__`, in `grad` of the parameters after `finish`.

    A rank without a gradient adds zeros, as DistributedDataParallel does. Every rank says which ones it has: what no
    rank has stays None, and takes no step.
    """

    def __init__(self, params: Sequence[Tensor], group: Group):
        """Begin to send. One gradient is averaged where it lies, several are packed."""
        import torch.distributed as dist

        self._params, self._is_here = params, [p.grad is not None for p in params]
        self._flags = torch.tensor(self._is_here, dtype=torch.float32, device=group.device)
        self._orders = [sorted(range(p.dim()), key=p.stride, reverse=True) for p in params]  # of axes, in memory
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        flat = [g.permute(order).reshape(-1) for g, order in zip(grads, self._orders, strict=True)]
        self._packed = flat[0] if len(flat) == 1 else torch.cat(flat)
        for p in params:
            p.grad = None
        self._packed.div_(group.size)
        self._works = [dist.all_reduce(sent, group=group.handle, async_op=True) for sent in (self._packed, self._flags)]

    def finish(self) -> None:
        """Wait for the others, and hand the averages over."""
        for work in self._works:
            work.wait()
        # to read the flags would make the host wait for a device: only where something is missing
        has = self._is_here if all(self._is_here) else [here > 0 for here in self._flags.tolist()]
        pieces = self._packed.split([p.numel() for p in self._params])
        for p, order, piece, is_there in zip(self._params, self._orders, pieces, has, strict=True):
            if is_there:
                back = [order.index(axis) for axis in range(p.dim())]
                p.grad = piece.view([p.shape[axis] for axis in order]).permute(back)


def check_copies(given: Sequence[tuple[str, Tensor, Mapping[str, Any], Mapping[str, Any]]], group: Group) -> None:
    """Raise, on all ranks, unless they hold the same: of each parameter its name, itself, its group and its state."""
    answers = group.ask([_facts_of(*one) for one in given])
    if problem := first_difference(group.ranks(), answers, "parameter"):
        raise ValueError(
            f"{problem}: all ranks of process_group need the same parameters in the same order, with the same values, "
            "settings and steps. Give every rank the weights of the first, e.g. by torch.distributed.broadcast"
        )


def _facts_of(name: str, p: Tensor, settings: Mapping[str, Any], state: Mapping[str, Any]) -> Facts:
    """What must be the same on all ranks; values as a sum of their bits."""
    values = [p.detach(), *(value for value in state.values() if isinstance(value, Tensor))]
    bits = (t.contiguous().view(INTEGERS[t.element_size()]) for t in values)
    return {
        "name": name,
        "shape": tuple(p.shape),
        "dtype": str(p.dtype),
        "requires_grad": p.requires_grad,
        **{f.name: settings[f.name] if f.name not in RATES else rounded(settings[f.name]) for f in fields(Settings)},
        "step": torch.as_tensor(state.get("step", 0)).long().tolist(),
        "checksum": sum(int(t.sum(dtype=torch.int64)) for t in bits),
    }
