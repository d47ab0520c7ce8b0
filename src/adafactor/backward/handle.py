"""Step inside backward: what happens when a gradient is complete, and at `optimizer.step()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.linalg import vector_norm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from adafactor.backward.modules import Wrapped, find_wrapped
from adafactor.core import dtensor
from adafactor.core.gather import entries_of
from adafactor.distributed.reductions import whole_norms
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

    Under FSDP2 the parameters of each wrapped module step together, when their gradients have been reduced.

    Between the two calls gradients are None: `clip_grad_norm_` finds nothing to clip, and GradScaler raises.

    Args:
        model: holds all parameters of the optimizer; those that the optimizer does not hold must be frozen.
        optimizer: made after the model was sharded, if it is.
        accumulate: the number of backward passes to a step. With more than one, gradients are kept until the last
            one, and need their memory again. Under FSDP2 those with `set_requires_gradient_sync(False)` do not count.
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
    if isinstance(accumulate, bool) or not isinstance(accumulate, int):
        raise TypeError(f"accumulate={accumulate!r} must be an integer, not {type(accumulate).__name__}")
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r} must be at least 1")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm={max_norm!r} must be None or a number above 0")
    modules = find_wrapped(model)
    _check_pair(model, optimizer, modules)
    return Handle(model, optimizer, modules, accumulate, max_norm)


class Handle:
    """What `step_in_backward` returns: its two settings, and the way back.

    Attributes:
        accumulate: the number of backward passes to a step; may be set at any time.
        max_norm: the limit of the gradients' norm; may be set at any time. With `math.inf` the norm is only measured.
    """

    def __init__(
        self, model: nn.Module, optimizer: Adafactor, modules: list[Wrapped], accumulate: int, max_norm: float | None
    ):
        """Attach. The optimizer keeps this alive; all else refers to it weakly, so that nothing waits to be freed."""
        self.accumulate, self.max_norm = accumulate, max_norm
        self._weak_optimizer = weakref.ref(optimizer)
        self._names: Any = WeakTensorKeyDictionary({p: name for name, p in model.named_parameters()})
        self._modules, self._module_of = modules, {p: module for module in modules for p in module.params}
        self._held = WeakTensorKeyDictionary()  # backward passes in a gradient that waits; it goes when that goes
        self._hooks: Any = WeakTensorKeyDictionary()  # of parameters, which may be replaced and freed
        self._running: Any = weakref.WeakValueDictionary()  # backward passes, by torch's number
        self._begin_step()
        optimizer._buckets.step_apart(self._module_of)
        self._ends = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._watch()

    def _begin_step(self) -> None:
        self._stepped: dict[Tensor, int] = {}  # parameters, and the backward pass in which each has stepped
        self._over: set[int] = set()  # backward passes of this step that have come to their end
        self._open: tuple[Wrapped, int] | None = None  # whose gradients are coming, and in which backward pass
        self._arrived_of_open: set[Tensor] = set()
        self._norms: dict[Tensor, Tensor] = {}  # of this step's gradients so far, or of this rank's part of them

    @property
    def norm(self) -> Tensor | None:
        """The norm of all gradients of the last step, before the limit; None without `max_norm` or without a step."""
        norm: Tensor | None = self._optimizer.param_groups[0].get(NORM)
        return norm

    def remove(self) -> None:
        """Back to ordinary steps. Gradients that were waiting for more backward passes stay for `optimizer.step()`."""
        for hook in [*self._hooks.values(), *self._ends]:
            hook.remove()
        self._hooks, self._ends = WeakTensorKeyDictionary(), []
        self._begin_step()
        self._optimizer._buckets.step_apart([])
        self._optimizer.param_groups[0].pop(NORM, None)

    def __enter__(self) -> Handle:
        """The handle itself: it is at work already."""
        return self

    def __exit__(self, *problem: object) -> None:
        """`remove()`."""
        self.remove()

    @property
    def _optimizer(self) -> Adafactor:
        optimizer = self._weak_optimizer()
        assert optimizer is not None, "the optimizer of this handle is gone"
        return optimizer

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def _watch(self) -> None:
        """Also those that were frozen, or not in the optimizer, when this was made."""
        for p in self._parameters():
            if p.requires_grad and p not in self._hooks:
                if p in self._module_of or not dtensor.is_sharded(p):  # else it is left to `optimizer.step()`
                    self._hooks[p] = p.register_post_accumulate_grad_hook(_Hook(self))

    def _arrived(self, p: Tensor) -> None:
        """A backward pass has completed the gradient of `p`: step it, or its module if that is complete."""
        if self.accumulate > 1:
            count = self._held[p.grad] = self._held.get(p.grad, 0) + 1
            if count < self.accumulate:
                return
        number = self._note_backward(p)
        if self._has_stepped(p):
            raise _second_gradient(self._names.get(p, "a parameter"))
        module = self._module_of.get(p)
        if module is None:
            self._step((p,), number)
            return
        if self._open != (module, number):
            self._close()
            self._open, self._arrived_of_open = (module, number), set()
        self._arrived_of_open.add(p)
        if all(q in self._arrived_of_open for q in module.params if q.requires_grad):
            self._close()

    def _note_backward(self, p: Tensor) -> int:
        """Return torch's number of the backward pass that is under way, and hear of its end."""
        number = torch._C._current_graph_task_id()
        if number < 0 and p in self._module_of:
            raise RuntimeError(
                f"the gradient of {self._names[p]} came outside of any backward(), as a pipeline's schedule reduces "
                "it, before it is scaled: call optimizer.step() after the schedule without step_in_backward"
            )
        if number >= 0 and number not in self._running:
            end = partial(self._end_backward, number)
            Variable._execution_engine.queue_callback(end)
            self._running[number] = end  # torch drops it when the backward pass ends, and also when it fails
        return number

    def _end_backward(self, number: int) -> None:
        del self._running[number]
        self._close()
        self._over.add(number)

    def _has_failed(self, number: int) -> bool:
        return number >= 0 and number not in self._over and number not in self._running

    def _has_stepped(self, p: Tensor) -> bool:
        """Whether `p` has taken this step: what it did in a backward that failed does not count."""
        return p in self._stepped and not self._has_failed(self._stepped[p])

    def _close(self) -> None:
        """Step the module whose gradients were coming: it is complete, or gets no more."""
        opened, self._open = self._open, None
        if opened is not None and not self._has_failed(opened[1]):
            self._step_module(*opened)

    def _step_module(self, module: Wrapped, number: int) -> None:
        if module.is_gathered():
            raise RuntimeError(
                f"{self._names[module.params[0]]} is still gathered after backward, as "
                "set_reshard_after_backward(False) has it: the next forward would use what it was before its step. "
                "Leave that out, or call optimizer.step() after backward() without step_in_backward"
            )
        self._step(module.params, number)

    @torch.no_grad()  # backward(create_graph=True) comes here with gradients on
    def _step(self, params: tuple[Tensor, ...], number: int) -> None:
        """Step these together, and free their gradients."""
        for p in params:
            self._limit(p)
        try:
            stepped = self._optimizer._step(params)
        except FloatingPointError as problem:
            raise FloatingPointError(
                f"{problem} of it, but this is inside backward: parameters whose gradients were complete before "
                "have taken their step"
            ) from None
        if stepped:
            for p in params:
                p.grad = None
            self._stepped.update(dict.fromkeys(params, number))

    def _limit(self, p: Tensor) -> None:
        """Note the norm of a complete gradient, then scale it by what the previous step's norm says."""
        if self.max_norm is None or p.grad is None:
            return
        g = dtensor.local(p.grad)
        self._norms[p] = _norm(g)
        if self.norm is not None:
            g.mul_((self.max_norm / (self.norm + 1e-6)).clamp(max=1.0).to(g.device))

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Step what `backward()` could not, where other ranks take part; the rest `optimizer.step()` finds."""
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
        self._close()
        for module in self._modules:  # other ranks may have gradients where this one has none
            if not self._has_stepped(module.params[0]):
                self._step_module(module, -1)
        for p in self._parameters():
            if p.grad is not None and self._has_stepped(p):
                raise _second_gradient(self._names.get(p, "a parameter"))
            self._limit(p)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for p in self._parameters():
            p.grad = None
        if self._norms:
            first, *others = whole_norms(self._norms)
            norms = torch.stack([first, *(norm.to(first) for norm in others)])
            # a gradient that is not finite was skipped, or is in the parameters by now: no reason to stop for it
            self._optimizer.param_groups[0][NORM] = vector_norm(norms.where(norms.isfinite(), 0.0))
        self._begin_step()
        self._watch()


class _Hook:
    """What a parameter calls when its gradient is complete."""

    def __init__(self, handle: Handle):
        self.handle = weakref.ref(handle)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # compiled autograd calls it as it is
    def __call__(self, p: Tensor) -> None:
        if (handle := self.handle()) is not None:
            handle._arrived(p)


def _second_gradient(name: str) -> RuntimeError:
    return RuntimeError(
        f"a second gradient came for {name}, which has already stepped inside backward. Call optimizer.step() after "
        "each backward(); if several make one step, give step_in_backward(…, accumulate=their number); if checkpointed "
        "parts of the model share this parameter, checkpoint them with use_reentrant=False; if the model is in "
        "DistributedDataParallel, call optimizer.step() after backward() without step_in_backward"
    )


def _norm(g: Tensor) -> Tensor:
    """The norm in at least float32, in parts: torch widens 16-bit tensors as a whole, and loses digits on long sums."""
    dtype = torch.promote_types(g.dtype, torch.float32)
    if g.numel() <= CHUNK:
        return cast(Tensor, vector_norm(g, dtype=dtype))
    parts = g.split(max(1, CHUNK * len(g) // g.numel()))
    return cast(Tensor, vector_norm(torch.stack([vector_norm(part, dtype=dtype) for part in parts])))


def _check_pair(model: nn.Module, optimizer: Adafactor, modules: list[Wrapped]) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "model is in DistributedDataParallel, which adds up gradients after they would have been used, and keeps "
            "memory for all of them: call optimizer.step() after backward(), or shard the model with FSDP2"
        )
    names = {p: name for name, p in model.named_parameters()}
    held = {p for group in optimizer.param_groups for p in group["params"]}
    sharded = {p: name for p, name in names.items() if dtensor.is_sharded(p)}
    by_fsdp = {p for module in modules for p in module.params}
    _refuse(
        [entry.name for entry in entries_of(optimizer.param_groups) if entry.p not in names],
        "held by the optimizer, but not in the model; give step_in_backward a module that holds all of them",
    )
    _refuse(
        [name for p, name in names.items() if p.requires_grad and p not in held],
        "trainable, but not in the optimizer; nothing would free such gradients. Add them to it or freeze them",
    )
    _refuse(
        [name for p, name in sharded.items() if p.requires_grad and p not in by_fsdp],
        "sharded (DTensor), but not by FSDP2, whose modules have their gradients together; call optimizer.step() "
        "after backward() without step_in_backward, or wrap them with fully_shard",
    )
    _refuse(
        [name for p, name in sharded.items() if p.is_cpu and p.device_mesh.device_type != "cpu"]
        if torch.__version__ < (2, 13)  # type: ignore[operator]  # torch compares its version so
        else [],
        "offloaded to the CPU; before torch 2.13 its gradient may still be on its way when FSDP2 says that it is there",
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
