"""One step with tensors that have no plain memory; `test_plain_memory.py` runs this, since it may crash.

`python -m tests.attack.odd_tensors BACKEND KIND…` prints a line of JSON for each kind.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from adafactor import Adafactor
from tests.attack.helpers import random

SHAPE = (6, 4)
X, G = random(SHAPE, 0), random(SHAPE, 1)


class Plain(Tensor):
    """A subclass that changes nothing."""


def two(t: Tensor) -> Tensor:
    """A wrapper: two tensors that go through every operation together, and no memory of its own."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(t.clone(), t.clone())


def masked(t: Tensor) -> Tensor:
    """A tensor of which every element counts."""
    return torch.masked.masked_tensor(t.clone(), torch.ones_like(t, dtype=torch.bool))


def fake() -> AbstractContextManager[Any]:
    """Tensors are made without data in here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


KINDS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "plain": lambda: (X.clone(), G.clone()),
    "wrappers": lambda: (two(X), two(G)),
    "gradient is a wrapper": lambda: (X.clone(), two(G)),
    "gradient is a zero tensor": lambda: (X.clone(), torch._efficientzerotensor(SHAPE)),
    "gradient is masked": lambda: (X.clone(), masked(G)),
    "gradient is of a subclass": lambda: (X.clone(), G.clone().as_subclass(Plain)),
    "subclasses": lambda: (X.clone().as_subclass(Plain), G.clone().as_subclass(Plain)),
    "fake": lambda: (torch.empty(SHAPE), torch.empty(SHAPE)),
}


def values(t: Tensor) -> list[list[float]]:
    """What is in it; of a wrapper, what is in its first half."""
    inner: Tensor = getattr(t, "a", t)
    with torch.no_grad():
        return inner.as_subclass(Tensor).tolist()


def attempt(kind: str, backend: str) -> dict[str, Any]:
    """What became of a step: what the parameter is after it, or the error and whether something had changed."""
    with fake() if kind == "fake" else nullcontext():
        x, g = KINDS[kind]()
        p = nn.Parameter(x)
        told: dict[str, Any] = {"kind": kind}
        optimizer = None
        try:
            optimizer = Adafactor([("weight", p)], backend=backend)
            p.grad = g
            optimizer.step()
        except Exception as error:
            told.update(error=type(error).__name__, message=str(error))
        if kind == "fake":
            return told
        told["x"] = values(p)
        if optimizer is not None and optimizer.state.get(p):
            told["count"] = float(torch.as_tensor(getattr(optimizer.state[p]["step"], "a", optimizer.state[p]["step"])))
        return told


def main() -> None:
    """Print one line for each kind as soon as it is known."""
    warnings.simplefilter("ignore")
    backend, *kinds = sys.argv[1:]
    for kind in kinds:
        print(json.dumps(attempt(kind, backend)), flush=True)


if __name__ == "__main__":
    main()
