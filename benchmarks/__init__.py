"""`python -m benchmarks`: one step of ours against every other optimizer, on this machine.

| module | what it does |
|---|---|
| `suites` | the shapes |
| `contenders` | one adapter per optimizer, and the floor: the same bytes in trivial loops |
| `correctness` | is a contender's update the one that its own formula says? |
| `machine` | the processor with its clock, or a GPU with its events; cache, memory, copy bandwidth |
| `measure` | seconds of a step, and the memory that it takes for its length |
| `results` | what was measured, as JSON; the ratios that matter |
| `tables` | tables for the terminal and Markdown, and the plots |

A tool of this project's developers, no part of the package.
"""
