"""Make the optimizer inside a trainer that hands over the model instead of bare parameters."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.distributed import get_world_size, is_available, is_initialized

from adafactor.backward import step_in_backward as attach
from adafactor.core.settings import read_text
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
            training_args: transformers' `TrainingArguments`. What is not given here is taken from them: the keywords
                that `optim_args` names, `weight_decay`, and `learning_rate`, which is a step size for all weights
                (`relative=False, lr_decay=None`), as with `optim="adafactor"`; and what `in_backward` says.
            weight_decay: of matrices; vectors, which are biases and norms, have none. None is 0.
            step_in_backward: attach `adafactor.step_in_backward` with the next two arguments. Switch the trainer's own
                clipping off (`max_grad_norm=0`): there are no gradients left to clip.
            accumulate: the trainer's `gradient_accumulation_steps`. None is 1.
            max_norm: see `adafactor.step_in_backward`.
            **keywords: of `Adafactor`.
        """
        if training_args is not None:
            own = {"weight_decay": weight_decay, "accumulate": accumulate, "max_norm": max_norm}
            keywords = {**_read(training_args), **keywords, **{k: v for k, v in own.items() if v is not None}}
            if keywords.pop("step_in_backward", False) or step_in_backward:
                keywords = {**in_backward(training_args), "step_in_backward": True, **keywords}
            return self(model, **keywords)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": weight_decay or 0.0},
            {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = Adafactor([group for group in groups if group["params"]], **keywords)
        if step_in_backward:
            attach_in_one_process(model, optimizer, 1 if accumulate is None else accumulate, max_norm)
        return optimizer


def _read(training_args: Any) -> dict[str, Any]:
    """Return the keywords that transformers' `TrainingArguments` have for an optimizer."""
    pairs = [word.split("=") for word in (training_args.optim_args or "").replace(" ", "").split(",") if word]
    own = {"lr": training_args.learning_rate, "weight_decay": training_args.weight_decay}
    return {"relative": False, "lr_decay": None, **own, **{name: read_text(value) for name, value in pairs}}


def in_backward(training_args: Any) -> dict[str, Any]:
    """Return how often transformers' trainer accumulates, and the limit of the norm, which it no longer has to keep.

    `max_grad_norm` becomes 0: there are no gradients left to clip. Without a limit the norm is still measured, for the
    trainer's log.
    """
    max_norm, training_args.max_grad_norm = training_args.max_grad_norm or math.inf, 0.0
    return {"accumulate": training_args.gradient_accumulation_steps, "max_norm": max_norm}


def attach_in_one_process(model: nn.Module, optimizer: Adafactor, accumulate: int, max_norm: float | None) -> None:
    """Attach `adafactor.step_in_backward` before a trainer has wrapped the model, where it cannot see what will."""
    if is_available() and is_initialized() and get_world_size() > 1:
        raise ValueError("step_in_backward=True needs a single process: others' gradients are added after it")
    attach(model, optimizer, accumulate=accumulate, max_norm=max_norm)
