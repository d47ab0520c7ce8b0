"""What the optimizer does to each parameter, kept, shown, and told in words."""

from adafactor.diagnostics.record import Figures, Record, Trace

__all__ = ["Figures", "Record", "Trace"]
