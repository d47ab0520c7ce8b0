"""What `report()` returns."""

from adafactor.core.record import Record

__all__ = ["Record"]
