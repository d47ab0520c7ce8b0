"""One adapter per optimizer, stepping after backward or inside it; and floors, which move the same bytes."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from adafactor import Adafactor, step_in_backward

Parameters = list[torch.nn.Parameter]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BOTH, FLOAT32, BFLOAT16 = ("float32", "bfloat16"), ("float32",), ("bfloat16",)
PIECE = 1 << 20  # numbers that the trivial loops take at once, at least: then calls cost nothing
EMPTY = "backward"  # the key of the backward pass without a step, whose time is no part of one


class Runner(Protocol):
    """An optimizer that holds its parameters and is about to step."""

    def step(self) -> object:
        """Take one step, finished when this returns."""

    def state_bytes(self) -> int:
        """Return the size of everything that is kept from step to step."""


@dataclass(frozen=True)
class Contender:
    """An optimizer in one of its modes."""

    key: str  # what `--contender` takes
    label: str
    make: Callable[[Parameters], Runner]
    dtypes: tuple[str, ...] = FLOAT32
    in_backward: bool = False
    floor: bool = False

    @property
    def alone(self) -> bool:
        """Must nobody else step its parameters? The compiled step remembers what it left there."""
        return self.in_backward or self.key.startswith("adafactor") or ":" in self.key


class AfterBackward:
    """Any torch optimizer, on parameters that have their gradients."""

    def __init__(self, optimizer: Optimizer):
        """Nothing stands between: some steps take microseconds."""
        self.optimizers, self.step = [optimizer], optimizer.step

    def state_bytes(self) -> int:
        """Return the size of every tensor in the optimizers' states."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


class Given(torch.autograd.Function):
    """Hands a parameter the gradient that lies ready, without a copy."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, g: Tensor) -> Tensor:
        """Some number."""
        ctx.g = g
        return p.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        """The same memory in each step."""
        return ctx.g.detach(), None


class InBackward(AfterBackward):
    """Steps while backward runs, each parameter as its gradient comes."""

    def __init__(self, params: Parameters, optimizers: list[Optimizer], end: Callable[[], object] = lambda: None):
        """Take parameters with gradients, what steps them, and what ends a step."""
        self.optimizers, self.end = optimizers, end
        self.given = [(p, p.grad) for p in params]
        for p in params:
            p.grad = None

    def step(self) -> None:  # type: ignore[override]
        """A backward pass that does nothing but hand out gradients, and what its hooks do."""
        torch.stack([Given.apply(p, g) for p, g in self.given]).sum().backward()
        self.end()
        for p, _ in self.given:
            p.grad = None


def _empty(params: Parameters) -> Runner:
    return InBackward(params, [])


def _adamw_in_backward(params: Parameters) -> Runner:
    """One AdamW for each parameter, as PyTorch's tutorial has it."""
    optimizers = {p: AdamW([p], fused=True) for p in params}

    def hook(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    runner = InBackward(params, list(optimizers.values()))
    for p in params:
        p.register_post_accumulate_grad_hook(hook)
    return runner


def _ours_in_backward(params: Parameters, **keywords: Any) -> Runner:
    optimizer = Adafactor(params, **keywords)
    runner = InBackward(params, [optimizer], optimizer.step)
    step_in_backward(torch.nn.ParameterList(params), optimizer)
    return runner


class Floor:
    """The bytes that any Adafactor step must move, in loops that do nothing else: the least time of a step.

    The size of a step depends on sums over all of a tensor, so there are two passes over each: G is read, then G and X
    are read and X is written; so is a momentum in its dtype. What the second pass finds in a cache is found here, too.
    Vectors count for nothing, and RMS(X) is taken as known from the last step.
    """

    def __init__(self, params: Parameters, momentum: torch.dtype | None = None):
        """Make buffers of the parameters' bytes, cut where tensors end; small tensors are taken together."""
        self.pieces: list[tuple[Tensor, Tensor, Tensor | None]] = []
        words = count = 0  # of four bytes, whatever the dtype; numbers
        for number, p in enumerate(params, start=1):
            words, count = words + p.nbytes // 4, count + p.numel()
            if words >= PIECE or number == len(params):
                x, g = (torch.ones(words, device=p.device) for _ in range(2))
                self.pieces.append((x, g, torch.ones(count, dtype=momentum, device=p.device) if momentum else None))
                words = count = 0

    def step(self) -> None:
        """Read and write."""
        for x, g, m in self.pieces:
            g.sum()
            x.add_(g, alpha=1e-3)
            if m is not None:
                m.neg_()

    def state_bytes(self) -> int:
        """Return 0: it is no optimizer."""
        return 0


def _adamw_floor(params: Parameters) -> Runner:
    """AdamW's bytes: G, X and two moments are read, and all but G are written."""
    floor = Floor(params)
    more = [(torch.ones_like(x), torch.ones_like(x)) for x, _, _ in floor.pieces]

    def step() -> None:
        for (x, g, _), (m, v) in zip(floor.pieces, more, strict=True):
            x.add_(g, alpha=1e-3)
            m.neg_()
            v.neg_()

    floor.step = step  # type: ignore[method-assign]
    return floor


def _torch(make: Callable[..., Optimizer], **keywords: Any) -> Callable[[Parameters], Runner]:
    return lambda params: AfterBackward(make(params, **keywords))


def _named(module: str, name: str, **keywords: Any) -> Callable[[Parameters], Runner]:
    """A peer's, imported when it is wanted; what it warns about is nothing that we or the user can change."""

    def make(params: Parameters) -> Runner:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AfterBackward(getattr(importlib.import_module(module), name)(params, **keywords))

    return make


CONTENDERS = {
    contender.key: contender
    for contender in (
        Contender("adamw", "AdamW, fused", _torch(AdamW, fused=True), BOTH),
        Contender("adamw-backward", "AdamW, fused, in backward", _adamw_in_backward, BOTH, True),
        Contender("adafactor", "adafactor", _torch(Adafactor), BOTH),
        Contender(
            "adafactor-stochastic", "adafactor, stochastic rounding", _torch(Adafactor, rounding="stochastic"), BFLOAT16
        ),
        Contender("adafactor-backward", "adafactor, in backward", _ours_in_backward, FLOAT32, True),
        Contender(
            "adafactor-stochastic-backward",
            "adafactor, stochastic rounding, in backward",
            lambda params: _ours_in_backward(params, rounding="stochastic"),
            BFLOAT16,
            True,
        ),
        *(
            Contender(
                f"adafactor-momentum-{format}",
                f"adafactor, {format} momentum",
                _torch(Adafactor, beta1=0.9, momentum_dtype=format),
            )
            for format in ("float32", "bfloat16", "int8")
        ),
        Contender("adafactor-eager", "adafactor, eager PyTorch", _torch(Adafactor, backend="eager")),
        Contender("torch", "torch.optim.Adafactor", _torch(torch.optim.Adafactor, foreach=False)),
        Contender("transformers", "transformers' Adafactor", _named("transformers.optimization", "Adafactor")),
        Contender("timm", "timm's Adafactor", _named("timm.optim.adafactor", "Adafactor")),
        Contender(
            "pytorch-optimizer",
            "pytorch_optimizer's AdaFactor",
            _named("pytorch_optimizer", "AdaFactor", betas=(None, 0.999)),  # without its momentum
        ),
        Contender(EMPTY, "a backward pass without a step", _empty, BOTH, True, floor=True),
        Contender("floor-adamw", "AdamW's bytes in trivial loops", _adamw_floor, BOTH, floor=True),
        Contender("floor", "Adafactor's bytes in trivial loops", Floor, BOTH, floor=True),
        Contender(
            "floor-momentum", "the same with a momentum", lambda params: Floor(params, torch.float32), floor=True
        ),
    )
}


def find(key: str) -> Contender:
    """The contender of that name; `module:Class` is an optimizer of the user's own, made from parameters alone."""
    if key in CONTENDERS:
        return CONTENDERS[key]
    module, colon, name = key.partition(":")
    if not (module and colon and name):
        raise ValueError(f"unknown contender {key!r}; there are {', '.join(CONTENDERS)}, or module:Class of your own")
    return Contender(key, key, _named(module, name), BOTH)


def parameters(shapes: Sequence[tuple[int, ...]], dtype: str, device: torch.device | None = None) -> Parameters:
    """Parameters of these shapes, with gradients, as they are early in a training run."""
    generator = torch.Generator(device or "cpu").manual_seed(0)
    params = []
    for shape in shapes:
        x, g = (
            torch.empty(shape, dtype=DTYPES[dtype], device=device).normal_(0.0, std, generator=generator)
            for std in (0.02, 1e-3)
        )
        params.append(torch.nn.Parameter(x))
        params[-1].grad = g
    return params


def own(params: Parameters) -> Parameters:
    """A copy of the parameters with the same gradients."""
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for copy, p in zip(copies, params, strict=True):
        copy.grad = p.grad
    return copies


def why_not(contender: Contender, dtype: str, device: torch.device | None = None) -> str | None:
    """Why it cannot run here, in a few words; None if it can: then it has just taken a step."""
    try:
        contender.make(parameters([(6, 4), (5,)], dtype, device)).step()
    except ModuleNotFoundError as missing:
        return f"{missing.name} is not installed"
    except Exception as reason:  # whatever a peer raises, the others are still to be measured
        return f"{type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}"
    return None
