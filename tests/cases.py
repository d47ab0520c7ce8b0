"""What a step may be asked to do: a row for each keyword, dtype, shape and order of memory, crossed with properties.

A new keyword or a new backend is one row here; `tests/test_properties.py` has what must hold of every row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from adafactor import Adafactor
from tests import interpreter
from tests.inside import BACKENDS
from tests.reference import Expected, Outcome

BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64


@dataclass(frozen=True)
class Case:
    """One row: a parameter, its gradients, and the keywords it is stepped with."""

    name: str
    shape: tuple[int, ...] = (12, 20)
    keywords: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None  # None: the parameter's
    order: tuple[int, ...] | None = None  # of the axes in memory, the slowest first; None: as they come
    left_to_eager: tuple[str, ...] = ()  # compiled backends that refuse it when they are named

    def __str__(self) -> str:
        """For the test's id."""
        return self.name

    def start(self) -> Parameter:
        """X₀, of the size that layers are initialised with."""
        return Parameter(self._in_order(0.05 * normal(self.shape, seed=0)).to(self.dtype))

    def gradient(self, t: int) -> Tensor:
        """Gₜ, of uneven scale over rows, columns and time."""
        scale = torch.ones(())
        for axis, size in enumerate(self.shape):
            spread = normal((size,), seed=7 + axis).exp()
            scale = scale * spread.view([-1 if a == axis else 1 for a in range(len(self.shape))])
        g = normal(self.shape, seed=100 + t) * scale * (0.5 + (5 * t) % 7)
        return self._in_order(g).to(self.grad_dtype or self.dtype)

    def give(self, p: Tensor, g: Tensor) -> None:
        """Let this be its gradient, whatever its dtype."""
        p.grad = None
        if self.grad_dtype is not None:
            p.grad_dtype = None  # any; a copy of a parameter has forgotten it
        p.grad = g

    def grown(self, elements: int) -> Case:
        """The same with about so many elements, so that several threads share it."""
        long = [size for size in self.shape if size > 1]
        factor = (elements / torch.Size(self.shape).numel()) ** (1 / max(len(long), 1))
        return replace(self, shape=tuple(size if size == 1 else round(size * factor) for size in self.shape))

    def optimizer(self, params: Any, backend: str) -> Adafactor:
        """One that steps them as this row says."""
        return Adafactor(params, backend=backend, **self.keywords)

    def _in_order(self, t: Tensor) -> Tensor:
        if self.order is None:
            return t
        return t.permute(self.order).contiguous().permute([self.order.index(axis) for axis in range(t.dim())])


class Run:
    """A parameter of a case with its optimizer."""

    def __init__(self, case: Case, backend: str, start: Tensor | None = None, **keywords: Any):
        """Before the first step; more keywords than the row has, and another X₀, where they are given."""
        self.case, self.t = case, 0
        self.model = nn.ParameterDict({"weight": case.start() if start is None else Parameter(start.clone())})
        self.optimizer = replace(case, keywords={**case.keywords, **keywords}).optimizer(
            self.model.named_parameters(), backend
        )

    @property
    def p(self) -> Parameter:
        """The parameter."""
        weight: Parameter = self.model["weight"]
        return weight

    @property
    def state(self) -> dict[str, Tensor]:
        """What the optimizer keeps of it."""
        state: dict[str, Tensor] = self.optimizer.state[self.p]
        return state

    def step(self, times: int = 1) -> Run:
        """Some steps, each with the gradient of its number."""
        for _ in range(times):
            self.t += 1
            self.case.give(self.p, self.case.gradient(self.t))
            self.optimizer.step()
        return self

    def check(self, g: Tensor | None = None) -> list[Outcome]:
        """Take the next step, or one with that gradient, and compare X and the whole state with the oracle's."""
        self.t += 1
        self.case.give(self.p, self.case.gradient(self.t) if g is None else g)
        expected = Expected(self.optimizer)
        self.optimizer.step()
        problem = expected.problem()
        assert not problem, f"step {self.t}: {problem}"
        return expected.outcomes

    def bits(self) -> dict[str, Tensor]:
        """A copy of all that a step may change."""
        return copy.deepcopy({"X": self.p.detach(), **self.state})


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, which any thread may draw at any time; the same for every dtype up to rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


ABSOLUTE = {"relative": False, "lr": 1e-3, "lr_decay": None}
DIRECTIONS = {"beta1": 0.9, "momentum_of": "direction"}
GRADIENTS = {"beta1": 0.9, "momentum_of": "gradient"}

CASES = [
    Case("the defaults"),
    Case("a tall matrix", (37, 5)),
    Case("one row", (1, 23)),
    Case("a vector", (33,)),
    Case("a scalar", ()),
    Case("a stack", (3, 12, 20)),
    Case("a convolution", (8, 6, 3, 3)),
    Case("channels last", (8, 6, 3, 3), order=(0, 2, 3, 1)),
    Case("transposed in memory", order=(1, 0)),
    Case("axes by hand", (4, 6, 5), {"axes": (2, 0)}),
    Case("rows of negative axes by hand", (4, 6, 5), {"axes": (-1, -2), "factored": "row", "clip": 0.5}),
    Case("the first and the last axis", (9, 2, 7)),
    Case("five axes", (2, 3, 4, 5, 6)),
    Case("equal axes", (5, 5, 5), {"factored": "column"}),
    Case("row means", keywords={"factored": "row"}),
    Case("column means", keywords={"factored": "column"}),
    Case("unfactored", keywords={"factored": False}),
    Case("too short to factor", keywords={"min_factored": 16}),
    Case("absolute steps", keywords={**ABSOLUTE, "clip": None}),
    Case("constant beta2", keywords={"beta2": 0.99, "clip": 0.5, "eps": (1e-8, 1e-2)}),
    Case("bounded beta2", keywords={"beta2_max": 0.3, "decay_rate": 1.0}),
    Case("ascending with decay by alpha", keywords={"maximize": True, "weight_decay": 0.1, "weight_decay_by": "alpha"}),
    Case("absolute steps with decay by alpha", (33,), {**ABSOLUTE, "weight_decay": 0.3, "weight_decay_by": "alpha"}),
    Case("decay by lr", (3, 12, 20), {"lr": 0.9, "weight_decay": 0.1, "weight_decay_by": "lr"}),
    Case("each slice alone", (3, 12, 20), {"per_slice": True}),
    Case("momentum of updates", keywords={"lr": 0.9, "beta1": 0.9, "weight_decay": 0.1}),
    Case("momentum of directions", (33,), DIRECTIONS),
    Case("momentum of gradients", keywords=GRADIENTS, left_to_eager=("triton",)),
    Case("momentum of directions by rows", keywords={**ABSOLUTE, **DIRECTIONS, "factored": "row", "weight_decay": 0.3}),
    Case("momentum of unfactored gradients", (33,), {**GRADIENTS, "beta2": 0.999}, left_to_eager=("triton",)),
    Case("bfloat16 momentum", (9, 256), {"beta1": 0.9, "momentum_dtype": "bfloat16"}),
    Case("int8 momentum", (16, 256), {"beta1": 0.9, "momentum_dtype": "int8"}),
    Case(
        "int8 momentum of a convolution",
        (30, 17, 3, 3),
        {"beta1": 0.9, "momentum_dtype": "int8"},
        left_to_eager=("triton",),
    ),
    Case("int8 momentum of a stack", (3, 20, 130), {"beta1": 0.9, "momentum_dtype": "int8", "factored": "column"}),
    Case(
        "int8 momentum of gradients", (40, 140), {**GRADIENTS, "momentum_dtype": "int8"}, F16, left_to_eager=("triton",)
    ),
    Case("int8 momentum of directions", (16, 256), {**DIRECTIONS, "momentum_dtype": "int8"}, BF16),
    Case("bfloat16", dtype=BF16),
    Case("bfloat16 stochastic", keywords={"rounding": "stochastic"}, dtype=BF16),
    Case("bfloat16 stochastic, ascending vector", (33,), {"rounding": "stochastic", "seed": 3, "maximize": True}, BF16),
    Case("float16 stochastic", (37, 5), {"rounding": "stochastic"}, F16, left_to_eager=("triton",)),
    Case("bfloat16 kahan", keywords={"rounding": "kahan"}, dtype=BF16),
    Case("float16", dtype=F16),
    Case("float32 with bfloat16 gradients", grad_dtype=BF16),
    Case("bfloat16 with float32 gradients", keywords={"rounding": "kahan"}, dtype=BF16, grad_dtype=torch.float32),
    Case("float64", dtype=F64, left_to_eager=("cpu", "triton")),
    Case("float64 with float32 gradients", dtype=F64, grad_dtype=torch.float32, left_to_eager=("cpu", "triton")),
    Case("float16 with float64 gradients", dtype=F16, grad_dtype=F64, left_to_eager=("cpu", "triton")),
    Case("an eps1 and an eps2 that count", keywords={"eps": (0.5, 0.1)}),
    Case("unfactored with an eps1 and an eps2 that count", keywords={"eps": (0.5, 0.1), "factored": False}),
]
BY_NAME = {case.name: case for case in CASES}


def is_there(backend: str) -> bool:
    """Whether this process can step with it."""
    return backend != "triton" or interpreter.IS_THERE


FEW = ("the defaults", "a vector", "bfloat16 stochastic", "int8 momentum")  # for what Triton's interpreter is slow at


def crossed(
    cases: Iterable[Case] = CASES, backends: Iterable[str] = BACKENDS, every: bool = False
) -> pytest.MarkDecorator:
    """Each row on each backend that takes it; in Triton's interpreter only a few, or `every` one."""
    rows = []
    for case in cases:
        for backend in backends:
            if is_there(backend) and backend not in case.left_to_eager:
                is_slow = backend == "triton" and not every and case.name not in FEW
                rows.append(pytest.param(case, backend, id=f"{case}-{backend}", marks=[pytest.mark.slow] * is_slow))
    return pytest.mark.parametrize(("case", "backend"), rows)
