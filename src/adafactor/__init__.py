"""Adafactor for PyTorch, exactly as Shazeer & Stern (2018) give it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adafactor import recipes, schedules
from adafactor.backward import step_in_backward
from adafactor.core.report import Record
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
__version__ = "0.3.0"


def __getattr__(name: str) -> Any:
    """Load what most training runs never use when it is first asked for."""
    if name in ("MigrationWarning", "like", "migrate"):
        return getattr(import_module("adafactor.migration"), name)
    if name == "plan":
        return import_module("adafactor.planning").plan
    if name in ("diagnostics", "hf", "trainers"):
        return import_module(f"adafactor.{name}")
    raise AttributeError(f"module 'adafactor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
