"""What a parameter costs, from a million to a billion of them."""

from __future__ import annotations

from adafactor.bench.contenders import DTYPES
from adafactor.bench.measure import Entry
from adafactor.bench.place import Place, Processor
from adafactor.bench.suites import Suite
from adafactor.planning.models import transformer

# name → layers and width of a GPT-2-like stack with about so many parameters
SIZES = {
    "1M": (4, 144),
    "3M": (6, 208),
    "10M": (8, 320),
    "30M": (8, 560),
    "100M": (12, 832),
    "300M": (16, 1248),
    "1B": (24, 1856),
}
# both ours, the yardstick, and the least that an optimizer can do
CONTENDERS = ("sgd", "adamw-fused", "cpu", "triton", "eager")


def suite(name: str) -> Suite:
    """The stack of that size."""
    if name not in SIZES:
        raise ValueError(f"unknown size {name!r}; there are {', '.join(SIZES)}")
    layers, width = SIZES[name]
    return Suite(name, f"{layers} layers of width {width}", tuple(transformer(layers, width)))


def that_fit(stack: Suite, entries: list[Entry], place: Place | None = None) -> list[Entry]:
    """Those that fit the memory together, ours before others: weights, gradients, states, and a tenth to spare."""
    free = (place or Processor()).available_bytes()
    if free is None:
        return entries
    size = stack.parameters
    kept, needed = [], {entry.dtype: 2 * size * DTYPES[entry.dtype].itemsize for entry in entries}
    used = float(sum(needed.values()))
    for entry in sorted(entries, key=lambda entry: entry.contender.role != "ours"):
        copies = 2 * entry.contender.key.startswith("adamw") + entry.contender.alone
        if used + copies * size * DTYPES[entry.dtype].itemsize <= 0.9 * free:
            used += copies * size * DTYPES[entry.dtype].itemsize
            kept.append(entry)
    return [entry for entry in entries if entry in kept]
