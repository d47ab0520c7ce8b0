"""`adafactor bench`: one step of ours against every other optimizer, on this machine; `adafactor check`: a GPU's trial.

| module | what it does |
|---|---|
| `suites` | the shapes |
| `contenders` | one adapter per optimizer |
| `formulas`, `check` | is a contender's update the one that its own formula says? |
| `measure`, `memory`, `cost` | seconds of a step, extra memory of a step, both from 1 M to 1 B parameters |
| `place` | the processor with its clock, or a GPU with its events |
| `floor`, `machine` | the bytes that must move; processor, cache, copy bandwidth |
| `results`, `targets` | what was measured, as JSON; the ratios that matter |
| `present`, `page` | tables for the terminal and Markdown; the plot and the HTML page |
| `command` | the command line |
| `gpu_check`, `gpu_times` | `adafactor check`, and what `--bench` adds to it |

Nothing here is imported by `import adafactor`, and nothing but torch is imported before it is needed.
"""
