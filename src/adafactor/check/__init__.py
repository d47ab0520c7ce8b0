"""Is the step in Triton right on this card, and how fast is it?

| module | what it does |
|---|---|
| `selftest` | compares it with eager PyTorch there, on tensors of its own |
| `compare` | says what of a tensor differs: in any bit, or by more than rounding leaves |
| `selftest_cache` | keeps the answer, once per card and version, for `backend="auto"` |
| `timing` | times each pass beside other optimizers |

The optimizer asks `selftest_cache` before it relies on a card, so nothing here imports it: it is handed in as `make`.
"""
