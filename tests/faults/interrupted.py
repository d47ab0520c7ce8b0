"""A program that trains while another process sends it signals, whose handlers raise; it counts what went wrong.

Every trial is one step and one signal. A copy takes the same step without one, so that there is a "before" and an
"after" to hold every tensor against, and both take the next step to see that it is right.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adafactor import Adafactor

SIGNALS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit, signal.SIGUSR1: TimeoutError}
SCALE = {"eager": 1, "cpu": 2}  # of every length, so that a step takes long enough to be hit
MOST = 4  # times as many trials as were asked for, until a tenth of those have hit a step
SPREAD = 1.3  # moments are drawn from so many durations of a step
PATIENCE = 20.0  # seconds until a signal that has been sent must have been handled


class Training(NamedTuple):
    """What is copied together."""

    params: list[Tensor]
    optimizer: Adafactor


def training(backend: str) -> Training:
    """A convolution in channels-last order, matrices with and without momentum, a vector and a bfloat16 matrix."""
    torch.manual_seed(0)
    n = SCALE[backend]
    conv = torch.randn(96 * n, 64 * n, 3, 3).contiguous(memory_format=torch.channels_last)
    params = [conv, torch.randn(300 * n, 200 * n), torch.randn(250 * n, 300 * n), torch.randn(4000 * n * n)]
    params.append(torch.randn(200 * n, 150 * n).bfloat16())
    for p in params:
        p.requires_grad_()
    groups: list[dict[str, Any]] = [
        {"params": params[:2]},
        {"params": params[2:4], "beta1": 0.9, "weight_decay": 0.01},
        {"params": params[4:], "rounding": "kahan"},
    ]
    return Training(params, Adafactor(groups, backend=backend))


def set_gradients(trainings: list[Training], seed: int) -> None:
    """The same for all, in memory as their parameters are."""
    generator = torch.Generator().manual_seed(seed)
    for several in zip(*(t.params for t in trainings), strict=True):
        g = torch.randn(several[0].shape, generator=generator)
        for p in several:
            p.grad = torch.empty_like(p).copy_(g)


def contents(t: Training) -> list[dict[str, Tensor]]:
    """Of each parameter everything that a step changes."""
    return [{"X": p.detach().clone()} | {k: v.clone() for k, v in t.optimizer.state[p].items()} for p in t.params]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def send(orders: Connection, target: int) -> None:
    """What the other process does: wait for an order, then for its moment, and send the signal."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    while order := orders.recv():
        number, delay = order
        time.sleep(delay)  # not a loop: it would have the core that the step wants
        sent = time.monotonic()
        os.kill(target, number)
        orders.send(sent)


def main(backend: str, threads: int, trials: int) -> dict[str, int]:
    """Count over so many trials, or more if too few of them hit a step."""
    torch.set_num_threads(threads)
    draw, count, raised = random.Random(threads), Counter[str](), [0]
    ours, theirs = Pipe()
    sender = Process(target=send, args=(theirs, os.getpid()), daemon=True)
    sender.start()  # forked before any thread has started

    def handler(number: int, frame: FrameType | None) -> None:
        raised[0] += 1
        raise SIGNALS[signal.Signals(number)]("from the handler")

    t = training(backend)
    durations = []
    for i in range(8):
        set_gradients([t], i)
        begin = time.monotonic()
        t.optimizer.step()
        durations.append(time.monotonic() - begin)
    for number in SIGNALS:
        signal.signal(number, handler)

    usual = sorted(durations)[len(durations) // 2]
    for trial in range(MOST * trials):
        if trial >= trials and count["inside"] >= trials // 10:
            break
        twin = copy.deepcopy(t)
        set_gradients([t, twin], 1000 + trial)
        before = contents(t)
        twin.optimizer.step()
        after = contents(twin)
        earlier, caught, begin, end = raised[0], False, 0.0, 0.0
        number = draw.choice(list(SIGNALS))
        try:
            ours.send((number, draw.random() * SPREAD * usual))
            begin = time.monotonic()
            try:
                t.optimizer.step()
            finally:
                end = time.monotonic()
            while raised[0] == earlier and time.monotonic() < end + PATIENCE:
                time.sleep(0.0002)
        except tuple(SIGNALS.values()):
            caught = True
        sent = ours.recv()
        now = contents(t)
        taken = [same(a, b) for a, b in zip(now, after, strict=True)]
        kept = [same(a, b) for a, b in zip(now, before, strict=True)]
        count["trials"] += 1
        count["inside"] += begin < sent < end
        count["raised"] += raised[0] - earlier
        count["caught"] += caught
        count["torn"] += sum(not (a or b) for a, b in zip(taken, kept, strict=True))
        count["returned, but not taken"] += not caught and not all(taken)
        count["partly taken"] += any(taken) and not all(taken)

        twin = copy.deepcopy(t)
        set_gradients([t, twin], 100_000 + trial)
        t.optimizer.step()
        twin.optimizer.step()
        count["next step wrong"] += not all(map(same, contents(t), contents(twin)))
    ours.send(None)
    sender.join()
    return {**count, "microseconds": round(usual * 1e6)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
