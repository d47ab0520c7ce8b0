"""What training a model takes, before it is trained: `adafactor.plan` and `adafactor plan`."""

from adafactor.planning.bill import Bytes, Line, Plan, plan
from adafactor.planning.models import PRESETS
from adafactor.planning.optimizers import SETTINGS
from adafactor.planning.sharded import plan_shards, shapes_of

__all__ = ["PRESETS", "SETTINGS", "Bytes", "Line", "Plan", "plan", "plan_shards", "shapes_of"]
