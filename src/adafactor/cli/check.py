"""`adafactor check`: is the step in Triton right on this card? And, with `--bench`, how fast is it there?"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from adafactor import kernels
from adafactor.check import selftest, selftest_cache, timing
from adafactor.check.selftest import Case, Finding, TensorSpec, Variant
from adafactor.check.timing import Times
from adafactor.kernels.progress import progress
from adafactor.optimizer import Adafactor

# In the interpreter, which takes milliseconds for every program.
SMALL_TENSORS = (TensorSpec((9, 7)), TensorSpec((6, 5), "transposed"), TensorSpec((5,)))
Named = TypeVar("Named")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("--device", help="the card to check, such as cuda:1; else the first that torch finds")
    add("--only", metavar="TEXT", help="only kernels whose name contains this, such as bfloat16 or kahan")
    add("--setting", metavar="TEXT", help="only settings whose name contains this, such as maximize or GradScaler")
    add("--tensor", metavar="TEXT", help="only tensors whose name contains this, such as 129×77 or transposed")
    add("--bench", action="store_true", help="also time each pass and whole steps, and print a block for an issue")
    add("--rounds", type=int, default=15, help="with --bench: how often each optimizer has its turn (15)")
    add("--json", action="store_true", help="print the answer as JSON, and how each variant went on stderr")
    add("--output", type=Path, metavar="FILE", help="also write the answer as JSON to this file")


def run(arguments: argparse.Namespace) -> int:
    """Check and show; 0: all is right, 1: something is off, 2 (by an exception): nothing could be checked."""
    device = _device(arguments.device)
    kernels.check("triton")
    if arguments.bench and device.type == "cpu":
        raise ValueError("--bench times a GPU; Triton's interpreter is not one")
    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds} must be at least 1")
    # torch has not always let a gradient's dtype differ from its parameter's
    variants = [v for v in selftest.VARIANTS if v.x == v.g or hasattr(torch.Tensor, "grad_dtype")]
    variants = _choose("--only", arguments.only, variants)
    cases = selftest.cases_of(device)
    cases = {name: cases[name] for name in _choose("--setting", arguments.setting, cases)}
    tensors = _choose("--tensor", arguments.tensor, selftest.TENSORS if device.type != "cpu" else SMALL_TENSORS)
    # with --json whoever waits reads on stderr how each variant went
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        print(about(device))
        findings = check(device, variants, cases, tensors)
        times = bench(device, arguments.rounds, findings) if arguments.bench else []
    answer = {
        **selftest_cache.describe(device),
        "device": str(device),
        "checked": [str(variant) for variant in variants],
        "off": [{**asdict(finding), "variant": str(finding.variant)} for finding in findings],
        "nominal_bandwidth": timing.nominal_bandwidth(device) if times else None,
        "times": [asdict(time) for time in times],
    }
    text = json.dumps(answer, indent=2)
    if arguments.json:
        print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 1 if findings or any(time.problems for time in times) else 0


def check(
    device: torch.device, variants: Sequence[Variant], cases: Mapping[str, Case], tensors: Sequence[TensorSpec]
) -> list[Finding]:
    """Test these variants, say how each went, and keep the answers for `auto` where all of it was tested."""
    print(
        f"{len(tensors)} tensors of every shape and order in memory, {selftest.STEPS} steps each, against eager "
        f"PyTorch on the same device, twice: {'; '.join(cases)}"
    )
    is_complete = list(tensors) == list(selftest.TENSORS) and list(cases) == list(selftest.cases_of(device))
    width = max(len(str(variant)) for variant in variants)
    findings: list[Finding] = []
    for variant in variants:
        start = time.perf_counter()
        with progress("testing", math.inf) as tell:
            wrong = selftest.examine(Adafactor, device, variant, tensors, cases, tell)
        print(f"  {_mark(not wrong)} {str(variant):<{width}}  {time.perf_counter() - start:6.1f} s", flush=True)
        for finding in wrong:
            print(_explain(finding, device), flush=True)
        if is_complete:
            selftest_cache.keep(selftest_cache.describe(device), variant, wrong)
        findings += wrong
    print(_sum_up(findings) if device.type != "cpu" or findings else "All is right, in the interpreter.")
    return findings


def bench(device: torch.device, rounds: int, findings: Sequence[Finding]) -> list[Times]:
    """Time the step, and print a block for an issue."""
    with progress("timing", math.inf) as tick:
        times = timing.measure(Adafactor, device, rounds, tick)
    table = timing.show(times, timing.nominal_bandwidth(device))
    print(f"\n```\n{about(device)}\n{_sum_up(findings)}\n\n{table}\n```")
    return times


def about(device: torch.device) -> str:
    """Return versions and card, in a line."""
    card = selftest_cache.describe(device)
    versions = ", ".join(f"{name} {card[name]}" for name in ("adafactor", "torch", "triton"))
    if device.type == "cpu":
        return f"{versions}; no GPU: kernels run on the CPU, in Triton's interpreter (TRITON_INTERPRET=1)"
    return f"{versions}; {card['name']} ({device}, {card['capability']}, driver {card['driver']})"


def _explain(finding: Finding, device: torch.device) -> str:
    """Say what is off, with what it takes to mend it from afar, and how to see it again."""
    what = f"{finding.tensor}: {finding.what}" if finding.tensor else finding.what
    lines = [f"{finding.setting}: {what}", *(f"  {line}" for line in finding.details.splitlines())]
    again = ["--device", str(device), "--only", str(finding.variant), "--setting", finding.setting]
    lines.append(f"  again: adafactor check {shlex.join(again)}")
    return "\n".join(f"      {line}" for line in lines)


def _choose(option: str, text: str | None, things: Iterable[Named]) -> list[Named]:
    """Return those with this text in their names."""
    things = list(things)
    chosen = [thing for thing in things if text is None or text in str(thing)]
    if not chosen:
        raise ValueError(f"{option} {text}: there are {'; '.join(map(str, things))}")
    return chosen


def _sum_up(findings: Sequence[Finding]) -> str:
    if not findings:
        return 'All is right: backend="auto" takes Triton for what was checked.'
    if all(finding.raises for finding in findings):
        return 'Graphs cannot be captured here; backend="auto" takes Triton for all else that was checked.'
    variants = ", ".join(dict.fromkeys(f"[{finding.variant}]" for finding in findings))
    return f'{len(findings)} things are off, in {variants}: backend="auto" steps these with eager PyTorch.'


def _device(name: str | None) -> torch.device:
    """Return the card of this name, or the first that is there; the CPU where Triton interprets."""
    try:
        from triton import knobs

        is_interpreted = knobs.runtime.interpret
    except ImportError:  # a missing GPU is said before a missing Triton
        is_interpreted = False
    if is_interpreted:
        if name not in (None, "cpu"):
            raise ValueError(f"--device {name}: with TRITON_INTERPRET=1 kernels run on the CPU")
        return torch.device("cpu")
    types = [kind for kind in ("cuda", "xpu") if torch.get_device_module(kind).is_available()]
    if name is None and not types:
        raise ValueError(f"there is no GPU here that torch {torch.__version__} can use, so nothing was checked")
    device = timing.find_device(name or types[0])
    if device.type == "cpu":
        raise ValueError(f"--device {name}: the step in Triton is for GPUs, and for the CPU with TRITON_INTERPRET=1")
    return device


def _mark(right: bool) -> str:
    if sys.stdout.isatty() and (sys.stdout.encoding or "").lower().startswith("utf"):
        return "✓" if right else "✗"
    return "ok " if right else "OFF"
