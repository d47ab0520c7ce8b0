"""`python -m benchmarks`: one step of ours against other optimizers, on this machine.

| module | what it does |
|---|---|
| `suites` | the shapes |
| `contenders` | one adapter per optimizer, after backward and inside it; and floors: the same bytes in trivial loops |
| `machine` | the processor with its caches, memory and load |
| `measure` | seconds of a step, and the memory that it takes for its length |
| `record` | what was measured, as JSON: rows of figures, and where they are from; the studies write it, too |
| `tables` | Markdown tables of a record |
| `sharded` | the step on shards, under torchrun |

It needs torch and `adafactor.Adafactor` alone, so that it also times an older copy of the package: PYTHONPATH=old/src.
"""
