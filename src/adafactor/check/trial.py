"""Does the step in Triton do on this card what plain torch does there? A battery of small tensors, made up for it.

A *sort* is what kernels are compiled for: the dtypes of X and G, what momentum averages, how X is rounded. For each of
them every setting is stepped a few times with tensors of every shape and order in memory, side by side:

| what | must be |
|---|---|
| Triton against `eager` on the same device | as near as rounding leaves it |
| Triton once more | the same bits |
| a gradient with a NaN or an infinity | X and state untouched, to the bit |
| replayed from a CUDA graph, lr and gradients changing | the same bits as without a graph |
| gradients scaled as GradScaler does | the same bits; nothing changes where it found an infinity |

It has tensors and random numbers of its own: nothing of a model, and no generator of torch's, is touched.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adafactor.core.rounding import SIXTEEN_BIT

STEPS = 3
GRAPH, HAS_GRAPHS = "captured in a graph", ("cuda",)
# Largest deviation of X from `eager`, relative to the distance travelled: what rounding leaves, far below any mistake.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.float16: 1e-4}


@dataclass(frozen=True)
class Sort:
    """What kernels are compiled for, but for how tensors lie in memory."""

    x: torch.dtype = torch.float32
    g: torch.dtype = torch.float32
    momentum_of: str | None = None
    rounding: str = "nearest"

    @property
    def keywords(self) -> dict[str, Any]:
        """As the optimizer takes them."""
        momentum = {"beta1": 0.9, "momentum_of": self.momentum_of} if self.momentum_of else {}
        return {"rounding": self.rounding, **momentum}

    def __str__(self) -> str:
        """As people say it."""
        words = [_name(self.x)]
        if self.g != self.x:
            words.append(f"{_name(self.g)} gradients")
        if self.rounding != "nearest":
            words.append(f"{self.rounding} rounding")
        if self.momentum_of:
            words.append(f"momentum of the {self.momentum_of}")
        return ", ".join(words)


@dataclass(frozen=True)
class Form:
    """A tensor's shape and how it lies in memory."""

    shape: tuple[int, ...]
    storage: str = ""  # "transposed", "channels last"

    def __str__(self) -> str:
        """As people say it."""
        return " ".join(["×".join(map(str, self.shape)) or "a scalar", self.storage]).strip()

    def lay(self, values: Tensor) -> Tensor:
        """The same values in memory of their own, in this order."""
        if self.storage == "transposed":
            return values.t().clone(memory_format=torch.contiguous_format).t()
        channels = self.storage == "channels last"
        return values.clone(memory_format=torch.channels_last if channels else torch.contiguous_format)


@dataclass(frozen=True)
class Case:
    """Settings that need no kernels of their own."""

    name: str
    keywords: dict[str, Any] = field(default_factory=dict)
    bad_gradients: bool = False


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SORTS = (
    Sort(),
    Sort(momentum_of="update"),
    Sort(momentum_of="gradient"),
    Sort(BF16, BF16),
    Sort(BF16, BF16, None, "stochastic"),
    Sort(BF16, BF16, "update", "kahan"),
    Sort(BF16, FP32, "gradient", "stochastic"),
    Sort(FP16, FP16, "update", "stochastic"),
    Sort(FP64, FP64),
)
CASES = (
    Case("default"),
    Case("row means", {"factored": "row"}),
    Case("column means", {"factored": "column"}),
    Case("second moments kept whole", {"factored": False}),
    Case("absolute steps, weight decay", {"relative": False, "lr": 1e-3, "lr_decay": None, "weight_decay": 0.1}),
    Case("no clipping, constant beta2", {"clip": None, "beta2": 0.99}),
    Case("maximize", {"maximize": True, "eps": (1e-8, 1e-2)}),
    Case("gradients with NaN and infinity", bad_gradients=True),
)
FORMS = (
    Form((256, 512)),
    Form((129, 77)),
    Form((1000, 48)),
    Form((24, 9001)),
    Form((16, 16384)),
    Form((5, 17000)),
    Form((3, 40, 72)),
    Form((32, 16, 3, 3)),
    Form((32, 16, 3, 3), "channels last"),
    Form((96, 200), "transposed"),
    Form((77, 33), "transposed"),
    Form((4096,)),
    Form((1001,)),
    Form((1,)),
    Form(()),
)


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    sort: Sort
    case: str
    what: str
    is_exception: bool = False  # no difference in a comparison, so the reason may pass: a full disk, no compiler yet

    @property
    def is_told(self) -> bool:
        """Whoever captures a graph gets the exception, too, and whoever does not need not care."""
        return self.is_exception and self.case == GRAPH

    def __str__(self) -> str:
        """One sentence without its full stop."""
        return f"{self.sort}, {self.case}: {self.what}"


def examine(
    device: torch.device,
    sort: Sort,
    forms: Sequence[Form] = FORMS,
    cases: Sequence[Case] = CASES,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Finding]:
    """Everything that is off with one sort of kernels on a device.

    Args:
        device: of a GPU; the CPU, in Triton's interpreter.
        sort: what the kernels are compiled for.
        forms: tensors to step, all at once.
        cases: settings to step them with, one after the other.
        tell: is told what comes next.
    """
    trials: list[tuple[str, Callable[[], Iterator[str]]]] = []
    data = Data.make(device, sort, forms)
    for case in cases:
        trials.append((case.name, lambda case=case: _compared(data, case)))  # type: ignore[misc]
    trials.append(("GradScaler", lambda: _scaled(data)))
    if device.type in HAS_GRAPHS:
        trials.append((GRAPH, lambda: _replayed(data)))
    found = []
    for name, trial in trials:
        tell(f"{sort}: {name}")
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # plain torch on a CPU warns of gradients that are skipped
                found += [Finding(sort, name, what) for what in trial()]
        except torch.OutOfMemoryError:
            raise  # says nothing about the kernels
        except Exception as problem:  # whatever the compiler or the driver raises: it does not work here
            first = next(iter(str(problem).splitlines()), "")
            found.append(Finding(sort, name, f"{type(problem).__name__}: {first}", is_exception=True))
    return found


@dataclass(frozen=True)
class Data:
    """Where the parameters start, and their gradients in each step."""

    sort: Sort
    forms: Sequence[Form]
    start: list[Tensor]
    grads: list[list[Tensor]]

    @classmethod
    def make(cls, device: torch.device, sort: Sort, forms: Sequence[Form]) -> Data:
        """Make gradients of uneven size over rows, columns and time, on the host and with a generator of their own."""
        generator = torch.Generator("cpu").manual_seed(20180411)

        def normal(shape: Sequence[int]) -> Tensor:
            return torch.empty(tuple(shape), dtype=FP32, device="cpu").normal_(generator=generator)

        start, grads = [], []
        for form in forms:
            start.append(form.lay(normal(form.shape).mul(0.05).to(device, sort.x)))
            scale = torch.ones(form.shape, device="cpu", dtype=FP32)
            for axis, size in enumerate(form.shape):
                scale = scale * normal([size]).mul(0.5).exp().reshape([-1] + [1] * (len(form.shape) - axis - 1))
            sizes = (1.0, 3.0, 0.2)
            grads.append([form.lay((normal(form.shape) * scale * size).to(device, sort.g)) for size in sizes[:STEPS]])
        return cls(sort, forms, start, [list(step) for step in zip(*grads, strict=True)])

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.start[0].device


class Training:
    """Parameters, and the optimizer that steps them with one backend."""

    def __init__(self, data: Data, backend: str, **keywords: Any):
        """Copies of the start, with gradients that stay where they are."""
        from adafactor import Adafactor

        self.params = [torch.nn.Parameter(form.lay(x)) for form, x in zip(data.forms, data.start, strict=True)]
        for p, g in zip(self.params, data.grads[0], strict=True):
            if g.dtype != p.dtype:
                p.grad_dtype = None
            p.grad = torch.empty_like(g).copy_(g)
        self.optimizer = Adafactor(self.params, backend=backend, **{**data.sort.keywords, **keywords})

    def set_gradients(self, grads: Sequence[Tensor], scale: float = 1.0) -> None:
        """Write gradients where the last ones are."""
        for p, g in zip(self.params, grads, strict=True):
            assert p.grad is not None
            torch.mul(g, scale, out=p.grad)

    def step(self, grads: Sequence[Tensor], scale: float = 1.0) -> None:
        """One step with these gradients."""
        self.set_gradients(grads, scale)
        self.optimizer.step()

    def held(self) -> list[dict[str, Tensor]]:
        """All that a step may write to, as it is now, for each parameter."""
        every = [{"X": p, **self.optimizer.state[p]} for p in self.params]
        return [{name: t.detach().clone() for name, t in one.items() if isinstance(t, Tensor)} for one in every]


def _compared(data: Data, case: Case) -> Iterator[str]:
    """Triton against plain torch, and against itself."""
    ours, again, plain = (Training(data, name, **case.keywords) for name in ("triton", "triton", "eager"))
    travelled = [0.0] * len(data.forms)
    before = plain.held()
    for number, grads in enumerate(data.grads):
        bad = case.bad_gradients and number == 1
        given = _spoiled(grads) if bad else list(grads)
        was = ours.held() if bad else []
        for training in (ours, again, plain):
            training.step(given)
        if bad:
            yield from _changed(data.forms, was, ours.held(), which=_is_spoiled)
        now = plain.held()
        for i, (a, b) in enumerate(zip(before, now, strict=True)):
            travelled[i] += float((b["X"].double() - a["X"].double()).abs().max())
        before = now
    found = ours.held()
    for form, a, b, distance in zip(data.forms, found, before, travelled, strict=True):
        if wrong := _off(a, b, distance):
            yield f"{form}: {wrong}"
    yield from (f"{text} from one run to the next" for text in _changed(data.forms, found, again.held()))


def _scaled(data: Data) -> Iterator[str]:
    """What GradScaler leaves to the optimizer: scaled gradients, and whether one of them was infinite."""
    scale = 1.0 if data.sort.g == FP16 else 1024.0  # a power of two; float16 has no range for it
    ours, unscaled = Training(data, "triton"), Training(data, "triton")

    def step(number: int, infinite: bool) -> None:
        optimizer: Any = ours.optimizer
        optimizer.grad_scale = torch.full((), scale, dtype=FP32, device=data.device)
        optimizer.found_inf = torch.full((), float(infinite), dtype=FP32, device=data.device)
        try:
            ours.step(data.grads[number], scale)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    step(0, infinite=False)
    unscaled.step(data.grads[0])
    yield from (f"{text} when gradients are scaled" for text in _changed(data.forms, unscaled.held(), ours.held()))
    was = ours.held()
    step(1, infinite=True)
    yield from (f"{text} though an infinity was found" for text in _changed(data.forms, was, ours.held()))


def _replayed(data: Data) -> Iterator[str]:
    """One step in a CUDA graph, replayed with other rates and gradients, against the same steps without a graph."""
    rates = [torch.full((), 1e-2, dtype=FP32, device=data.device) for _ in range(2)]
    ours, plain = (Training(data, "triton", lr=lr, lr_decay=None) for lr in rates)
    aside, graph = torch.cuda.Stream(data.device), torch.cuda.CUDAGraph()
    with torch.cuda.device(data.device):
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            ours.step(data.grads[0])
        torch.cuda.current_stream().wait_stream(aside)
        plain.step(data.grads[0])
        # other threads, which may load data, are free to call what a capture forbids
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ours.optimizer.step()
        for number, grads in enumerate(data.grads):
            for lr in rates:
                lr.fill_(1e-2 / (number + 2))
            ours.set_gradients(grads)
            graph.replay()
            plain.step(grads)
        torch.cuda.current_stream().synchronize()
    yield from (f"{text} when replayed" for text in _changed(data.forms, plain.held(), ours.held()))


def _is_spoiled(number: int) -> bool:
    return number % 2 == 0


def _spoiled(grads: Sequence[Tensor]) -> list[Tensor]:
    """Every other gradient with a NaN at its end or an infinity in the middle."""
    found = [g.clone() for g in grads]
    for i, g in enumerate(found):
        if _is_spoiled(i):
            at = [n - 1 if i % 4 else n // 2 for n in g.shape]
            g[tuple(at)] = math.nan if i % 4 else math.inf
    return found


def _changed(
    forms: Sequence[Form],
    was: list[dict[str, Tensor]],
    now: list[dict[str, Tensor]],
    which: Callable[[int], bool] = lambda number: True,
) -> Iterator[str]:
    """What is not the same to the bit; one sentence for a tensor."""
    for i, (form, a, b) in enumerate(zip(forms, was, now, strict=True)):
        names = [name for name in a if which(i) and not torch.equal(_bits(a[name]), _bits(b[name]))]
        if names:
            yield f"{form}: {' and '.join(names)} changed"


def _bits(t: Tensor) -> Tensor:
    """As integers: NaN is equal to itself, and the zeros differ."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.itemsize]) if t.is_floating_point() else t


def _off(ours: dict[str, Tensor], plain: dict[str, Tensor], distance: float) -> str | None:
    """How X or the state differs by more than rounding leaves; None if it does not."""
    x, limit = plain["X"], TOLERANCE[plain["X"].dtype]
    if not torch.equal(ours["step"], plain["step"]):
        return f"t is {float(ours['step']):g}, not {float(plain['step']):g}"
    error = (ours["X"].double() - x.double()).abs()
    too_far = ~(error <= limit * distance)  # also where it is NaN
    if x.dtype in SIXTEEN_BIT:
        # a number between two of the type's, near the border, may be rounded either way: seldom, and to a neighbour
        unit = torch.finfo(x.dtype).eps * (x.double().abs() + torch.finfo(x.dtype).tiny)
        if int(too_far.sum()) <= 2 + x.numel() // 200:
            too_far &= ~(error <= (STEPS + 0.01) * unit)
    if bool(too_far.any()):
        worst = float(error.nan_to_num(nan=math.inf).max()) / max(distance, 1e-300)
        return f"X is off by {worst:.0e} of the distance travelled, in {int(too_far.sum())} of {x.numel()} elements"
    for name in ("row", "col", "full", "momentum"):
        if name in plain:
            a, b = ours[name].double(), plain[name].double()
            size = b.abs().max() if name == "momentum" else b.abs()
            if not bool(((a - b).abs() <= 2 * limit * size).all()):
                worst = float(((a - b).abs() / size).nan_to_num(nan=math.inf).max())
                return f"state {name!r} is off by {worst:.0e}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
