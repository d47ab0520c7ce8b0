"""Adafactor for PyTorch, exactly as Shazeer & Stern (2018) give it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adafactor import recipes, schedules
from adafactor.backward import step_in_backward
from adafactor.core.record import Record
from adafactor.optimizer import Adafactor

if TYPE_CHECKING:
    from adafactor.migration import MigrationWarning, like, migrate
    from adafactor.planning import plan

__all__ = [
    "Adafactor",
    "MigrationWarning",
    "Record",
    "like",
    "migrate",
    "plan",
    "recipes",
    "schedules",
    "step_in_backward",
]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Load what most training runs never use when it is first asked for."""
    if name in ("MigrationWarning", "like", "migrate"):
        from adafactor import migration

        return getattr(migration, name)
    if name in ("diagnostics", "hf", "trainers"):
        return import_module(f"adafactor.{name}")
    if name == "plan":
        from adafactor import planning

        return planning.plan
    raise AttributeError(f"module 'adafactor' has no attribute {name!r}")
