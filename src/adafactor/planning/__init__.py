"""What training a model takes, before it is trained: `adafactor.plan` and `adafactor plan`.

| module | what it does |
|---|---|
| `models` | describes a model by the shapes of its weights: a preset, a module, a configuration |
| `memory` | counts the bytes of a setting (an optimizer and its precision), part by part, on each of some devices |
| `communication` | counts what a sharded step sends |
| `show` | holds the counts of many settings, a `Plan`, and writes tables, bars, advice, JSON and a picture |
| `command` | goes from arguments to plans |
"""

from adafactor.planning.command import plan
from adafactor.planning.communication import plan_shards, shapes_of
from adafactor.planning.memory import SETTINGS, Bytes, Line, Situation
from adafactor.planning.models import PRESETS
from adafactor.planning.show import Plan

__all__ = ["PRESETS", "SETTINGS", "Bytes", "Line", "Plan", "Situation", "plan", "plan_shards", "shapes_of"]
