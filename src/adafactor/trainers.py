"""Make the optimizer inside a trainer that hands over the model instead of bare parameters."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.distributed import get_world_size, is_available, is_initialized

from adafactor.backward import step_in_backward as attach
from adafactor.optimizer import Adafactor


class FromModel:
    """Makes an `Adafactor` from a model: for `optimizer_cls_and_kwargs` of transformers' and TRL's trainers.

    Given `Adafactor` itself, a `Trainer` makes groups of bare parameters. Given this class, it hands over the model:
    so `optimizer.report()` has the parameters' names, and the step can move into backward. A trainer may also hand
    over its `TrainingArguments`, as axolotl's does: what is not given as a keyword is then taken from them.

    Examples:
        >>> optimizer = FromModel()(nn.Linear(3, 2), lr=1e-3, weight_decay=0.1)
        >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
        [(['weight'], 0.1), (['bias'], 0.0)]
    """

    def __call__(
        self,
        model: nn.Module,
        training_args: Any = None,
        *,
        weight_decay: float | None = None,
        step_in_backward: bool = False,
        accumulate: int | None = None,
        max_norm: float | None = None,
        **keywords: Any,
    ) -> Adafactor:
        """Return the optimizer of the model's trainable parameters.

        Args:
            model: what is trained.
            training_args: transformers' `TrainingArguments`. Their `learning_rate` is a step size for all weights
                (`relative=False, lr_decay=None`), as with `optim="adafactor"`; their `weight_decay` counts too, and
                for `step_in_backward` what `attach_to_trainer` says.
            weight_decay: of matrices; vectors, which are biases and norms, have none. 0 by default.
            step_in_backward: attach `adafactor.step_in_backward` with the next two arguments. Switch the trainer's own
                clipping off (`max_grad_norm=0`): there are no gradients left to clip.
            accumulate: the trainer's `gradient_accumulation_steps`; 1 by default.
            max_norm: see `adafactor.step_in_backward`.
            **keywords: of `Adafactor`.
        """
        if training_args is not None:
            keywords = {"lr": training_args.learning_rate, "relative": False, "lr_decay": None} | keywords
            weight_decay = training_args.weight_decay if weight_decay is None else weight_decay
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": weight_decay or 0.0},
            {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = Adafactor([group for group in groups if group["params"]], **keywords)
        if step_in_backward:
            attach_to_trainer(model, optimizer, training_args, accumulate, max_norm)
        return optimizer


def attach_to_trainer(
    model: nn.Module,
    optimizer: Adafactor,
    training_args: Any = None,
    accumulate: int | None = None,
    max_norm: float | None = None,
) -> None:
    """Attach `adafactor.step_in_backward` inside a trainer of one process.

    Of transformers' `TrainingArguments` it takes `gradient_accumulation_steps` and `max_grad_norm`, unless they are
    given here, and sets the latter to 0: the trainer finds no gradients to clip.
    """
    if is_available() and is_initialized() and get_world_size() > 1:
        raise ValueError("step_in_backward=True needs a single process: others' gradients are added after it")
    if training_args is not None:
        accumulate = accumulate or training_args.gradient_accumulation_steps
        max_norm = max_norm or training_args.max_grad_norm or math.inf  # infinity: the trainer logs the norm
        training_args.max_grad_norm = 0.0
    attach(model, optimizer, accumulate=1 if accumulate is None else accumulate, max_norm=max_norm)
