"""Training a GPT in a process that may allocate so many bytes and no more: does it run?

The limit is RLIMIT_DATA, which counts what a process has allocated and not only what it has touched. So an allocation
beyond it fails at once, whatever else the machine does.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # in the child, nothing is imported before the limit is set
    from torch import Tensor
    from torch.optim import Optimizer

    from adafactor.planning.memory import Setting

ROOT = Path(__file__).parent.parent.parent
STEPS = 2  # with the state there from the first, the second has the full peak; then the loss once more
ADAMW_LR = 1e-4  # torch's default overshoots when the same few words come again; the others scale their steps


@dataclass
class Trial:
    """A model that was tried."""

    key: str
    width: int
    layers: int
    parameters: int
    fits: bool
    losses: list[float] = field(default_factory=list)  # before the first step, …, after the last
    seconds: list[float] = field(default_factory=list)  # of each step
    peak_bytes: int = 0  # resident
    data_bytes: int = 0  # allocated when the last step was done
    reason: str = ""  # why it does not fit


def trial(key: str, width: int, limit: int | None, steps: int = STEPS) -> Trial:
    """Train a GPT of that width in a process that may allocate so many bytes."""
    request = json.dumps({"key": key, "width": width, "limit": limit, "steps": steps})
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "studies.capacity.limited", request],
        env={**os.environ, **environment()},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    from studies.capacity.gpt import count, layers_of

    lines = child.stdout.strip().splitlines()
    told = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    if not told:  # some libraries end the process themselves when they get no memory, with or without a word
        told = {"fits": False, "reason": f"out of memory, exit status {child.returncode}"}
        if limit is None or not (child.returncode < 0 or speaks_of_memory(child.stderr)):
            raise RuntimeError(f"{key} at width {width}: exit status {child.returncode}: {child.stderr.strip()[-500:]}")
    return Trial(key, width, layers_of(width), count(width), **told)


def environment() -> dict[str, str]:
    """Freed memory goes back at once, and there is one heap: none that is free for other threads only."""
    from benchmarks.machine import ENVIRONMENT

    return {**ENVIRONMENT, "MALLOC_ARENA_MAX": "1"}


def speaks_of_memory(text: str) -> bool:
    """Whether an error is for want of memory."""
    return re.search(r"alloc|memory", text, flags=re.I) is not None


def train(request: str) -> None:
    """In the child: keep to the limit from the first import on, train, and say what happened."""
    asked = json.loads(request)
    if asked["limit"]:
        resource.setrlimit(resource.RLIMIT_DATA, (asked["limit"], asked["limit"]))
    told: dict[str, Any] = {"fits": False, "losses": [], "seconds": []}
    try:
        _train(asked, told)
        told["fits"] = True
    except (MemoryError, RuntimeError) as problem:
        if not (isinstance(problem, MemoryError) or speaks_of_memory(str(problem))):
            raise
        told["reason"] = "out of memory"
    print(json.dumps(told))


def _train(asked: dict[str, Any], told: dict[str, Any]) -> None:
    import torch

    from adafactor import Adafactor, step_in_backward
    from adafactor.planning import SETTINGS
    from benchmarks.machine import cores, status
    from studies.capacity.gpt import GPT, LENGTH, VOCABULARY

    torch.set_num_threads(cores())
    setting = SETTINGS[asked["key"]]
    model = GPT(asked["width"], setting.dtype)
    optimizer = _make(setting, list(model.parameters()))
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.param_groups[0]["lr"] = ADAMW_LR
    if setting.in_backward:
        assert isinstance(optimizer, Adafactor)
        step_in_backward(model, optimizer)
    tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(0))
    for _ in range(asked["steps"]):
        start = time.perf_counter()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told["seconds"].append(time.perf_counter() - start)
        told["losses"].append(loss.item())
        del loss
    told["data_bytes"] = status("VmData")
    with torch.no_grad():
        told["losses"].append(model(tokens).item())
    told["peak_bytes"] = status("VmHWM")


def _make(setting: Setting, params: Sequence[Tensor]) -> Optimizer:
    """The optimizer of a setting."""
    import torch

    from adafactor import Adafactor

    if setting.optimizer == "adafactor":
        return Adafactor(params, **setting.keywords)
    if setting.optimizer == "torch.optim.Adafactor":
        return torch.optim.Adafactor(params)
    if setting.optimizer == "transformers' Adafactor":
        from transformers.optimization import Adafactor as TransformersAdafactor

        return cast("Optimizer", TransformersAdafactor(params))
    return torch.optim.AdamW(params, fused=True)


if __name__ == "__main__":
    train(sys.argv[1])
