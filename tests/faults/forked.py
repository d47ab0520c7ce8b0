"""A program that forks after threads have started; parent and child take the same step and compare bits.

For each case it prints what became of the child, "done" or "hangs" or its exit status, and whether bits are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import sys

import torch

from adafactor import Adafactor

SECONDS = 20.0  # until the child is said to hang
SIZE = {"cpu": 300, "eager": 60}  # eager PyTorch's own loops must stay below the size at which torch starts threads


def train(params: list[torch.Tensor], optimizer: Adafactor, steps: range) -> str:
    """Some steps; returns a digest of the parameters and the state after them."""
    for i in steps:
        generator = torch.Generator().manual_seed(i)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    values = [value for p in params for value in (p.detach(), *optimizer.state[p].values())]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def start_threads() -> None:
    """Those of torch: a product and a sum that are large enough for them."""
    a = torch.randn(600, 600, requires_grad=True)
    (a @ a).square().sum().backward()


def forked(backend: str, moment: str) -> list[object]:
    """Fork at the moment, and step on both sides."""
    torch.manual_seed(0)
    params = [torch.randn(SIZE[backend], SIZE[backend]).requires_grad_() for _ in range(8)]
    start_threads()
    # made before the fork: to fill a large tensor with zeros, torch wants the threads that a child does not have
    optimizer = Adafactor(params, backend=backend, beta1=0.9)
    if moment != "before any step":
        train(params, optimizer, range(3))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, train(params, optimizer, range(3, 6)).encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], SECONDS)
    if not ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    theirs = os.read(reader, 100).decode()
    ours = train(params, optimizer, range(3, 6))
    return ["hangs" if not ready else status or "done", ours == theirs]


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(json.dumps([forked(*case.split(", ")) for case in sys.argv[1:]]))
