"""What the format of the momentum does to a result; a table of docs/precision.md.

    python -m studies.momentum            # what is missing of the record; about a quarter of an hour on one core
    python -m studies.momentum --tables   # put the table of the committed record into the document; run nothing

The tasks are those of `studies.learning_rate`, each at a step size that is good for it there: a GPT is fine-tuned, and
a network learns to tell the noise from drawings. Both are wider here: in a tensor of less than 4,096 elements, or of
less than 128 in a row, the momentum is float32 whatever is asked for. AdamW 8-bit is torchao's, without its compiler.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from adafactor import Adafactor
from lab.files import put_between, write_text
from lab.results import STUDENT
from studies import learning_rate as tasks

RECORD = Path(__file__).parent / "results" / "momentum.json"
DOCUMENT = Path(__file__).parents[1] / "docs" / "precision.md"
SEEDS = 5
RATES = {"fine-tuning": 1e-3, "diffusion": 3e-3}
WIDTHS = {"fine-tuning": 128, "diffusion": 32}

Run = dict[str, Any]


def ours(**keywords: Any) -> Callable[[nn.Module, float], Optimizer]:
    """Adafactor with absolute steps and these keywords."""
    return lambda model, lr: Adafactor(model.parameters(), lr=lr, relative=False, lr_decay=None, **keywords)


def adamw_8bit(model: nn.Module, lr: float) -> Optimizer:
    """The optimizer of torchao, whose step is compiled unless told otherwise."""
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")
    made: Optimizer = AdamW8bit(model.parameters(), lr=lr, weight_decay=0.0)
    return made


FORMATS = ("float32", "bfloat16", "int8")
OPTIMIZERS: dict[str, Callable[[nn.Module, float], Optimizer]] = {
    "no momentum": ours(),
    **{format: ours(beta1=0.9, momentum_dtype=format) for format in FORMATS},
    "AdamW": lambda model, lr: AdamW(model.parameters(), lr=lr, weight_decay=0.0),
    "AdamW 8-bit": adamw_8bit,
}


@cache
def _texts() -> dict[str, tuple[Tensor, Tensor]]:
    return tasks.texts()


@cache
def _start() -> nn.Module:
    return tasks.learned(_texts()["old"][0], WIDTHS["fine-tuning"])


def finetune(name: str, seed: int) -> tuple[float, Optimizer]:
    """The loss on held-out new text, and the optimizer as it is then."""
    learn, held = _texts()["new"]
    model = copy.deepcopy(_start())
    optimizer = OPTIMIZERS[name](model, RATES["fine-tuning"])
    tasks.train(model, optimizer, partial(tasks.text_loss, learn, tasks.BATCH), tasks.seeds(seed, tasks.AFTER))
    return tasks.measured({"new": partial(tasks.text_loss, held, 128, 0)}, model)["new"], optimizer


def denoise(name: str, seed: int) -> tuple[float, Optimizer]:
    """The error on held-out noise, and the optimizer as it is then."""
    torch.manual_seed(seed)
    model = tasks.Denoiser(WIDTHS["diffusion"])
    optimizer = OPTIMIZERS[name](model, RATES["diffusion"])
    tasks.train(model, optimizer, partial(tasks.noise_loss, 16), tasks.seeds(seed, tasks.DENOISE))
    return tasks.measured({"error": partial(tasks.noise_loss, 2048, 0)}, model)["error"], optimizer


TASKS = {"fine-tuning": finetune, "diffusion": denoise}


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors of the state; torchao's own kind says by itself what it is made of."""

    def size(value: object) -> int:
        if hasattr(value, "__tensor_flatten__"):
            return sum(size(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.nbytes if isinstance(value, Tensor) else 0

    return sum(size(value) for state in optimizer.state.values() for value in state.values())


def run_missing(path: Path, count: int) -> None:
    """Run, seed by seed, what the record does not have yet, and write it after each run."""
    record: Run = json.loads(path.read_text()) if path.exists() else {"runs": []}
    record["about"] = {"python": platform.python_version(), "torch": torch.__version__}
    done = {(run["task"], run["optimizer"], run["seed"]) for run in record["runs"]}
    for seed, task, name in product(range(count), TASKS, OPTIMIZERS):
        if (task, name, seed) in done:
            continue
        loss, optimizer = TASKS[task](name, seed)
        run: Run = {"task": task, "optimizer": name, "seed": seed, "loss": loss, "state": state_bytes(optimizer)}
        record["runs"].append(run)
        write_text(path, json.dumps(record, indent=1) + "\n")
        print(run, flush=True)


def interval(values: list[float]) -> str:
    """A mean and half of its 95 % interval over seeds."""
    half = STUDENT[len(values) - 2] * stdev(values) / sqrt(len(values))
    return f"{mean(values):+.4f} ± {half:.4f}".replace("-", "−")


def loss_table(runs: list[Run]) -> str:
    """For each task and optimizer the mean loss, how far it is from float32 momentum's, and the state's bytes."""
    found = {(run["task"], run["optimizer"], run["seed"]): run for run in runs}
    whole = [seed for seed in {run["seed"] for run in runs} if {*product(TASKS, OPTIMIZERS, [seed])} <= found.keys()]
    heads = [f"{task}, {len(whole)} seeds | minus float32 | state" for task in TASKS]
    lines = [f"| | {' | '.join(heads)} |", "|---" * 7 + "|"]
    for name in OPTIMIZERS:
        cells = [f"momentum in {name}" if name in FORMATS else name]
        for task in TASKS:
            losses = [found[task, name, seed]["loss"] for seed in whole]
            gaps = [loss - found[task, "float32", seed]["loss"] for loss, seed in zip(losses, whole, strict=True)]
            cells += [f"{mean(losses):.3f}", "" if name == "float32" else interval(gaps)]
            cells.append(f"{found[task, name, 0]['state'] / 1000:,.0f} kB")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


MARKS = "<!-- runs: python -m studies.momentum --tables -->\n", "<!-- end of runs -->\n"


def main() -> None:
    """Run what is missing, and put the table into the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="of the committed record; run nothing")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--output", type=Path, default=RECORD)
    arguments = parser.parse_args()
    if not arguments.tables:
        torch.set_num_threads(1)
        run_missing(arguments.output, arguments.seeds)
    record = json.loads(arguments.output.read_text())
    put_between(DOCUMENT, *MARKS, loss_table(record["runs"]))


if __name__ == "__main__":
    main()
