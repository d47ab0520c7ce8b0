"""Says in words what is wrong with a run, and hands what the optimizer measures to loggers and pictures.

    print(optimizer.report())                           one record per parameter, as a table
    print(*diagnose(optimizer))                         what they say, and what to change
    with Watch(optimizer, reports.append, every=50):    a report every 50 steps, for any function
    plot(reports, "run.png")                            RMS(U), step size and clip rate over the run

`adafactor.diagnostics.transformers` and `adafactor.diagnostics.lightning` have a `Watch` as a callback.

| module | what it does |
|---|---|
| `watch` | takes a report every so many steps, and hands it to sinks |
| `loggers` | makes sinks of TensorBoard, Weights & Biases or any function of a dict |
| `picture` | draws reports |
| `series`, `rules`, `findings` | turns reports into one series per parameter, says what they mean and what to change |
"""

from adafactor.core.report import Record, Report
from adafactor.diagnostics.findings import Finding, diagnose
from adafactor.diagnostics.loggers import figures, to_callback, to_tensorboard
from adafactor.diagnostics.picture import plot
from adafactor.diagnostics.watch import Watch, unwrap

__all__ = [
    "Finding",
    "Record",
    "Report",
    "Watch",
    "diagnose",
    "figures",
    "plot",
    "to_callback",
    "to_tensorboard",
    "unwrap",
]
