"""Make the optimizer of ms-swift's trainers.

    swift sft --external_plugins examples/swift_plugin.py --optimizer adafactor --learning_rate 1e-4 ...

Keywords of Adafactor go into --optim_args, such as "rounding=stochastic,step_in_backward=true".
"""

from __future__ import annotations

from swift.optimizers import OptimizerCallback, optimizers_map
from torch import nn

from adafactor import Adafactor
from adafactor.trainers import FromModel


class AdafactorCallback(OptimizerCallback):
    """What ms-swift calls when it wants an optimizer."""

    def create_optimizer(self, model: nn.Module | None = None) -> Adafactor:
        """With the learning rate, the weight decay and the `optim_args` of the training arguments."""
        return FromModel()(self.trainer.model if model is None else model, self.args)


optimizers_map["adafactor"] = AdafactorCallback
