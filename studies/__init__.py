"""The scripts behind the tables in docs/, a module or folder for each page; what they found is in `results/`.

| module | page | command |
|---|---|---|
| `front` | README.md, docs/performance.md, docs/index.md: tables and pictures of records | `python -m studies.front` |
| `capacity` | docs/plan.md, the largest model in so much memory | `python -m studies.capacity` |
| `learning_rate` | docs/settings.md, step sizes | `python -m studies.learning_rate` |
| `momentum` | docs/precision.md, momentum in fewer bits | `python -m studies.momentum` |
| `gpu_counts` | docs/gpu.md, launches | `python -m studies.gpu_counts` |

`results/step-*.json` are records of `python -m benchmarks`, one for each machine.
"""
