"""One adapter per optimizer: how it is made, and the formula that it claims."""

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

from adafactor.bench import formulas
from adafactor.bench.formulas import Formula

Parameters = list[torch.nn.Parameter]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    role: str  # "baseline", "peer" (another Adafactor), "ours" or "own" (the user's)
    make: Callable[[Parameters], Runner]
    formula: Formula | None = None
    packages: tuple[str, ...] = ()  # whose versions belong to the result
    dtypes: tuple[str, ...] = ("float32",)  # in which it is measured unless the user says otherwise
    momentum: bool = False
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
    def make(params: Parameters) -> Runner:
        from adafactor import Adafactor

        return TorchRunner(params, Adafactor(params, backend=backend, **keywords))

    return make


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


BOTH = ("float32", "bfloat16")
CPU, GPU = ("cpu",), ("cuda", "xpu")
CONTENDERS = {
    contender.key: contender
    for contender in (
        Contender("sgd", "torch.optim.SGD", "baseline", _torch("SGD", lr=1e-2), formulas.SGD()),
        Contender(
            "adamw-fused",
            "torch.optim.AdamW, fused",
            "baseline",
            _torch("AdamW", fused=True),
            formulas.AdamW(),
            dtypes=BOTH,
            momentum=True,
        ),
        Contender(
            "adamw-foreach",
            "torch.optim.AdamW, foreach",
            "baseline",
            _torch("AdamW", foreach=True),
            formulas.AdamW(),
            momentum=True,
        ),
        Contender(
            "adamw-loop",
            "torch.optim.AdamW, loop",
            "baseline",
            _torch("AdamW", foreach=False),
            formulas.AdamW(),
            momentum=True,
        ),
        Contender(
            "torch-loop",
            "torch.optim.Adafactor, loop",
            "peer",
            _torch("Adafactor", foreach=False),
            formulas.TorchFactored(),
        ),
        Contender(
            "torch-foreach",
            "torch.optim.Adafactor, foreach",
            "peer",
            _torch("Adafactor", foreach=True),
            formulas.TorchFactored(),
        ),
        Contender(
            "transformers",
            "transformers' Adafactor",
            "peer",
            _transformers,
            formulas.Factored("last"),
            ("transformers",),
        ),
        Contender("timm", "timm's Adafactor", "peer", _timm_adafactor, formulas.Factored("channels", 17), ("timm",)),
        Contender(
            "timm-bv",
            "timm's AdafactorBigVision",
            "peer",
            _timm_big_vision,
            formulas.Factored("largest", 16, rsqrt=False, relative=False, cap=0.999),
            ("timm",),
        ),
        Contender(
            "pytorch-optimizer",
            "pytorch_optimizer's AdaFactor",
            "peer",
            _pytorch_optimizer,
            formulas.Factored("last", cap=0.999),
            ("pytorch_optimizer",),
        ),
        Contender(
            "optax",
            "optax.adafactor under jit",
            "peer",
            _optax,
            formulas.Factored("largest", 128),
            ("optax", "jax"),
            devices=CPU,
        ),
        Contender("eager", "adafactor, eager", "ours", _ours("eager"), formulas.Factored()),
        Contender("cpu", "adafactor, cpu", "ours", _ours("cpu"), formulas.Factored(), ("numba",), BOTH, devices=CPU),
        Contender(
            "cpu-momentum",
            "adafactor, cpu, momentum",
            "ours",
            _ours("cpu", beta1=0.9),
            formulas.Factored(beta1=0.9),
            ("numba",),
            momentum=True,
            devices=CPU,
        ),
        Contender(
            "triton",
            "adafactor, triton",
            "ours",
            _ours("triton"),
            formulas.Factored(),
            ("triton",),
            BOTH,
            devices=GPU,
        ),
        Contender(
            "triton-momentum",
            "adafactor, triton, momentum",
            "ours",
            _ours("triton", beta1=0.9),
            formulas.Factored(beta1=0.9),
            ("triton",),
            momentum=True,
            devices=GPU,
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
