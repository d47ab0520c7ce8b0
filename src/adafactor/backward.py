"""Step inside backward: every parameter steps as soon as its gradient is complete, and the gradient is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from adafactor.core import dtensor
from adafactor.optimizer import Adafactor

NORM = "grad_norm"  # in the optimizer's first group, so that checkpoints have it
CHUNK = 1 << 20  # elements whose norm is taken at a time


def step_in_backward(
    model: nn.Module, optimizer: Adafactor, *, accumulate: int = 1, max_norm: float | None = None
) -> Handle:
    """Step every parameter of `model` inside `backward()`, and free its gradient at once.

    The training loop stays as it is: `loss.backward()`, then `optimizer.step()`, which ends the step, takes it with
    what `backward()` could not (parameters that had no gradient in the last micro-batch) and frees that too. The
    results are those of the ordinary loop, bit for bit; but no two large gradients exist at a time.

    Between the two calls the gradients are gone: whatever asks for one then, `clip_grad_norm_` and GradScaler among
    them, gets a RuntimeError.

    Args:
        model: holds all parameters of the optimizer; those that the optimizer does not hold must be frozen.
        optimizer: with plain (not sharded) parameters.
        accumulate: the number of backward passes to a step. With more than one, gradients are kept until the last
            one, and need their memory again.
        max_norm: scale all gradients by min(1, max_norm / norm), where the norm is that of the *previous* step's
            gradients together: this step's is known only when it is too late. The first step is not limited.

    Returns:
        A handle to undo it with: `handle.remove()`, or `with step_in_backward(…):`.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Adafactor(model.parameters())
        >>> handle = step_in_backward(model, optimizer)
        >>> model(torch.ones(4)).sum().backward()  # both parameters step
        >>> optimizer.step()
        >>> model.weight.grad is None
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, Adafactor):
        raise TypeError(f"optimizer must be an adafactor.Adafactor, not {type(optimizer).__name__}")
    _check_pair(model, optimizer)
    return Handle(model, optimizer, accumulate, max_norm)


class Handle:
    """What `step_in_backward` returns: its two settings, and the way back."""

    def __init__(self, model: nn.Module, optimizer: Adafactor, accumulate: int, max_norm: float | None):
        """Attach. The optimizer keeps this alive; parameters only refer to it weakly, so that both can be collected."""
        self._accumulate, self._max_norm = 1, None
        self.accumulate, self.max_norm = accumulate, max_norm
        self._optimizer = optimizer
        self._names: Any = WeakTensorKeyDictionary({p: name for name, p in model.named_parameters()})
        self._held = WeakTensorKeyDictionary()  # backward passes in a gradient that waits; it goes when that goes
        self._norms: dict[Tensor, Tensor] = {}  # of this step's gradients so far
        self._hooks: Any = WeakTensorKeyDictionary()  # of parameters, which may be replaced and freed
        self._ends = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._watch()

    @property
    def accumulate(self) -> int:
        """The number of backward passes to a step; may be set at any time."""
        return self._accumulate

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"accumulate={value!r} must be an integer, not {type(value).__name__}")
        if value < 1:
            raise ValueError(f"accumulate={value!r} must be at least 1")
        self._accumulate = int(value)

    @property
    def max_norm(self) -> float | None:
        """The limit of the gradients' norm; may be set at any time. With `math.inf` the norm is only measured."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise TypeError(f"max_norm={value!r} must be None or a number above 0, not {type(value).__name__}")
        if value is not None and not value > 0:
            raise ValueError(f"max_norm={value!r} must be None or a number above 0")
        self._max_norm = None if value is None else float(value)

    @property
    def norm(self) -> Tensor | None:
        """The norm of all gradients of the last step, before the limit; None without `max_norm` or without a step."""
        norm: Tensor | None = self._optimizer.param_groups[0].get(NORM)
        return norm

    def remove(self) -> None:
        """Back to ordinary steps. Gradients that were waiting for more backward passes stay for `optimizer.step()`."""
        for hook in [*self._hooks.values(), *self._ends]:
            hook.remove()
        for p in list(self._hooks):
            _forget(p)
        self._hooks, self._ends, self._norms = WeakTensorKeyDictionary(), [], {}
        self._optimizer.param_groups[0].pop(NORM, None)

    def __enter__(self) -> Handle:
        """The handle itself: it is at work already."""
        return self

    def __exit__(self, *problem: object) -> None:
        """`remove()`."""
        self.remove()

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def _watch(self) -> None:
        """Also those that were frozen, or not in the optimizer, when this was made."""
        for p in self._parameters():
            if p.requires_grad and p not in self._hooks:
                self._hooks[p] = p.register_post_accumulate_grad_hook(_Hook(self))

    def _arrived(self, p: Tensor) -> None:
        """A backward pass has completed the gradient of `p`."""
        if self.accumulate > 1:
            count = self._held[p.grad] = self._held.get(p.grad, 0) + 1
            if count < self.accumulate:
                return
        with torch.no_grad():  # backward(create_graph=True) comes here with gradients on
            norm = self._limit(p)
            try:
                stepped = self._optimizer._step(only=p)
            except FloatingPointError as problem:
                raise FloatingPointError(
                    f"{problem} of it, but this is inside backward: parameters whose gradients were complete before "
                    "have taken their step"
                ) from None
            if stepped:
                p.grad = Spent(p, self._names.get(p, "a parameter"), norm)

    def _limit(self, p: Tensor) -> Tensor | None:
        """Note the norm of a complete gradient, then scale it by what the previous step's norm says."""
        if self.max_norm is None or p.grad is None:
            return None
        norm = self._norms[p] = _norm(p.grad)
        if self.norm is not None:
            p.grad.mul_((self.max_norm / (self.norm + 1e-6)).clamp(max=1.0).to(p.grad.device))
        return norm

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Of all gradients, leave for `optimizer.step()` those that are still to be used."""
        closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._finish()
            return None

        def closed() -> Any:
            loss = closure()
            self._finish()
            return loss

        return (args[0], closed), {}

    @torch.no_grad()
    def _finish(self) -> None:
        for p in self._parameters():
            _forget(p)
            self._limit(p)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for p in self._parameters():
            p.grad = None
        if self._norms:
            first, *others = self._norms.values()
            norms = torch.stack([first, *(norm.to(first) for norm in others)])
            # a gradient that is not finite was skipped, or is in the parameters by now: no reason to stop for it
            self._optimizer.param_groups[0][NORM] = vector_norm(norms.where(norms.isfinite(), 0.0))
            self._norms = {}
        self._watch()


class _Hook:
    """What a parameter calls when its gradient is complete."""

    def __init__(self, handle: Handle):
        self.handle = weakref.ref(handle)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # compiled autograd calls it as it is
    def __call__(self, p: Tensor) -> None:
        if (handle := self.handle()) is not None:
            handle._arrived(p)


class Spent(Tensor):
    """Stands for a gradient that was used and freed: has a shape but no data, and says so to whoever asks for it.

    With None in its place, `clip_grad_norm_` would find nothing to clip and say nothing. Where its norm was measured,
    it can still be asked for, and scaled by one: so `clip_grad_norm_` works as long as it has nothing to do.
    """

    of: str
    measured: Tensor | None
    nbytes = 0

    @staticmethod
    def __new__(cls, p: Tensor, name: str, measured: Tensor | None = None) -> Spent:
        """In place of the gradient of `p`."""
        made: Spent = Tensor._make_wrapper_subclass(cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device)
        made.of, made.measured = name, measured
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Without data."""
        return f"Spent(the gradient of {self.of}, used and freed inside backward)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Every operation comes here."""
        aten = torch.ops.aten
        spent = next(arg for arg in _flat([*args, *(kwargs or {}).values()]) if isinstance(arg, Spent))
        if spent.measured is not None:
            if func is aten.linalg_vector_norm.default and args[1:] in ((), (2,)):
                return spent.measured.to((kwargs or {}).get("dtype") or spent.measured.dtype, copy=True)
            if func is aten.mul_.Tensor and args[0] is spent and args[1].numel() == 1 and args[1].item() == 1:
                return spent
        if func in (aten.add_.Tensor, aten.add.Tensor):
            raise RuntimeError(
                f"a second gradient came for {spent.of}, which has already stepped inside backward. Call "
                "optimizer.step() after each backward(); if several make one step, give step_in_backward(…, "
                "accumulate=their number); if checkpointed parts of the model share this parameter, checkpoint them "
                "with use_reentrant=False"
            )
        raise RuntimeError(
            f"the gradient of {spent.of} is gone: step_in_backward has used and freed it, so {func} cannot have it. "
            "clip_grad_norm_, GradScaler and whatever else needs all gradients at once do not work with it. Instead "
            "of clipping by norm, Adafactor clips each update (clip=), and step_in_backward(…, max_norm=) limits the "
            "norm by that of the previous step; instead of float16 with a scaler, use bfloat16"
        )


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _forget(p: Tensor) -> None:
    if isinstance(p.grad, Spent):
        p.grad = None


def _norm(g: Tensor) -> Tensor:
    """The norm in at least float32, in parts: torch widens 16-bit tensors as a whole, and loses digits on long sums."""
    dtype = torch.promote_types(g.dtype, torch.float32)
    if g.numel() <= CHUNK:
        return cast(Tensor, vector_norm(g, dtype=dtype))
    parts = g.split(max(1, CHUNK * len(g) // g.numel()))
    return cast(Tensor, vector_norm(torch.stack([vector_norm(part, dtype=dtype) for part in parts])))


def _check_pair(model: nn.Module, optimizer: Adafactor) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError("model is in DistributedDataParallel, which adds up gradients after they would have been used")
    names = {p: name for name, p in model.named_parameters()}
    held = {p: None for group in optimizer.param_groups for p in group["params"]}
    given = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
    numbers = given if len(given) == len(held) else [f"parameter {number}" for number in range(len(held))]
    _refuse(
        [number for p, number in zip(held, numbers, strict=True) if p not in names],
        "held by the optimizer, but not in the model; give step_in_backward a module that holds all of them",
    )
    _refuse(
        [name for p, name in names.items() if p.requires_grad and p not in held],
        "trainable, but not in the optimizer; nothing would free such gradients. Add them to it or freeze them",
    )
    _refuse(
        [name for p, name in names.items() if dtensor.is_sharded(p)],
        "sharded (DTensor); a sharded step adds up all parameters' sums at once, which cannot be done inside backward",
    )
    _refuse(
        [name for p, name in names.items() if _is_attached(p)],
        "attached already; call remove() of the first handle before",
    )


def _refuse(names: list[str], why: str) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(f"{', '.join(names[:3])}{more}: {why}")


def _is_attached(p: Tensor) -> bool:
    hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, _Hook) and hook.handle() is not None for hook in hooks.values())
