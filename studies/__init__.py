"""The scripts behind the tables in docs/, a module or folder for each page; what they found is in `results/`.

| module | page | command |
|---|---|---|
| `peers` | docs/paper.md, what other implementations do differently | `python -m studies.peers` |
| `capacity` | docs/plan.md, the largest model in so much memory | `python -m studies.capacity` |
| `learning_rate` | docs/settings.md | `python -m studies.learning_rate` |
| `gpu_counts` | docs/gpu.md, launches | `python -m studies.gpu_counts` |
| `front` | the picture in README.md | `python -m studies.front` |

`results/epyc-2-cores.json` is what `python -m benchmarks` measured for docs/performance-tables.md, and
`epyc-2-cores-quiet.json` a later run with nothing else on the machine.
"""
