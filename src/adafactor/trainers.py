"""Make the optimizer inside a trainer that hands over the model instead of bare parameters."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import get_world_size, is_available, is_initialized

from adafactor.backward import step_in_backward as attach
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
        max_norm: float | None = None,
        **keywords: Any,
    ) -> Adafactor:
        """Return the optimizer of the model's trainable parameters.

        Args:
            model: what is trained.
            weight_decay: of matrices; vectors, which are biases and norms, have none.
            step_in_backward: attach `adafactor.step_in_backward` with the next two arguments. Switch the trainer's own
                clipping off (`max_grad_norm=0`): there are no gradients left to clip.
            accumulate: the trainer's `gradient_accumulation_steps`.
            max_norm: see `adafactor.step_in_backward`.
            **keywords: of `Adafactor`.
        """
        if step_in_backward and is_available() and is_initialized() and get_world_size() > 1:
            raise ValueError("step_in_backward=True needs a single process: others' gradients are added after it")
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = Adafactor([group for group in groups if group["params"]], **keywords)
        if step_in_backward:
            attach(model, optimizer, accumulate=accumulate, max_norm=max_norm)
        return optimizer
