"""Does the step in Triton do on this card what eager PyTorch does there? Small tensors, made up for it, tell.

A *variant* is what kernels are compiled for: the dtypes of X and G, what momentum averages, how X is rounded. For each
of them every case takes a few steps with tensors of every shape and order in memory, side by side:

| what | must be |
|---|---|
| Triton against `eager` on the same device | as near as rounding leaves it |
| Triton once more | the same bits |
| a gradient with a NaN or an infinity | X and state untouched, to the bit |
| replayed from a CUDA graph, lr and gradients changing | the same bits as without a graph |

It has tensors and random numbers of its own: nothing of a model, and no generator of torch's, is touched.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adafactor.check.compare import State, Wrong, change, deviation
from adafactor.core import state as states
from adafactor.core.contract import Form, Parameter
from adafactor.core.record import StepMetrics
from adafactor.core.settings import Settings

Make = Callable[..., Optimizer]  # makes an optimizer of parameters, `backend` and keywords
SIZES = (1.0, 3.0, 0.2)  # of the gradients in each step
STEPS = len(SIZES)
GRAPH = "captured in a graph"


@dataclass(frozen=True)
class Variant:
    """What kernels are compiled for, but for how tensors lie in memory."""

    x: torch.dtype = torch.float32
    g: torch.dtype = torch.float32
    momentum_of: str | None = None
    rounding: str = "nearest"
    momentum_dtype: str = "float32"

    @property
    def keywords(self) -> dict[str, Any]:
        """The optimizer's keywords."""
        names = ("momentum_of", "momentum_dtype")
        momentum = {"beta1": 0.9, **{name: getattr(self, name) for name in names}} if self.momentum_of else {}
        return {"rounding": self.rounding, **momentum}

    def __str__(self) -> str:
        """Name it as people do."""
        x, g = (str(dtype).removeprefix("torch.") for dtype in (self.x, self.g))
        gradients = "" if g == x else f"{g} gradients"
        rounding = "" if self.rounding == "nearest" else f"{self.rounding} rounding"
        momentum = f"momentum of the {self.momentum_of}" if self.momentum_of else ""
        if self.momentum_dtype != "float32":
            momentum += f" in {self.momentum_dtype}"
        return ", ".join(filter(None, [x, gradients, rounding, momentum]))


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's shape and how it lies in memory."""

    shape: tuple[int, ...]
    storage: str = ""  # "transposed", "channels last"

    def __str__(self) -> str:
        """Name it as people do."""
        return " ".join(["×".join(map(str, self.shape)) or "a scalar", self.storage]).strip()

    def copy(self, values: Tensor) -> Tensor:
        """Copy values to memory of their own, in this order."""
        if self.storage == "transposed":
            return values.t().clone(memory_format=torch.contiguous_format).t()
        channels = self.storage == "channels last"
        return values.clone(memory_format=torch.channels_last if channels else torch.contiguous_format)


Comparisons = Iterator[tuple[TensorSpec, Wrong | None]]  # tensors, and what is wrong with each
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
VARIANTS = (
    Variant(),
    Variant(momentum_of="update"),
    Variant(momentum_of="gradient"),
    Variant(BF16, BF16),
    Variant(BF16, BF16, None, "stochastic"),
    Variant(BF16, BF16, "update", "kahan"),
    Variant(BF16, FP32, "gradient", "stochastic"),
    Variant(FP16, FP16, "update", "stochastic"),
    Variant(FP64, FP64),
    Variant(FP32, FP32, "update", momentum_dtype="bfloat16"),
    Variant(FP32, FP32, "gradient", momentum_dtype="int8"),
    Variant(BF16, BF16, "direction", "stochastic", "int8"),
    Variant(BF16, BF16, "update", "nearest", "bfloat16"),
)
SHAPES = ((256, 512), (129, 77), (1000, 48), (24, 9001), (16, 16384), (5, 17000), (3, 40, 72), (32, 16, 3, 3))
TENSORS = (
    *map(TensorSpec, (*SHAPES, (4096,), (1001,), (1,), ())),
    TensorSpec((32, 16, 3, 3), "channels last"),
    TensorSpec((96, 200), "transposed"),
    TensorSpec((77, 33), "transposed"),
)


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    variant: Variant
    setting: str  # the name of a case
    what: str
    tensor: str = ""  # of a difference
    details: str = ""  # for whoever has to mend it: the first wrong element, or where an exception comes from
    is_exception: bool = False  # no difference in a comparison, so the reason may pass: a full disk, no compiler yet

    @property
    def raises(self) -> bool:
        """Whether whoever is affected gets an exception: nobody but who captures a graph needs to care."""
        return self.is_exception and self.setting == GRAPH

    def __str__(self) -> str:
        """Say it in one sentence without its full stop."""
        return ": ".join(filter(None, [f"{self.variant}, {self.setting}", self.tensor, self.what]))


def examine(
    make: Make,
    device: torch.device,
    variant: Variant,
    tensors: Sequence[TensorSpec] = TENSORS,
    cases: Mapping[str, Case] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Finding]:
    """Find everything that is wrong with one variant of the kernels on a GPU, or on the CPU in Triton's interpreter.

    All tensors are stepped at once, in one case after the other: in all that the device has, if none are given. `tell`
    is called with what comes next.
    """
    data, findings = Data(make, device, variant, tensors), []
    for name, case in (cases_of(device) if cases is None else cases).items():
        tell(f"{variant}: {name}")
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # eager PyTorch on a CPU warns of gradients that are skipped
                compared = [(str(spec), wrong) for spec, wrong in case(data) if wrong]
            findings += [Finding(variant, name, what, tensor, where) for tensor, (what, where) in compared]
        except torch.OutOfMemoryError:
            raise  # says nothing about the kernels
        except Exception as problem:  # whatever the compiler or the driver raises: it does not work here
            first = next(iter(str(problem).splitlines()), "")
            text = "".join(traceback.format_exception(problem, limit=-6)).strip()
            findings.append(
                Finding(variant, name, f"{type(problem).__name__}: {first}", details=text, is_exception=True)
            )
    return findings


class Data:
    """Where the parameters start, their gradients in each step, and what makes an optimizer of them."""

    def __init__(self, make: Make, device: torch.device, variant: Variant, tensors: Sequence[TensorSpec]):
        """Make gradients of uneven size over rows, columns and time, on the host and with a generator of their own."""
        self.make, self.device, self.variant, self.tensors = make, device, variant, tensors
        generator = torch.Generator("cpu").manual_seed(20180411)

        def normal(shape: Sequence[int]) -> Tensor:
            return torch.empty(tuple(shape), dtype=FP32, device="cpu").normal_(generator=generator)

        self.start: list[Tensor] = []
        self.grads: list[list[Tensor]] = [[] for _ in SIZES]  # of each step
        for spec in tensors:
            self.start.append(spec.copy(normal(spec.shape).mul(0.05).to(device, variant.x)))
            scale = torch.ones(spec.shape, device="cpu", dtype=FP32)
            for axis, length in enumerate(spec.shape):
                scale = scale * normal([length]).mul(0.5).exp().reshape([-1] + [1] * (len(spec.shape) - axis - 1))
            for step, size in zip(self.grads, SIZES, strict=True):
                step.append(spec.copy((normal(spec.shape) * scale * size).to(device, variant.g)))


class Training:
    """Parameters, and the optimizer that steps them with one backend."""

    def __init__(self, data: Data, backend: str, **keywords: Any):
        """Copy the start; gradients stay where they are from step to step."""
        self.params = [torch.nn.Parameter(spec.copy(x)) for spec, x in zip(data.tensors, data.start, strict=True)]
        for p, g in zip(self.params, data.grads[0], strict=True):
            if g.dtype != p.dtype:
                p.grad_dtype = None
            p.grad = torch.empty_like(g).copy_(g)
        keywords = {**data.variant.keywords, **keywords}
        self.optimizer = data.make(grouped(self.params, keywords), backend=backend, **keywords)

    def set_gradients(self, grads: Sequence[Tensor], scale: float = 1.0) -> None:
        """Write gradients where the last ones are."""
        for p, g in zip(self.params, grads, strict=True):
            assert p.grad is not None
            torch.mul(g, scale, out=p.grad)

    def step(self, grads: Sequence[Tensor], scale: float = 1.0) -> None:
        """Take one step with these gradients."""
        self.set_gradients(grads, scale)
        self.optimizer.step()

    def snapshot(self) -> list[State]:
        """Copy all that a step may write to, for each parameter."""
        every = [{"X": p, **self.optimizer.state[p]} for p in self.params]
        return [{name: t.detach().clone() for name, t in one.items() if isinstance(t, Tensor)} for one in every]


def grouped(params: Sequence[Tensor], keywords: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Divide parameters into groups: what Triton would leave to eager PyTorch is rounded in a way that it has."""
    from adafactor.kernels import triton

    settings = Settings(**keywords)
    rounding = "nearest" if settings.rounding == "stochastic" else settings.rounding
    able: dict[str, Any] = {"params": []}
    others: dict[str, Any] = {"params": [], "rounding": rounding, "momentum_dtype": "float32"}
    for p in params:
        assert p.grad is not None
        form = Form(type(p.grad), p.grad.dtype, p.shape, p.grad.stride())
        factoring = states.factoring_of(p, settings)
        state = states.new_state(p, factoring, settings, "")
        parameter = Parameter(p, p.detach(), state, factoring, settings, 0, "", 0, StepMetrics(), form=form)
        group = able if triton.why_not(parameter) is None else others
        group["params"].append(p)
    return [group for group in (able, others) if group["params"]]


def compare(data: Data, keywords: dict[str, Any], bad_gradients: bool = False) -> Comparisons:
    """Compare Triton with eager PyTorch, and with itself; in the second step every other gradient may be bad."""
    ours, again, eager = (Training(data, name, **keywords) for name in ("triton", "triton", "eager"))
    travelled = [0.0] * len(data.tensors)
    before = eager.snapshot()
    for number, grads in enumerate(data.grads):
        bad = bad_gradients and number == 1
        untouched = ours.snapshot()
        for training in (ours, again, eager):
            training.step(_spoil(grads) if bad else grads)
        if bad:
            yield from _changes(data.tensors[::2], untouched[::2], ours.snapshot()[::2])
        now = eager.snapshot()
        for i, (a, b) in enumerate(zip(before, now, strict=True)):
            travelled[i] += float((b["X"].double() - a["X"].double()).abs().max())
        before = now
    after = ours.snapshot()
    yield from zip(data.tensors, map(deviation, after, before, travelled), strict=True)
    yield from _changes(data.tensors, after, again.snapshot(), " from one run to the next")


def replay(data: Data) -> Comparisons:
    """Replay one step in a CUDA graph with other rates and gradients, beside the same steps without a graph."""
    rates = [torch.full((), 1e-2, dtype=FP32, device=data.device) for _ in range(2)]
    ours, uncaptured = (Training(data, "triton", lr=lr, lr_decay=None) for lr in rates)
    aside, graph = torch.cuda.Stream(data.device), torch.cuda.CUDAGraph()
    with torch.cuda.device(data.device):
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            ours.step(data.grads[0])
        torch.cuda.current_stream().wait_stream(aside)
        uncaptured.step(data.grads[0])
        # other threads, which may load data, are free to call what a capture forbids
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ours.optimizer.step()
        for number, grads in enumerate(data.grads):
            for lr in rates:
                lr.fill_(1e-2 / (number + 2))
            ours.set_gradients(grads)
            graph.replay()
            uncaptured.step(grads)
        torch.cuda.current_stream().synchronize()
    yield from _changes(data.tensors, uncaptured.snapshot(), ours.snapshot(), " when replayed")


Case = Callable[[Data], Comparisons]
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "row means": {"factored": "row"},
    "column means": {"factored": "column"},
    "unfactored": {"factored": False},
    "absolute steps, weight decay": {"relative": False, "lr": 1e-3, "lr_decay": None, "weight_decay": 0.1},
    "no clipping, constant beta2": {"clip": None, "beta2": 0.99},
    "weight decay by alpha": {"weight_decay": 0.1, "weight_decay_by": "alpha"},
    "maximize": {"maximize": True, "eps": (1e-8, 1e-2)},
}
CASES: dict[str, Case] = {
    **{name: partial(compare, keywords=keywords) for name, keywords in SETTINGS.items()},
    "gradients with NaN and infinity": partial(compare, keywords={}, bad_gradients=True),
    GRAPH: replay,
}


def cases_of(device: torch.device) -> dict[str, Case]:
    """Return the cases that can be tried on a device: only CUDA has graphs."""
    return {name: case for name, case in CASES.items() if name != GRAPH or device.type == "cuda"}


def _spoil(grads: Sequence[Tensor]) -> list[Tensor]:
    """Copy gradients, every other with an infinity in the middle or a NaN at its end."""
    copies = [g.clone() for g in grads]
    for i, g in enumerate(copies[::2]):
        at = [n - 1 if i % 2 else n // 2 for n in g.shape]
        g[tuple(at)] = math.nan if i % 2 else math.inf
    return copies


def _changes(tensors: Sequence[TensorSpec], expected: list[State], actual: list[State], when: str = "") -> Comparisons:
    return zip(tensors, map(partial(change, when=when), expected, actual), strict=True)
