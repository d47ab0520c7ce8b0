"""Adafactor for PyTorch, exactly as Shazeer & Stern (2018) give it."""

from adafactor import schedules
from adafactor.diagnostics import Record
from adafactor.optimizer import Adafactor

__all__ = ["Adafactor", "Record", "schedules"]
__version__ = "0.1.0"
