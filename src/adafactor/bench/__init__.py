"""`adafactor bench`: one step of ours against every other optimizer, on this machine.

| module | what it does |
|---|---|
| `suites` | the shapes |
| `contenders` | one adapter per optimizer |
| `formulas`, `check` | is a contender's update the one that its own formula says? |
| `measure`, `memory`, `cost` | seconds of a step, extra memory of a step, both from 1 M to 1 B parameters |
| `floor`, `machine` | the bytes that must move; processor, cache, copy bandwidth |
| `results`, `targets` | what was measured, as JSON; the ratios that matter |
| `present`, `page` | tables for the terminal and Markdown; the plot and the HTML page |
| `command` | the command line |

Nothing here is imported by `import adafactor`, and nothing but torch is imported before it is needed.
"""
