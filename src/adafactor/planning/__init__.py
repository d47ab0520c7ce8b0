"""What training a model takes, before it is trained: `adafactor.plan` and `adafactor plan`."""

from adafactor.planning.communication import plan_shards, shapes_of
from adafactor.planning.memory import plan
from adafactor.planning.models import PRESETS
from adafactor.planning.optimizers import SETTINGS
from adafactor.planning.show import Bytes, Line, Plan

__all__ = ["PRESETS", "SETTINGS", "Bytes", "Line", "Plan", "plan", "plan_shards", "shapes_of"]
