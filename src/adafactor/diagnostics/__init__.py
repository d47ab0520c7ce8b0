"""What the optimizer does to each parameter, kept, shown, and told in words.

    optimizer.report()                             one record per parameter
    diagnose(optimizer)                            what they say, and what to change
    Watch(optimizer, History(), Live(), every=50)  a report every 50 steps, kept and shown
    FullMoment(optimizer, "h.0.*.weight")          how well the factors fit

`adafactor.diagnostics.transformers` and `adafactor.diagnostics.lightning` have the same as callbacks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adafactor.diagnostics.record import Figures, Record, Trace

if TYPE_CHECKING:
    from adafactor.diagnostics.history import History
    from adafactor.diagnostics.loggers import figures, to_callback, to_tensorboard
    from adafactor.diagnostics.moment import Fit, FullMoment
    from adafactor.diagnostics.table import Live
    from adafactor.diagnostics.watch import Report, Watch, unwrap
    from adafactor.diagnostics.words import Finding, diagnose

__all__ = [
    "Figures",
    "Finding",
    "Fit",
    "FullMoment",
    "History",
    "Live",
    "Record",
    "Report",
    "Trace",
    "Watch",
    "diagnose",
    "figures",
    "to_callback",
    "to_tensorboard",
    "unwrap",
]

_HOMES = {
    "history": ("History",),
    "loggers": ("figures", "to_callback", "to_tensorboard"),
    "moment": ("Fit", "FullMoment"),
    "table": ("Live",),
    "watch": ("Report", "Watch", "unwrap"),
    "words": ("Finding", "diagnose"),
}


def __getattr__(name: str) -> Any:
    """Load what a run without diagnostics never needs, and what itself needs the optimizer, when it is asked for."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"adafactor.diagnostics.{home}"), name)
    raise AttributeError(f"module 'adafactor.diagnostics' has no attribute {name!r}")
