"""One adapter per optimizer: how it is made, stepped and read. `correctness.py` has the formula that it claims."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from adafactor import Adafactor

Parameters = list[torch.nn.Parameter]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PIECE = 1 << 20  # numbers that the trivial loops take at once, at least: then calls cost nothing


class Runner(Protocol):
    """An optimizer that holds its parameters and is about to step."""

    def read_gradients(self) -> None:
        """Take over the parameters' gradients, where they are not simply looked up."""

    def step(self) -> None:
        """One step, finished when this returns."""

    def values(self) -> list[Tensor]:
        """The parameters as they are now."""

    def state_bytes(self) -> int:
        """The size of everything that is kept from step to step."""


@dataclass(frozen=True)
class Contender:
    """An optimizer in one of its modes."""

    key: str  # what `--contender` takes
    label: str
    role: str  # "baseline", "peer" (another Adafactor), "ours", "floor" or "own" (the user's)
    make: Callable[[Parameters], Runner]
    packages: tuple[str, ...] = ()  # whose versions belong to the result
    dtypes: tuple[str, ...] = ("float32",)  # in which it is measured unless the user says otherwise
    floor: str | None = None  # the contender that moves the same bytes and does nothing else
    devices: tuple[str, ...] = ("cpu", "cuda", "xpu")  # types of devices that it can step on

    @property
    def alone(self) -> bool:
        """Must nobody else step its parameters? The compiled step remembers what it left there."""
        return self.key.startswith(("cpu", "triton")) or self.role == "own"


class TorchRunner:
    """Any torch optimizer."""

    def __init__(self, params: Parameters, optimizer: Optimizer):
        """Of parameters that have gradients."""
        self.params, self.optimizer = params, optimizer
        self.step = optimizer.step  # nothing in between: some steps take microseconds

    def read_gradients(self) -> None:
        """A torch optimizer looks them up."""

    def values(self) -> list[Tensor]:
        """The parameters as they are now."""
        return [p.detach() for p in self.params]

    def state_bytes(self) -> int:
        """The size of every tensor in the optimizer's state."""
        states = self.optimizer.state.values()
        return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))


class JaxRunner:
    """A transformation of optax under jit; parameters and state are donated, so that it may work in place."""

    def __init__(self, params: Parameters, transformation: Any):
        """Copies the parameters; the gradients are shared with torch."""
        jax, optax = _module("jax"), _module("optax")
        self.jax, self.params = jax, params
        self.x = [jax.numpy.array(jax.numpy.from_dlpack(p.detach())) for p in params]
        self.state = jax.jit(transformation.init)(self.x)

        def update(x: Any, state: Any, g: Any) -> Any:
            changes, state = transformation.update(g, state, x)
            return optax.apply_updates(x, changes), state

        self.update = jax.jit(update, donate_argnums=(0, 1))
        self.read_gradients()

    def read_gradients(self) -> None:
        """Once, not in every step."""
        grads = [p.grad for p in self.params]
        self.g = [self.jax.numpy.from_dlpack(g.detach()) for g in grads if g is not None]

    def step(self) -> None:
        """Dispatch and wait."""
        self.x, self.state = self.update(self.x, self.state, self.g)
        self.jax.block_until_ready(self.x)

    def values(self) -> list[Tensor]:
        """The parameters as they are now."""
        return [torch.utils.dlpack.from_dlpack(x) for x in self.x]

    def state_bytes(self) -> int:
        """The size of every array in the state."""
        return sum(int(leaf.nbytes) for leaf in self.jax.tree.leaves(self.state))


class FloorRunner:
    """The bytes that any Adafactor step must move, in loops that do nothing else: the least time of a step.

    The size of a step depends on sums over all of a tensor, so there are two passes over each: G is read, then G and X
    are read and X is written; so is a momentum in its dtype. What the second pass finds in a cache is found here, too.
    Vectors count for nothing, and RMS(X) is taken as known from the last step.
    """

    def __init__(self, params: Parameters, momentum: torch.dtype | None):
        """Make buffers of the parameters' bytes, cut where tensors end; small tensors are taken together."""
        self.pieces: list[tuple[Tensor, Tensor, Tensor | None]] = []
        words = count = 0  # of four bytes, whatever the dtype; numbers
        for number, p in enumerate(params, start=1):
            words, count = words + p.nbytes // 4, count + p.numel()
            if words >= PIECE or number == len(params):
                x, g = (torch.ones(words, device=p.device) for _ in range(2))
                self.pieces.append((x, g, torch.ones(count, dtype=momentum, device=p.device) if momentum else None))
                words = count = 0

    def read_gradients(self) -> None:
        """There is nothing to take over: no value matters."""

    def step(self) -> None:
        """Read and write."""
        for x, g, m in self.pieces:
            g.sum()
            x.add_(g, alpha=1e-3)
            if m is not None:
                m.neg_()

    def values(self) -> list[Tensor]:
        """Return the buffers that are written to."""
        return [x for x, _, _ in self.pieces]

    def state_bytes(self) -> int:
        """Return 0: it is no optimizer."""
        return 0


def _module(name: str) -> Any:
    """A peer's module; what it warns about while it is imported is nothing that we or the user can change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _timm(file: str) -> Any:
    """A file of timm.optim, on its own where timm cannot be imported: all of timm needs torchvision."""
    try:
        return _module(f"timm.optim.{file}")
    except ImportError:
        found = importlib.util.find_spec("timm")
        if found is None or not found.submodule_search_locations:
            raise
    alone = types.ModuleType("adafactor_bench_timm")  # a name of its own: a half-made `timm` would mislead others
    alone.__path__ = [str(Path(found.submodule_search_locations[0]) / "optim")]
    sys.modules.setdefault(alone.__name__, alone)
    return _module(f"{alone.__name__}.{file}")


def _torch(name: str, **keywords: Any) -> Callable[[Parameters], Runner]:
    return lambda params: TorchRunner(params, getattr(torch.optim, name)(params, **keywords))


def _ours(backend: str, **keywords: Any) -> Callable[[Parameters], Runner]:
    return lambda params: TorchRunner(params, Adafactor(params, backend=backend, **keywords))


def _compiled(backend: str, package: str, devices: tuple[str, ...]) -> list[Contender]:
    """Ours in the ways that people run it: without and with momentum, and in bfloat16 rounded stochastically."""
    name, packages = f"adafactor, {backend}", (package,)
    momentum, stochastic = _ours(backend, beta1=0.9), _ours(backend, rounding="stochastic")
    smaller = [
        Contender(
            f"{backend}-momentum-{format}",
            f"{name}, momentum in {format}",
            "ours",
            _ours(backend, beta1=0.9, momentum_dtype=format),
            packages,
            ("float32",),
            f"floor-momentum-{format}",
            devices,
        )
        for format in ("bfloat16", "int8")
    ]
    return [
        Contender(backend, name, "ours", _ours(backend), packages, BOTH, "floor", devices),
        Contender(
            f"{backend}-momentum",
            f"{name}, momentum",
            "ours",
            momentum,
            packages,
            ("float32",),
            "floor-momentum",
            devices,
        ),
        *smaller,
        Contender(
            f"{backend}-stochastic",
            f"{name}, stochastic",
            "ours",
            stochastic,
            packages,
            ("bfloat16",),
            "floor",
            devices,
        ),
    ]


def _floor(momentum: torch.dtype | None = None) -> Callable[[Parameters], Runner]:
    return lambda params: FloorRunner(params, momentum)


def _transformers(params: Parameters) -> Runner:
    return TorchRunner(params, _module("transformers.optimization").Adafactor(params))


def _timm_adafactor(params: Parameters) -> Runner:
    return TorchRunner(params, _timm("adafactor").Adafactor(params))


def _timm_big_vision(params: Parameters) -> Runner:
    """Big Vision's Adafactor with what it shares with the others: clipping, no momentum."""
    kind = _timm("adafactor_bv").AdafactorBigVision
    return TorchRunner(params, kind(params, lr=1e-2, momentum=None, clipping_threshold=1.0))


def _pytorch_optimizer(params: Parameters) -> Runner:
    """Without its momentum, which is on by default."""
    return TorchRunner(params, _module("pytorch_optimizer").AdaFactor(params, betas=(None, 0.999)))


def _optax(params: Parameters) -> Runner:
    jax, optax = _module("jax"), _module("optax")
    schedule: Callable[[Any], Any] = lambda count: jax.numpy.minimum(1e-2, (count + 1.0) ** -0.5)  # noqa: E731
    return JaxRunner(params, optax.adafactor(schedule))


BOTH, CPU, GPU = ("float32", "bfloat16"), ("cpu",), ("cuda", "xpu")
CONTENDERS = {
    contender.key: contender
    for contender in (
        Contender("sgd", "torch.optim.SGD", "baseline", _torch("SGD", lr=1e-2)),
        Contender("adamw-fused", "torch.optim.AdamW, fused", "baseline", _torch("AdamW", fused=True), dtypes=BOTH),
        Contender("adamw-foreach", "torch.optim.AdamW, foreach", "baseline", _torch("AdamW", foreach=True)),
        Contender("adamw-loop", "torch.optim.AdamW, loop", "baseline", _torch("AdamW", foreach=False)),
        Contender("torch-loop", "torch.optim.Adafactor, loop", "peer", _torch("Adafactor", foreach=False)),
        Contender("torch-foreach", "torch.optim.Adafactor, foreach", "peer", _torch("Adafactor", foreach=True)),
        Contender("transformers", "transformers' Adafactor", "peer", _transformers, ("transformers",)),
        Contender("timm", "timm's Adafactor", "peer", _timm_adafactor, ("timm",)),
        Contender("timm-bv", "timm's AdafactorBigVision", "peer", _timm_big_vision, ("timm",)),
        Contender(
            "pytorch-optimizer", "pytorch_optimizer's AdaFactor", "peer", _pytorch_optimizer, ("pytorch_optimizer",)
        ),
        Contender("optax", "optax.adafactor under jit", "peer", _optax, ("optax", "jax"), devices=CPU),
        Contender("floor", "the same bytes in trivial loops", "floor", _floor(), dtypes=BOTH),
        *(
            Contender(
                f"floor-momentum{key}", f"the same bytes in trivial loops, momentum{label}", "floor", _floor(dtype)
            )
            for key, label, dtype in (
                ("", "", torch.float32),
                ("-bfloat16", " in bfloat16", torch.bfloat16),
                ("-int8", " in int8", torch.int8),
            )
        ),
        Contender("eager", "adafactor, eager", "ours", _ours("eager"), floor="floor"),
        *_compiled("cpu", "numba", CPU),
        *_compiled("triton", "triton", GPU),
    )
}


def find(key: str) -> Contender:
    """The contender of that name; `module:Class` is an optimizer of the user's own, made from parameters alone."""
    if key in CONTENDERS:
        return CONTENDERS[key]
    module, colon, name = key.partition(":")
    if not (module and colon and name):
        raise ValueError(f"unknown contender {key!r}; there are {', '.join(CONTENDERS)}, or module:Class of your own")
    return Contender(key, key, "own", lambda p: TorchRunner(p, getattr(importlib.import_module(module), name)(p)))


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: str, seed: int = 0, device: torch.device | None = None
) -> Parameters:
    """Parameters of these shapes, with gradients, as they are early in a training run."""
    generator = torch.Generator(device or "cpu").manual_seed(seed)
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
        runner = contender.make(parameters([(6, 4), (5,)], dtype, device=device))
        runner.step()
        finite = all(math.isfinite(float(x.sum())) for x in runner.values())
    except ModuleNotFoundError as missing:
        return f"not installed ({missing.name})"
    except Exception as reason:  # whatever a peer raises, the others are still to be measured
        return f"not installed ({type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''})"
    return None if finite else "its first step is not finite"
