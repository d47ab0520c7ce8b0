"""`adafactor warm`: compile the step now, so that no training waits for it."""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")
MOMENTA = ("none", "update", "gradient")
ROUNDINGS = ("nearest", "stochastic", "kahan")
SHAPES = ((8, 8), (8,))
CONVOLUTION = (4, 4, 3, 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    _add_list(parser, "--dtype", DTYPES, ["float32", "bfloat16"], "the parameters' dtypes")
    _add_list(parser, "--momentum", MOMENTA, ["none"], "what beta1 averages; none: beta1=0")
    _add_list(parser, "--rounding", ROUNDINGS, ["nearest"], "of 16-bit parameters")
    parser.add_argument("--convolutions", action="store_true", help="also for tensors with more than two axes")
    parser.add_argument("--all", action="store_true", help="everything that there is: some minutes")


def _add_list(
    parser: argparse.ArgumentParser, name: str, allowed: tuple[str, ...], default: list[str], text: str
) -> None:
    known = f"{text}: any of {', '.join(allowed)} (default: {' '.join(default)})"
    parser.add_argument(name, nargs="+", choices=allowed, default=default, metavar=name[2:].upper(), help=known)


def run(arguments: argparse.Namespace) -> int:
    """Take a step with each kind of parameter and setting; say how long each took, and where the code is."""
    chosen = (arguments.dtype, arguments.momentum, arguments.rounding)
    if arguments.all:
        chosen = (DTYPES, MOMENTA, ROUNDINGS)
    shapes = SHAPES + ((CONVOLUTION,) if arguments.convolutions or arguments.all else ())
    for dtype, momentum, rounding in itertools.product(*chosen):
        started = time.perf_counter()
        _step(dtype, momentum, rounding, shapes)
        print(f"{dtype}, momentum {momentum}, rounding {rounding}: {time.perf_counter() - started:.1f} s", flush=True)
    from adafactor.kernels.cpu.native import machine_code

    files = machine_code.kept()
    if not files:
        print("Nothing could be kept: the warning says why.")
        return 1
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} compiled functions ({size / 1000:.0f} kB) are in {files[0].parent}")
    return 0


def _step(dtype: str, momentum: str, rounding: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    import torch

    from adafactor import Adafactor

    parameters = [torch.ones(shape, dtype=getattr(torch, dtype), requires_grad=True) for shape in shapes]
    settings: dict[str, Any] = {} if momentum == "none" else {"beta1": 0.9, "momentum_of": momentum}
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    Adafactor(parameters, backend="cpu", rounding=rounding, **settings).step()
