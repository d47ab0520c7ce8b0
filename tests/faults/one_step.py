"""A program that takes steps with the backends that it is given and tells how each went.

"difference" is the largest from eager PyTorch's X, "warnings" what was said, "error" what was raised.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import warnings
from typing import Any

import torch

from adafactor import Adafactor

SHAPES = ((40, 30), (50,))  # one that is factored, one that is not


def stepped(backend: str) -> list[torch.Tensor]:
    """Two steps: the first makes what later ones use again."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    optimizer = Adafactor(params, backend=backend)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach() for p in params]


def attempt(backend: str) -> dict[str, Any]:
    """The result of one backend."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            pairs = zip(stepped(backend), stepped("eager"), strict=True)
            result: dict[str, Any] = {"difference": max(float((a - b).abs().max()) for a, b in pairs)}
        except Exception as problem:
            result = {"error": type(problem).__name__, "message": str(problem)}
    return {**result, "warnings": [str(warning.message) for warning in said]}


if __name__ == "__main__":
    backends = sys.argv[1].split(",")
    if len(sys.argv) > 2:  # no file may grow beyond so many bytes, as on a full disk
        stepped("eager")  # torch needs a disk for its own imports
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    print(json.dumps({backend: attempt(backend) for backend in backends}))
