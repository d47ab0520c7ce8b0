"""`adafactor check`: is the step in Triton right on this card? And, with `--bench`, how fast is it there?"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from adafactor.bench.gpu_times import Times
    from adafactor.bench.place import Card
    from adafactor.check.trial import Finding, Form, Sort


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add = parser.add_argument
    add("--device", help="the card to check, such as cuda:1; else the first that torch finds")
    add("--only", metavar="TEXT", help="only kernels whose name contains this, such as bfloat16 or kahan")
    add("--bench", action="store_true", help="also time steps and launches, and print a block for an issue")
    add("--rounds", type=int, default=15, help="with --bench: how often each contender has its turn (15)")
    add("--json", action="store_true", help="print the answer as JSON, and how each sort went on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Check and show; 0: all is right, 1: something is off, 2 (by an exception): nothing could be checked."""
    from adafactor import kernels

    device, card = _device(arguments.device)
    kernels.check("triton")
    if arguments.bench and card is None:
        raise ValueError("--bench times a GPU; Triton's interpreter is not one")
    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds} must be at least 1")
    # with --json whoever waits reads on stderr how each sort went
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        off, times = _all(arguments, device, card)
    if arguments.json:
        print(json.dumps(as_dict(device, arguments.only, off, times), indent=2))
    return 1 if off else 0


def _all(arguments: argparse.Namespace, device: torch.device, card: Card | None) -> tuple[list[Finding], list[Times]]:
    from adafactor.bench import gpu_times
    from adafactor.kernels.progress import progress

    print(about(device))
    off = check(device, arguments.only)
    if card is None or not arguments.bench:
        return off, []
    with progress("timing", math.inf) as tick:
        times = gpu_times.measure(card, arguments.rounds, tick)
    print(f"\n```\n{about(device)}\n{_sum_up(off)}\n\n{gpu_times.show(times)}\n```")
    return off, times


def as_dict(device: torch.device, only: str | None, off: Sequence[Finding], times: Sequence[Times]) -> dict[str, Any]:
    """What was checked where, what is off, and how long steps took."""
    from adafactor.check import verdict

    return {
        **verdict.describe(device),
        "device": str(device),
        "checked": [str(sort) for sort in _sorts(only)],
        "off": [{"sort": str(finding.sort), "case": finding.case, "what": finding.what} for finding in off],
        "times": [asdict(time) for time in times],
    }


def check(device: torch.device, only: str | None = None) -> list[Finding]:
    """Try all sorts of kernels, or those of this name, say how each went, and keep the answers for `auto`."""
    from adafactor.check import trial, verdict
    from adafactor.kernels.progress import progress

    if not (sorts := _sorts(only)):
        raise ValueError(f"--only {only}: there are {'; '.join(map(str, _sorts()))}")
    forms, cases = forms_for(device), trial.CASES
    width = max(len(str(sort)) for sort in sorts)
    print(
        f"{len(forms)} tensors of every shape and order in memory, {len(cases)} settings, {trial.STEPS} steps each: "
        f"against plain torch on the same device, twice, {'captured in a graph, ' * (device.type == 'cuda')}"
        "with scaled gradients"
    )
    found: list[Finding] = []
    for sort in sorts:
        start = time.perf_counter()
        with progress("trying", math.inf) as tell:
            off = trial.examine(device, sort, forms, cases, tell)
        print(f"  {_mark(not off)} {str(sort):<{width}}  {time.perf_counter() - start:6.1f} s", flush=True)
        for finding in off:
            print(f"      {finding.case}: {finding.what}", flush=True)
        if device.type != "cpu":  # the interpreter tries fewer tensors
            verdict.keep(verdict.describe(device), sort, off)
        found += off
    print(_sum_up(found) if device.type != "cpu" or found else "All is right, in the interpreter.")
    return found


def about(device: torch.device) -> str:
    """Versions and card, in a line."""
    from adafactor.check import verdict

    found = verdict.describe(device)
    versions = ", ".join(f"{name} {found[name]}" for name in ("adafactor", "torch", "triton"))
    if device.type == "cpu":
        return f"{versions}; no GPU: kernels run on the CPU, in Triton's interpreter (TRITON_INTERPRET=1)"
    return f"{versions}; {found['name']} ({device}, {found['capability']}, driver {found['driver']})"


def forms_for(device: torch.device) -> Sequence[Form]:
    """All tensors on a card; a few small ones in the interpreter, which takes milliseconds for every program."""
    from adafactor.check.trial import FORMS, Form

    return FORMS if device.type != "cpu" else (Form((9, 7)), Form((6, 5), "transposed"), Form((5,)))


def _sorts(only: str | None = None) -> list[Sort]:
    """Those of this name that can be had: torch has not always let a gradient's dtype differ from its parameter's."""
    import torch

    from adafactor.check.trial import SORTS

    found = [sort for sort in SORTS if sort.x == sort.g or hasattr(torch.Tensor, "grad_dtype")]
    return [sort for sort in found if only is None or only in str(sort)]


def _sum_up(found: Sequence[Finding]) -> str:
    if not found:
        return 'All is right: backend="auto" takes Triton for what was checked.'
    if all(finding.is_told for finding in found):
        return 'Graphs cannot be captured here; backend="auto" takes Triton for all else that was checked.'
    sorts = ", ".join(dict.fromkeys(f"[{finding.sort}]" for finding in found))
    return f'{len(found)} things are off, in {sorts}: backend="auto" steps these with plain torch.'


def _device(name: str | None) -> tuple[torch.device, Card | None]:
    """The card of this name, or the first that is there; the CPU where Triton interprets."""
    import torch

    from adafactor.bench import place

    try:
        from triton import knobs

        is_interpreted = knobs.runtime.interpret
    except ImportError:  # a missing GPU is said before a missing Triton
        is_interpreted = False
    if is_interpreted:
        if name not in (None, "cpu"):
            raise ValueError(f"--device {name}: with TRITON_INTERPRET=1 kernels run on the CPU")
        return torch.device("cpu"), None
    types = [kind for kind in ("cuda", "xpu") if torch.get_device_module(kind).is_available()]
    if name is None and not types:
        raise ValueError(f"there is no GPU here that torch {torch.__version__} can use, so nothing was checked")
    card = place.find(name or types[0])
    if not isinstance(card, place.Card):
        raise ValueError(f"--device {name}: the step in Triton is for GPUs, and for the CPU with TRITON_INTERPRET=1")
    return card.device, card


def _mark(right: bool) -> str:
    if sys.stdout.isatty() and (sys.stdout.encoding or "").lower().startswith("utf"):
        return "✓" if right else "✗"
    return "ok " if right else "OFF"
