"""Three steps of everything: shapes × memory × dtypes × keywords × groups × magnitudes × threads, against the oracle.

A case is a function of its number alone: `python -m tests.attack.test_fuzz 1234` runs one again and says what is wrong.
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from adafactor import Adafactor
from tests import inside
from tests.reference import Expected

STEPS = 3
MIXED = 1_000_000  # from here on, gradients may have another dtype than their parameters
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LARGE = [(300, 200), (3, 20_000), (20_000, 3), (70_000,), (40, 30, 40), (2, 3, 90, 90)]  # that threads share
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
X_RANGE = {torch.float16: (-7.0, 3.0)}  # of decimal exponents; of every other dtype
G_RANGE = {torch.float16: (-7.0, 4.0)}
X_USUAL, G_USUAL = (-25.0, 17.0), (-30.0, 18.0)
KEYWORDS: dict[str, list[Any]] = {
    "lr": [1e-2, 1e-2, 0.5, 0.0],
    "lr_decay": ["rsqrt", None],
    "relative": [True, True, False],
    "factored": ["outer", "outer", "row", "column", False],
    "beta1": [0.0, 0.0, 0.9, 0.3],
    "momentum_of": ["update", "gradient", "direction"],
    "momentum_dtype": ["float32", "bfloat16", "int8"],
    "beta2": [None, None, 0.999, 0.5, 0.0],
    "decay_rate": [0.8, 0.8, 0.5, 1.0],
    "beta2_max": [None, 0.3],
    "clip": [1.0, 1.0, None, 0.1, 3.0],
    "eps": [(1e-30, 1e-3), (1e-30, 1e-3), (1e-30, 0.5), (1e-8, 1e-6), (2e-34, 1e-3)],
    "weight_decay": [0.0, 0.1, 1.5],
    "weight_decay_by": ["rho", "alpha", "lr"],
    "axes": [None, None, (0, 1), (-1, -2), (-2, -1), (0, -1)],
    "min_factored": [0, 0, 6],
    "maximize": [False, False, True],
    "rounding": ["nearest", "stochastic", "kahan"],
    "on_nonfinite": ["skip", "skip", "raise", "ignore"],
    "per_slice": [False, True],
    "seed": [0, 1, 2**63 + 5],
}


@dataclass
class Case:
    """What one number stands for."""

    number: int
    threads: int
    groups: list[dict[str, Any]]  # keywords
    params: list[Tensor]
    members: list[int] = field(default_factory=list)  # the group of each parameter
    grads: list[list[Tensor | None]] = field(default_factory=list)  # of each step

    def __str__(self) -> str:
        """In one line."""
        told = [
            f"{str(p.dtype)[6:]}{tuple(p.shape)}/{p.stride()} in group {group}"
            for p, group in zip(self.params, self.members, strict=True)
        ]
        return f"case {self.number}: {self.threads} threads, {', '.join(told)}, {self.groups}"


def pick(random: np.random.Generator, choices: list[Any]) -> Any:
    return choices[int(random.integers(len(choices)))]


def make_shape(random: np.random.Generator) -> tuple[int, ...]:
    if random.random() < 0.04:
        return tuple(pick(random, LARGE))
    axes = int(random.integers(0, 6))
    shape = [int(random.integers(2, 13 if axes < 3 else 9 - axes)) for _ in range(axes)]
    for axis in range(len(shape)):
        if random.random() < 0.15:
            shape[axis] = 1
        elif random.random() < 0.02:
            shape[axis] = 0
        elif random.random() < 0.05:
            shape[axis] = int(random.integers(10, 70))
    return tuple(shape)


def laid_out(random: np.random.Generator, t: Tensor, like: Tensor | None = None) -> Tensor:
    """The same values in some other memory, or in the order of another tensor's."""
    kind = pick(random, ["contiguous", "like", "like", "permuted", "gaps", "reversed"])
    if kind == "like" and like is not None:
        return torch.empty_like(like, dtype=t.dtype, memory_format=torch.preserve_format).copy_(t)
    if kind in ("permuted", "reversed") and t.dim() > 1:
        order = [int(a) for a in random.permutation(t.dim())] if kind == "permuted" else [*range(t.dim())][::-1]
        back = [order.index(axis) for axis in range(t.dim())]
        return t.permute(order).contiguous().permute(back)
    if kind == "gaps" and t.dim():
        axis, step = int(random.integers(t.dim())), int(random.integers(2, 4))
        room = torch.full([*t.shape[:axis], t.shape[axis] * step, *t.shape[axis + 1 :]], float("nan"), dtype=t.dtype)
        there = room[(slice(None),) * axis + (slice(None, None, step),)]
        return there.copy_(t)
    return t.contiguous()


def filled(
    random: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, span: tuple[float, float]
) -> Tensor:
    """Normal values of one magnitude in the span, or of one for each row; some of them zeros."""
    value = np.clip(random.normal(size=shape), -3, 3)
    exponent = random.uniform(*span)
    if random.random() < 0.5:
        exponent = random.uniform(max(span[0], -3.0), min(span[1], 1.0))
    scale: Any = 10.0**exponent
    if shape and random.random() < 0.2:
        scale = 10.0 ** random.uniform(*span, size=shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    if random.random() < 0.2:
        value = value * (random.random(size=shape) < 0.5)
    if random.random() < 0.05:
        value = value * 0
    return torch.tensor(value * scale).to(dtype)


def make_gradient(random: np.random.Generator, p: Tensor, mixed: bool) -> Tensor | None:
    if random.random() < 0.05:
        return None
    dtype = pick(random, DTYPES) if mixed and random.random() < 0.1 else p.dtype
    g = filled(random, tuple(p.shape), dtype, G_RANGE.get(dtype, G_USUAL))
    if random.random() < 0.08 and g.numel():
        g.view(-1)[int(random.integers(g.numel()))] = pick(random, NOT_FINITE)
    if random.random() < 0.1 and g.dim():
        axis = int(random.integers(g.dim()))
        return g.narrow(axis, 0, min(1, g.shape[axis])).expand(g.shape) if g.numel() else g
    return laid_out(random, g, p)


def make_case(number: int) -> Case:
    random = np.random.default_rng(number)
    groups = [
        {name: pick(random, choices) for name, choices in KEYWORDS.items() if random.random() < 0.6}
        for _ in range(int(pick(random, [1, 2, 3])))
    ]
    for keywords in groups:
        if not keywords.get("beta1"):  # without a momentum its format is refused
            keywords.pop("momentum_dtype", None)
        if keywords.get("beta2") is not None:  # both together are refused
            keywords.pop("beta2_max", None)
    case, usual = Case(number, int(pick(random, [1, 2, 4])), groups, []), pick(random, DTYPES)
    for group in range(len(groups)):
        case.members += [group] * int(pick(random, [1, 1, 2, 4]))
    for _ in case.members:  # half of them of one dtype, so that groups meet in one work
        dtype = pick(random, [usual, pick(random, DTYPES)])
        value = filled(random, make_shape(random), dtype, X_RANGE.get(dtype, X_USUAL))
        case.params.append(laid_out(random, value))
    mixed = number >= MIXED and hasattr(Tensor, "grad_dtype")
    case.grads = [[make_gradient(random, p, mixed) for p in case.params] for _ in range(STEPS)]
    return case


def copied(t: Tensor) -> Tensor:
    """A copy that lies in memory as the original does, gaps and repetitions included."""
    room = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype)
    room.copy_(t.as_strided(room.shape, (1,), 0))
    return room.as_strided(t.shape, t.stride(), t.storage_offset())


def problem(case: Case, backend: str) -> str:
    """What is wrong with a case on a backend; nothing if all is right."""
    params = [Parameter(copied(p)) for p in case.params]
    made: list[dict[str, Any]] = [{"params": [], **keywords} for keywords in case.groups]
    for p, member in zip(params, case.members, strict=True):
        made[member]["params"].append(p)
    optimizer = Adafactor(made, backend=backend)
    for number, grads in enumerate(case.grads, start=1):
        for p, g in zip(params, grads, strict=True):
            p.grad = None
            if g is not None and g.dtype != p.dtype:
                p.grad_dtype = None
            p.grad = None if g is None else copied(g)
        expected = Expected(optimizer)
        if expected.is_poisoned:  # let through as asked
            return ""
        try:
            optimizer.step()
        except FloatingPointError:
            if not expected.is_refused:
                return f"step {number}: refused a finite gradient"
        except ValueError as wrong:
            if backend in inside.COMPILED and "cannot step" in str(wrong):
                return ""
            raise
        else:
            if expected.is_refused:
                return f"step {number}: a gradient that is not finite was not refused"
        if wrong_here := expected.problem():
            return f"step {number}, {wrong_here}"
    return ""


def problems(number: int) -> list[str]:
    """Of one case, on every backend."""
    case = make_case(number)
    found = []
    torch.set_num_threads(case.threads)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*its gradient is not finite", RuntimeWarning)
        for backend in inside.AND_AUTO:
            if backend == "cpu" and number % 4:  # it differs from "auto" in what it refuses
                continue
            if wrong := problem(case, backend):
                found.append(f"{backend}, {case}: {wrong}")
    torch.set_num_threads(1)
    return found


def fuzz(first: int, seconds: float, least: int) -> tuple[int, list[str]]:
    """Cases from a number on until the time is over; how many, and the problems of the first that have any."""
    end, number, found = time.monotonic() + seconds, first, list[str]()
    while (time.monotonic() < end or number - first < least) and len(found) < 10:
        found += problems(number)
        number += 1
    return number - first, found


def test_every_case_equals_the_oracle(record_property: Any) -> None:
    for dtype in DTYPES:  # what is compiled first is not counted
        p = torch.ones(4, 3, dtype=dtype, requires_grad=True)
        p.grad = torch.ones(4, 3, dtype=dtype)
        Adafactor([p]).step()
    count, found = fuzz(0, inside.seconds() / 2, 100)
    mixed, more = fuzz(MIXED, inside.seconds() / 2, 100)
    record_property("cases", count + mixed)
    assert not found + more, "\n".join(found + more)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print("\n".join(problems(int(argument)) or [f"case {argument} is right"]))
