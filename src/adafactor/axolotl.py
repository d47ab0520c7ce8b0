"""A plugin for axolotl, whose YAML file has no other place for an optimizer: `plugins: [adafactor.axolotl.Plugin]`."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from adafactor.core.settings import read_text
from adafactor.trainers import FromModel


class Plugin(BasePlugin):
    """Makes the trainer's optimizer with `FromModel`; `optim_args` are its keywords, a mapping or "a=1,b=2"."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Called by axolotl before the optimizer is made; the learning rate and weight decay are the trainer's."""
        given: Any = cfg.optim_args or {}
        pairs = given.items() if hasattr(given, "items") else [word.split("=") for word in given.split(",")]
        trainer.optimizer_cls_and_kwargs = (FromModel, {name.strip(): read_text(value) for name, value in pairs})
