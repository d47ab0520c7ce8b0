"""What stands in the place of a gradient that was used and freed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from adafactor.core import dtensor


class Spent(Tensor):
    """Stands for a gradient that was used and freed: has a shape but no data, and says so to whoever asks for it.

    With None in its place, `clip_grad_norm_` would find nothing to clip and say nothing. Where its norm was measured,
    it can still be asked for, and scaled by one: so `clip_grad_norm_` works as long as it has nothing to do.
    """

    of: str
    measured: Tensor | None
    nbytes = 0

    @staticmethod
    def __new__(cls, p: Tensor, name: str, measured: Tensor | None = None) -> Spent:
        """In place of the gradient of `p`."""
        made: Spent = Tensor._make_wrapper_subclass(cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device)
        made.of, made.measured = name, measured
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Without data."""
        return f"Spent(the gradient of {self.of}, used and freed inside backward)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Every operation comes here."""
        aten = torch.ops.aten
        spent = next(arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Spent))
        if func in (aten.view.default, aten.alias.default, aten.detach.default):  # a DTensor makes these of its part
            return Spent(spent, spent.of, spent.measured)
        if func in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar) and args[1:] in ((), (2,)):
            norms = [one.measured for one in tree_leaves(args[0])]
            if None not in norms:
                dtype = (kwargs or {}).get("dtype")
                copies = [norm.to(dtype or norm.dtype, copy=True) for norm in norms]
                return copies if isinstance(args[0], list) else copies[0]
        if func in (aten.mul_.Tensor, aten._foreach_mul_.Tensor) and spent.measured is not None:
            if isinstance(args[1], Tensor) and args[1].numel() == 1 and args[1].item() == 1:
                return spent if func is aten.mul_.Tensor else None  # each as torch's own does
        if func in (aten.add_.Tensor, aten.add.Tensor):
            raise second_gradient(spent.of)
        raise RuntimeError(
            f"the gradient of {spent.of} is gone: step_in_backward has used and freed it, so {func} cannot have it. "
            "clip_grad_norm_, GradScaler and whatever else needs all gradients at once do not work with it. Instead "
            "of clipping by norm, Adafactor clips each update (clip=), and step_in_backward(…, max_norm=) limits the "
            "norm by that of the previous step; instead of float16 with a scaler, use bfloat16; instead of "
            "DistributedDataParallel, give step_in_backward(…, process_group=)"
        )


def second_gradient(name: str) -> RuntimeError:
    """What to raise when a gradient comes for a parameter whose step is over."""
    return RuntimeError(
        f"a second gradient came for {name}, which has already stepped inside backward. Call optimizer.step() after "
        "each backward(); if several make one step, give step_in_backward(…, accumulate=their number); if checkpointed "
        "parts of the model share this parameter, checkpoint them with use_reentrant=False"
    )


def spend(p: Tensor, name: str, measured: Tensor | None) -> None:
    """Free the gradient of a parameter."""
    spent: Tensor = Spent(dtensor.local(p), name, measured)
    if dtensor.is_sharded(p):
        from torch.distributed.tensor import DTensor

        mesh, places = p.device_mesh, p.placements
        spent = DTensor.from_local(spent, mesh, places, run_check=False, shape=p.shape, stride=p.stride())
    p.grad = spent


def is_spent(g: Tensor | None) -> bool:
    """Whether a gradient was used and freed."""
    return isinstance(g._local_tensor if dtensor.is_sharded(g) else g, Spent)


def forget(p: Tensor) -> None:
    """Put None in the place of a gradient that was used and freed."""
    if is_spent(p.grad):
        p.grad = None
