"""What the optimizer does to each parameter, kept, shown, and told in words.

    optimizer.report()                             one record per parameter
    diagnose(optimizer)                            what they say, and what to change
    Watch(optimizer, History(), Live(), every=50)  a report every 50 steps, kept and shown
    FullMoment(optimizer, "h.0.*.weight")          how well the factors fit

`adafactor.diagnostics.transformers` and `adafactor.diagnostics.lightning` have the same as callbacks.

| module | what it does |
|---|---|
| `report` | all parameters' records after a step, by name, with their settings |
| `watch` | takes a report every so many steps and hands it to each sink |
| `history`, `plot` | keeps reports, writes and reads them, draws them |
| `table`, `loggers` | shows them while training, or sends them to TensorBoard or any function |
| `rules`, `words` | what the figures say, and what to change |
| `moment` | how well the factors fit, against the full second moment |
| `naming` | many parameters' names in few words |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adafactor.core.record import Record

if TYPE_CHECKING:
    from adafactor.diagnostics.history import History
    from adafactor.diagnostics.loggers import figures, to_callback, to_tensorboard
    from adafactor.diagnostics.moment import Fit, FullMoment
    from adafactor.diagnostics.report import Report, unwrap
    from adafactor.diagnostics.table import Live
    from adafactor.diagnostics.watch import Watch
    from adafactor.diagnostics.words import Finding, diagnose

__all__ = [
    "Finding",
    "Fit",
    "FullMoment",
    "History",
    "Live",
    "Record",
    "Report",
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
    "report": ("Report", "unwrap"),
    "table": ("Live",),
    "watch": ("Watch",),
    "words": ("Finding", "diagnose"),
}


def __getattr__(name: str) -> Any:
    """Load the part that has it when it is first asked for: none needs all of them."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"adafactor.diagnostics.{home}"), name)
    raise AttributeError(f"module 'adafactor.diagnostics' has no attribute {name!r}")
