"""Shows what the optimizer does to each parameter, and says in words what is wrong.

    optimizer.report()                             one record per parameter
    diagnose(optimizer)                            what they say, and what to change
    Watch(optimizer, History(), Live(), every=50)  a report every 50 steps, stored and shown
    FullMoment(optimizer, "h.0.*.weight")          how well the factors fit

`adafactor.diagnostics.transformers` and `adafactor.diagnostics.lightning` have the same as callbacks.

| module | what it does |
|---|---|
| `report` | collects all parameters' records after a step, and hands them to sinks every so many steps |
| `history`, `plot` | stores reports, writes and reads them, draws them |
| `table`, `loggers` | shows them while training, or sends them to TensorBoard or any function |
| `series`, `rules`, `findings` | turns reports into one series per parameter, says what they mean and what to change |
| `moment` | compares the factors with the unfactored second moment |
| `naming` | shortens the names of many parameters |
"""

from adafactor.core.record import Record
from adafactor.diagnostics.findings import Finding, diagnose
from adafactor.diagnostics.history import History
from adafactor.diagnostics.loggers import figures, to_callback, to_tensorboard
from adafactor.diagnostics.moment import Fit, FullMoment
from adafactor.diagnostics.report import Report, Watch, unwrap
from adafactor.diagnostics.table import Live

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
