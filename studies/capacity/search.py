"""The largest GPT that trains for two steps in a process that may allocate so much memory; a table of docs/plan.md.

    python -m studies.capacity               # in 4 GiB, what the record does not have yet: about a quarter of an hour
    python -m studies.capacity --render      # the table of the record

The limit is on all that the process allocates, torch and what an optimizer compiles among it. Each search is saved when
it is done; stop at any time, and the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import ENVIRONMENT, cores, describe, load_average, status
from benchmarks.record import Record, Row, load

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "studies" / "results" / "capacity.json"
STRIDE, STEPS = 16, 2  # of the widths that are tried; of a training
ADAMW_LR = 1e-4  # with its default a GPT of this depth may go astray in its first steps


@dataclass(frozen=True)
class Setting:
    """An optimizer in a precision."""

    label: str
    dtype: str
    guess: float  # bytes a parameter: where the search starts
    keywords: Row | None = None  # of Adafactor; None: it is another
    in_backward: bool = False


STOCHASTIC: Row = {"rounding": "stochastic"}
SETTINGS = {
    "adamw-float32": Setting("AdamW, float32", "float32", 16.5),
    "adamw-float32-backward": Setting("AdamW, float32, in backward", "float32", 13),
    "adamw-bfloat16": Setting("AdamW, bfloat16", "bfloat16", 8.2),
    "adamw-bfloat16-backward": Setting("AdamW, bfloat16, in backward", "bfloat16", 6.5),
    "torch-bfloat16": Setting("torch.optim.Adafactor, bfloat16", "bfloat16", 4.3),
    "adafactor-float32": Setting("adafactor, float32", "float32", 9, {}),
    "adafactor-float32-backward": Setting("adafactor, float32, in backward", "float32", 5, {}, True),
    "adafactor-bfloat16": Setting("adafactor, bfloat16, stochastic rounding", "bfloat16", 4.4, STOCHASTIC),
    "adafactor-bfloat16-backward": Setting(
        "adafactor, bfloat16, stochastic rounding, in backward", "bfloat16", 2.3, STOCHASTIC, True
    ),
    "adafactor-bfloat16-int8-momentum": Setting(
        "adafactor, bfloat16, stochastic rounding, int8 momentum",
        "bfloat16",
        5.4,
        {**STOCHASTIC, "beta1": 0.9, "momentum_dtype": "int8"},
    ),
}


# ---- one training, in a process of its own


def trial(key: str, width: int, limit: int) -> Row:
    """Train a GPT of that width in a process that may allocate so many bytes; `fits` says whether it did."""
    # Freed memory goes back at once, and there is one heap: none that is free for other threads only.
    environment = {**os.environ, **ENVIRONMENT, "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "studies.capacity.search", json.dumps([key, width, limit])]
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    lines = child.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    # some libraries end the process themselves when they get no memory, with or without a word
    if child.returncode < 0 or _speaks_of_memory(child.stderr):
        return {"fits": False}
    raise RuntimeError(f"{key} at width {width}: exit status {child.returncode}: {child.stderr.strip()[-500:]}")


def train(key: str, width: int, limit: int) -> None:
    """In the child: keep to the limit from here on, train, and print what happened."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    told: Row = {"fits": False}
    try:
        told = {"fits": True, **_train(SETTINGS[key], width)}
    except (MemoryError, RuntimeError) as problem:
        if not (isinstance(problem, MemoryError) or _speaks_of_memory(str(problem))):
            raise
    print(json.dumps(told))


def _train(setting: Setting, width: int) -> Row:
    import torch

    from studies.capacity.gpt import GPT, LENGTH, VOCABULARY

    torch.set_num_threads(cores())
    model = GPT(width, getattr(torch, setting.dtype))
    optimizer = _attach(setting, model)
    tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(0))
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(round(time.perf_counter() - start, 3))
        losses.append(loss.item())
        del loss
    allocated = status("VmData")
    with torch.no_grad():
        losses.append(model(tokens).item())
    return {"losses": losses, "seconds": seconds, "peak_bytes": status("VmHWM"), "data_bytes": allocated}


def _attach(setting: Setting, model: Any) -> Any:
    """Make the optimizer that the loop calls; inside backward its steps are taken by then."""
    import torch
    from torch.optim import AdamW

    params = list(model.parameters())
    if setting.keywords is not None:
        from adafactor import Adafactor, step_in_backward

        ours = Adafactor(params, **setting.keywords)
        if setting.in_backward:
            step_in_backward(model, ours)
        return ours
    if setting.label.startswith("torch"):
        return torch.optim.Adafactor(params)
    if "backward" not in setting.label:
        return AdamW(params, lr=ADAMW_LR, fused=True)
    # one optimizer for each parameter, as PyTorch's tutorial has it
    optimizers = {p: AdamW([p], lr=ADAMW_LR, fused=True) for p in params}

    def hook(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in params:
        p.register_post_accumulate_grad_hook(hook)
    return torch.optim.SGD(params, lr=0.0)  # finds no gradient left


def _speaks_of_memory(text: str) -> bool:
    return re.search(r"alloc|memory", text, flags=re.I) is not None


# ---- the search


def largest(fits: Callable[[int], bool], start: int, stride: int = STRIDE) -> int:
    """The largest multiple of `stride` that fits, searched from `start` outwards; 0 if none does."""
    low, high, reach, at = 0, None, stride, max(stride, start - start % stride)
    while high is None or high - low > stride:
        if fits(at):
            low = at
        else:
            high = at
        if high is None:
            at = low + reach
        elif low == 0 and high - reach > 0:
            at = high - reach
        else:
            at = (low + high) // 2 // stride * stride or stride
        reach *= 2
    return low


def search(key: str, limit: int) -> Row:
    """The largest model of one setting, searched from where its bytes a parameter say that it should be."""
    from studies.capacity.gpt import count

    small = trial(key, STRIDE, limit)
    if not small["fits"]:
        raise ValueError(f"{limit:,} bytes do not even hold torch and {key}")
    tried: dict[int, Row] = {0: small}

    def fits(width: int) -> bool:
        tried[width] = trial(key, width, limit)
        said = "fit" if tried[width]["fits"] else "do not fit"
        print(f"{key}: {count(width) / 1e6:,.0f} million parameters {said}", file=sys.stderr, flush=True)
        return bool(tried[width]["fits"])

    room = (limit - small["data_bytes"]) / SETTINGS[key].guess
    width = largest(fits, largest(lambda width: count(width) <= room, 1024))
    what = {"setting": key, "limit": limit, "width": width, "parameters": count(width), "load": load_average()}
    return {**what, **tried[width]}


def table(record: Record) -> str:
    """The parameters of each setting, for each limit, and how many times AdamW's in float32 they are."""
    parts = []
    for limit in sorted({row["limit"] for row in record.rows}):
        base = record.first(setting="adamw-float32", limit=limit)
        lines = [f"| {limit / 2**30:g} GiB | parameters | × AdamW float32 | loss | s a step |", "|---" * 5 + "|"]
        for key, setting in SETTINGS.items():
            if row := record.first(setting=key, limit=limit):
                times = f"{row['parameters'] / base['parameters']:.2f}" if base else "–"
                losses = f"{row['losses'][0]:.2f} → {row['losses'][-1]:.2f}"
                cells = [setting.label, f"{row['parameters'] / 1e6:,.0f} M", times, losses, f"{row['seconds'][-1]:.1f}"]
                lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main(words: list[str] | None = None) -> None:
    """Search what is missing, and print the table."""
    parser = argparse.ArgumentParser("python -m studies.capacity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="the limit (default: %(default)s)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="KEY")
    parser.add_argument("--record", type=Path, default=RECORD, help="the JSON that results are added to")
    parser.add_argument("--render", action="store_true", help="search nothing")
    asked = parser.parse_args(words)
    record, limit = load(asked.record) if asked.record.exists() else Record(), int(asked.gib * 2**30)
    for key in [] if asked.render else asked.settings:
        if record.first(setting=key, limit=limit) is None:
            found = search(key, limit)
            record.about = describe("python -m studies.capacity")
            record.rows.append(found)
            record.save(asked.record)
    print(table(record))


if __name__ == "__main__":
    train(*json.loads(sys.argv[1]))
