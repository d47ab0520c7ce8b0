"""The public function, and the handle: what happens at a gradient and at `optimizer.step()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from adafactor.backward.spent import forget, spend
from adafactor.backward.units import Turns, Unit, find_modules
from adafactor.core import dtensor
from adafactor.core.record import entries_of
from adafactor.distributed.average import check_copies
from adafactor.distributed.reductions import whole_norms
from adafactor.distributed.shard import Group
from adafactor.optimizer import Adafactor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NORM = "grad_norm"  # in the optimizer's first group, so that checkpoints have it
CHUNK = 1 << 20  # elements whose norm is taken at a time


def step_in_backward(
    model: nn.Module,
    optimizer: Adafactor,
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    process_group: ProcessGroup | None = None,
) -> Handle:
    """Step every parameter of `model` inside `backward()`, and free its gradient at once.

    The training loop stays as it is: `loss.backward()`, then `optimizer.step()`, which ends the step, takes it with
    what `backward()` could not (parameters that had no gradient in the last micro-batch) and frees that too. The
    results are those of the ordinary loop, bit for bit; but no two large gradients exist at a time.

    Under FSDP2 the parameters of each wrapped module step together, when their gradients have been reduced.

    Between the two calls the gradients are gone: whatever asks for one then, `clip_grad_norm_` and GradScaler among
    them, gets a RuntimeError.

    Args:
        model: holds all parameters of the optimizer; those that the optimizer does not hold must be frozen.
        optimizer: made after the model was sharded, if it is.
        accumulate: the number of backward passes to a step. With more than one, gradients are kept until the last
            one, and need their memory again. Under FSDP2 those with `set_requires_gradient_sync(False)` do not count.
        max_norm: scale all gradients by min(1, max_norm / norm), where the norm is that of the *previous* step's
            gradients together: this step's is known only when it is too late. The first step is not limited.
        process_group: its ranks hold copies of the model and different data, and each gradient is averaged over them
            before it is used. This takes the place of DistributedDataParallel.

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
    return Handle(model, optimizer, accumulate, max_norm, _group(model, process_group))


class Handle:
    """What `step_in_backward` returns: its two settings, and the way back."""

    def __init__(
        self, model: nn.Module, optimizer: Adafactor, accumulate: int, max_norm: float | None, group: Group | None
    ):
        """Attach. The optimizer keeps this alive; parameters only refer to it weakly, so that both can be collected."""
        self._accumulate, self._max_norm = 1, None
        self.accumulate, self.max_norm = accumulate, max_norm
        self._optimizer = optimizer
        self._names: Any = WeakTensorKeyDictionary({p: name for name, p in model.named_parameters()})
        self._held = WeakTensorKeyDictionary()  # backward passes in a gradient that waits; it goes when that goes
        self._norms: dict[Tensor, Tensor] = {}  # of this step's gradients so far, or of this rank's part of them
        if group is not None:
            check_copies(self._described(), group)
        modules = find_modules(model)
        inside = {p for unit in modules for p in unit.params}
        own = {p for p in self._parameters() if p not in inside and p.requires_grad}
        in_line = [p for p in model.parameters() if p in own and (group is not None or dtensor.is_sharded(p))]
        self._turns = Turns(modules, in_line, group, self._step_unit)
        optimizer._buckets.step_apart(p for p in self._turns.units if dtensor.is_sharded(p))
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
            forget(p)
        self._optimizer._buckets.step_apart([])
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

    def _name(self, p: Tensor) -> str:
        name: str = self._names.get(p, "a parameter")
        return name

    def _described(self) -> list[tuple[str, Tensor, dict[str, Any], dict[str, Any]]]:
        """Every parameter with its name, its group and its state."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        return [(self._name(p), p, group, state.get(p, {})) for group in groups for p in group["params"]]

    def _watch(self) -> None:
        """Also those that were frozen, or not in the optimizer, when this was made."""
        for p in self._parameters():
            if p.requires_grad and p not in self._hooks:
                if p not in self._turns.units and self._turns.group is not None:
                    self._turns.append(p)
                if p in self._turns.units or not dtensor.is_sharded(p):  # else it is left to `optimizer.step()`
                    self._hooks[p] = p.register_post_accumulate_grad_hook(_Hook(self))

    def _arrived(self, p: Tensor) -> None:
        """A backward pass has completed the gradient of `p`."""
        if self.accumulate > 1:
            count = self._held[p.grad] = self._held.get(p.grad, 0) + 1
            if count < self.accumulate:
                return
        if p in self._turns.units:
            self._turns.arrived(p, self._name(p))
        else:
            self._step((p,))

    def _step_unit(self, unit: Unit) -> None:
        unit.check_copy(self._name(unit.params[0]))
        self._step(unit.params)

    @torch.no_grad()  # backward(create_graph=True) comes here with gradients on
    def _step(self, params: tuple[Tensor, ...]) -> None:
        """Step these together, and free their gradients."""
        norms = {p: self._limit(p) for p in params if p.grad is not None}
        try:
            stepped = self._optimizer._step(params)
        except FloatingPointError as problem:
            raise FloatingPointError(
                f"{problem} of it, but this is inside backward: parameters whose gradients were complete before "
                "have taken their step"
            ) from None
        if stepped:
            for p, norm in norms.items():
                spend(p, self._name(p), norm)

    def _limit(self, p: Tensor) -> Tensor | None:
        """Note the norm of a complete gradient, then scale it by what the previous step's norm says."""
        if self.max_norm is None or p.grad is None:
            return None
        g = dtensor.local(p.grad)
        norm = self._norms[p] = _norm(g)
        if self.norm is not None:
            g.mul_((self.max_norm / (self.norm + 1e-6)).clamp(max=1.0).to(g.device))
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
        self._turns.finish()
        for p in self._parameters():
            forget(p)
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
            self._norms = {}
        self._watch()
        self._turns.end_step()


class _Hook:
    """What a parameter calls when its gradient is complete."""

    def __init__(self, handle: Handle):
        self.handle = weakref.ref(handle)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # compiled autograd calls it as it is
    def __call__(self, p: Tensor) -> None:
        if (handle := self.handle()) is not None:
            handle._arrived(p)


def _norm(g: Tensor) -> Tensor:
    """The norm in at least float32, in parts: torch widens 16-bit tensors as a whole, and loses digits on long sums."""
    dtype = torch.promote_types(g.dtype, torch.float32)
    if g.numel() <= CHUNK:
        return cast(Tensor, vector_norm(g, dtype=dtype))
    parts = g.split(max(1, CHUNK * len(g) // g.numel()))
    return cast(Tensor, vector_norm(torch.stack([vector_norm(part, dtype=dtype) for part in parts])))


def _group(model: nn.Module, process_group: ProcessGroup | None) -> Group | None:
    """The group over which gradients are averaged, with the device of the parameters."""
    if process_group is None:
        return None
    from torch.distributed import ProcessGroup, get_world_size

    if not isinstance(process_group, ProcessGroup):
        kind = type(process_group).__name__
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup or None, not {kind}")
    _refuse(
        [name for name, p in model.named_parameters() if dtensor.is_sharded(p)],
        "sharded (DTensor), so its gradients are reduced already; process_group= is for copies of plain parameters",
    )
    device = next(p.device for p in model.parameters())
    return Group(process_group, get_world_size(process_group), device.type)


def _check_pair(model: nn.Module, optimizer: Adafactor) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "model is in DistributedDataParallel, which adds up gradients after they would have been used, and keeps "
            "memory for all of them. Leave the wrapper off and give step_in_backward(model, optimizer, process_group=…)"
            ", which averages, uses and frees each gradient; or keep it and call optimizer.step() after backward()"
        )
    names = {p: name for name, p in model.named_parameters()}
    held = {p for group in optimizer.param_groups for p in group["params"]}
    _refuse(
        [entry.name for entry in entries_of(optimizer.param_groups) if entry.p not in names],
        "held by the optimizer, but not in the model; give step_in_backward a module that holds all of them",
    )
    _refuse(
        [name for p, name in names.items() if p.requires_grad and p not in held],
        "trainable, but not in the optimizer; nothing would free such gradients. Add them to it or freeze them",
    )
    _refuse(
        [name for p, name in names.items() if dtensor.is_sharded(p) and p.is_cpu and p.device_mesh.device_type != "cpu"]
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
