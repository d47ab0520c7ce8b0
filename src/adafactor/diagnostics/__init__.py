"""What the optimizer does to each parameter, kept, shown, and told in words."""

from adafactor.diagnostics.record import Record, Trace

__all__ = ["Record", "Trace"]
