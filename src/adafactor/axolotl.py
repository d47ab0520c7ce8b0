"""A plugin for axolotl, whose YAML file has no other place for an optimizer: `plugins: [adafactor.axolotl.Plugin]`."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from adafactor.trainers import FromModel


class Plugin(BasePlugin):
    """Makes the trainer's optimizer with `FromModel`, to which `optim_args` may give keywords."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Name the optimizer before it is made; axolotl hands its `TrainingArguments` to it."""
        trainer.optimizer_cls_and_kwargs = (FromModel, {})
