"""What training a model takes, before it is trained: `adafactor.plan` and `adafactor plan`.

| module | what it does |
|---|---|
| `models` | describes a model by the shapes of its weights: a preset, a module, a configuration |
| `memory` | counts the bytes of a setting (an optimizer and its precision), part by part |
| `show` | holds the counts of all settings, a `Plan`, and writes the table and the advice |
| `command` | goes from arguments to a plan |
"""

from adafactor.planning.command import plan
from adafactor.planning.memory import SETTINGS, Bytes, Line
from adafactor.planning.models import PRESETS
from adafactor.planning.show import Plan

__all__ = ["PRESETS", "SETTINGS", "Bytes", "Line", "Plan", "plan"]
