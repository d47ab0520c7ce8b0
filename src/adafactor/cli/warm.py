"""`adafactor warm`: compile the step now, so that no training waits for it; for a GPU also where there is none."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from adafactor import Adafactor, kernels
from adafactor.check.selftest import TENSORS, TensorSpec, Variant, grouped
from adafactor.planning import shapes_of

CHOICES = {  # option: what is allowed, what it is without the option, and what it is about
    "--dtype": (("float32", "bfloat16", "float16", "float64"), ["float32", "bfloat16"], "the parameters' dtypes"),
    "--momentum": (("none", "update", "gradient", "direction"), ["none"], "what beta1 averages; none: beta1=0"),
    "--momentum-dtype": (("float32", "bfloat16", "int8"), ["float32"], "what the momentum is kept in"),
    "--rounding": (("nearest", "stochastic", "kahan"), ["nearest"], "of 16-bit parameters"),
}
ON_CPU, CONVOLUTION = (TensorSpec((32, 128)), TensorSpec((8,))), TensorSpec((4, 4, 3, 3))
# NVIDIA's architectures: its number, and the KB of memory that programs of a multiprocessor share
CARDS = {
    "sm_80": (80, 164),  # A100
    "sm_86": (86, 100),  # RTX 30, A10, A40
    "sm_89": (89, 100),  # RTX 40, L4, L40
    "sm_90": (90, 228),  # H100, H200
    "sm_100": (100, 228),  # B200
    "sm_120": (120, 100),  # RTX 50
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    for name, (allowed, default, about) in CHOICES.items():
        text = f"{about}: any of {', '.join(allowed)} (default: {' '.join(default)})"
        parser.add_argument(name, nargs="+", choices=allowed, default=default, metavar=name[2:].upper(), help=text)
    parser.add_argument("--convolutions", action="store_true", help="also for tensors with more than two axes")
    parser.add_argument("--all", action="store_true", help="everything that there is: some minutes")
    known = f"fill Triton's cache for this GPU, which need not be here: {', '.join(CARDS)}"
    parser.add_argument("--device", choices=CARDS, metavar="CARD", help=known)
    models = "with --device: also the kernels for these models, named as in `adafactor plan`"
    parser.add_argument("--model", nargs="+", default=[], help=models)


def run(arguments: argparse.Namespace) -> int:
    """Take a step with each kind of parameter and setting; say how long each took, and where the code is."""
    if arguments.model and arguments.device is None:
        raise ValueError("--model is for --device: what is compiled for a CPU does not depend on a model's shapes")
    chosen = [arguments.dtype, arguments.momentum, arguments.momentum_dtype, arguments.rounding]
    if arguments.all:
        chosen = [allowed for allowed, _, _ in CHOICES.values()]
    variants = dict.fromkeys(itertools.starmap(_variant, itertools.product(*chosen)))  # each of them once
    if arguments.device is not None:
        return _fill_triton_cache(arguments.device, arguments.model, variants)
    _step_all(variants, ON_CPU + (CONVOLUTION,) * (arguments.convolutions or arguments.all), "cpu")
    from adafactor.kernels.cpu.native import machine_code

    files = machine_code.kept()
    if not files:
        print("Nothing could be kept: the warning says why.")
        return 1
    print(f"{len(files)} compiled functions ({_kilobytes(files)} kB) are in {files[0].parent}")
    return 0


def _fill_triton_cache(card: str, models: Sequence[str], variants: Iterable[Variant]) -> int:
    """Compile what the check on a card steps, which `auto` asks for first, and what these models need besides."""
    kernels.check("triton")
    from triton import knobs

    if knobs.runtime.interpret:
        raise ValueError(f"--device {card}: with TRITON_INTERPRET=1 nothing is compiled")
    if torch.version.hip or getattr(torch.version, "xpu", None):
        raise ValueError(f"--device {card} is one of NVIDIA's, and torch {torch.__version__} is not built for them")
    # kernels depend on how long rows are, not on how many there are: a part of each matrix will do
    shapes = [shape for model in models for shape in shapes_of(model)]
    parts = dict.fromkeys((min(shape[0], 64), *shape[1:]) if len(shape) == 2 else shape for shape in shapes)
    with _compiling_for(card) as hashes:
        _step_all(variants, (*TENSORS, *map(TensorSpec, parts)), "triton")
    folder = Path(knobs.cache.dir)
    files = [file for file in folder.rglob("*") if file.is_file()]
    print(f"{len(hashes)} kernels for {card} are in {folder} ({_kilobytes(files)} kB in all)")
    return 0


@contextmanager
def _compiling_for(card: str) -> Iterator[set[str]]:
    """Let the Triton backend compile for a card what it launches, and run nothing; yield the hashes of the kernels.

    Triton itself finds the key of each kernel, from the arguments of a real launch and the stand-in for a driver, which
    tells it the same as the driver of the card would: so the key is the one under which a training looks for it.
    """
    from unittest.mock import patch

    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from adafactor.kernels import triton as backend
    from adafactor.kernels.triton import executor

    architecture, shared = CARDS[card]
    hashes: set[str] = set()

    def compile_only(kernel: Any, programs: int, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        if programs:
            hashes.add(kernel.warmup(*arguments, grid=(programs,), **options).metadata.hash)

    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: card,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(stand_in)
    try:
        with (
            patch.multiple(backend, INTERPRETED=True),  # it takes tensors on a CPU
            patch.multiple(executor, launch=compile_only, SHARED_MEMORY=1024 * shared),
        ):
            yield hashes
    finally:
        driver.set_active(None)  # the next to ask gets the real one


def _variant(dtype: str, momentum: str, momentum_dtype: str, rounding: str) -> Variant:
    """Return what to compile for; without a momentum, there is none to keep in any dtype."""
    x = getattr(torch, dtype)
    return Variant(x, x, None, rounding) if momentum == "none" else Variant(x, x, momentum, rounding, momentum_dtype)


def _step_all(variants: Iterable[Variant], tensors: Sequence[TensorSpec], backend: str) -> None:
    """Take a step in every setting, with gradients that have the dtype of their parameters."""
    for variant in variants:
        started = time.perf_counter()
        parameters = [spec.copy(torch.ones(spec.shape, dtype=variant.x)).requires_grad_() for spec in tensors]
        for p in parameters:
            p.grad = torch.ones_like(p)
        groups = grouped(parameters, variant.keywords) if backend == "triton" else parameters
        Adafactor(groups, backend=backend, **variant.keywords).step()
        momentum = variant.momentum_of or "none"
        if variant.momentum_dtype != "float32":
            momentum += f" in {variant.momentum_dtype}"
        took = time.perf_counter() - started
        dtype = str(variant.x).removeprefix("torch.")
        print(f"{dtype}, momentum {momentum}, rounding {variant.rounding}: {took:.1f} s", flush=True)


def _kilobytes(files: Sequence[Path]) -> str:
    return f"{sum(file.stat().st_size for file in files) / 1000:.0f}"
