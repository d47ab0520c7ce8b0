"""What training a model takes, before it is trained: `adafactor.plan` and `adafactor plan`."""

from adafactor.planning.command import plan
from adafactor.planning.communication import plan_shards, shapes_of
from adafactor.planning.memory import SETTINGS, Bytes, Line, Situation
from adafactor.planning.models import PRESETS
from adafactor.planning.show import Plan

__all__ = ["PRESETS", "SETTINGS", "Bytes", "Line", "Plan", "Situation", "plan", "plan_shards", "shapes_of"]
