"""Make the optimizer inside a trainer that hands over the model instead of bare parameters."""

from __future__ import annotations

import math
import os
import weakref
from typing import Any

from torch import nn
from torch.distributed import get_world_size, is_available, is_initialized
from torch.nn.modules.module import register_module_forward_pre_hook

from adafactor.backward import step_in_backward as attach
from adafactor.core import dtensor
from adafactor.optimizer import Adafactor


class FromModel:
    """Makes an `Adafactor` from a model: for `optimizer_cls_and_kwargs` of transformers' and TRL's trainers.

    Given `Adafactor` itself, a `Trainer` makes groups of bare parameters. Given this class, it hands over the model:
    so `optimizer.report()` has the parameters' names, and the step can move into backward.

    Examples:
        >>> optimizer = FromModel()(nn.Linear(3, 2), lr=1e-3, weight_decay=0.1)
        >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
        [(['weight'], 0.1), (['bias'], 0.0)]
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        weight_decay: float = 0.0,
        step_in_backward: bool = False,
        accumulate: int = 1,
        max_norm: float = math.inf,
        **keywords: Any,
    ) -> Adafactor:
        """Return the optimizer of the model's trainable parameters.

        Args:
            model: what is trained.
            weight_decay: of matrices; vectors, which are biases and norms, have none.
            step_in_backward: attach `adafactor.step_in_backward` with the next two arguments. Switch the trainer's own
                clipping off (`max_grad_norm=0`): there are no gradients left to clip. Among several processes the
                trainer must shard the model with FSDP2.
            accumulate: the trainer's `gradient_accumulation_steps`; 1 under FSDP2, where trainers reduce gradients in
                the last backward pass of a step only.
            max_norm: see `adafactor.step_in_backward`. The norm is always measured: it is
                `optimizer.param_groups[0]["grad_norm"]`, and the trainer, which finds no gradients, logs 0.
            **keywords: of `Adafactor`.
        """
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = Adafactor([group for group in groups if group["params"]], **keywords)
        if step_in_backward:
            attach_in_trainer(model, optimizer, accumulate, max_norm)
        return optimizer


def in_backward(training_args: Any) -> dict[str, Any]:
    """Return how often transformers' trainer accumulates, and the limit of the norm, which it no longer has to keep.

    `max_grad_norm` becomes 0: there are no gradients left to clip. Without a limit the norm is still measured. Under
    FSDP2 micro-batches are added up before our hooks see them, unless each is reduced.
    """
    max_norm, training_args.max_grad_norm = training_args.max_grad_norm or math.inf, 0.0
    each = (training_args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch", False)
    is_once = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and not each
    return {"accumulate": 1 if is_once else training_args.gradient_accumulation_steps, "max_norm": max_norm}


def attach_in_trainer(model: nn.Module, optimizer: Adafactor, accumulate: int, max_norm: float) -> None:
    """Attach `adafactor.step_in_backward`; where processes may share the model, when it is called for the first time.

    A trainer shards or wraps the model after it has made the optimizer, and then exchanges the optimizer's parameters.
    """
    if not (is_available() and is_initialized()):
        attach(model, optimizer, accumulate=accumulate, max_norm=max_norm)
        return
    the_model, the_optimizer = weakref.ref(model), weakref.ref(optimizer)  # they may go without ever being used

    def attach_at_first_call(called: nn.Module, args: Any) -> None:
        model, optimizer = the_model(), the_optimizer()
        if model is None or optimizer is None:
            hook.remove()
        elif any(module is model for module in called.modules()):
            hook.remove()
            _check_sharded(model)
            optimizer._buckets.follow(optimizer.param_groups, optimizer.state)  # those of before can be freed
            attach(model, optimizer, accumulate=accumulate, max_norm=max_norm)

    # This one comes before those of a module: FSDP2 puts the one that gathers parameters before all others there.
    hook = register_module_forward_pre_hook(attach_at_first_call)


def _check_sharded(model: nn.Module) -> None:
    if get_world_size() > 1 and not any(dtensor.is_sharded(p) for p in model.parameters()):
        raise ValueError(
            f"step_in_backward=True among {get_world_size()} processes needs a model that FSDP2 has sharded "
            "(transformers: fsdp=True), and this one is not: DistributedDataParallel adds up gradients after they "
            "would have been used. Train with FSDP2, or leave step_in_backward out"
        )
