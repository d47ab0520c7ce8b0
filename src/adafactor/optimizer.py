"""The optimizer: groups, state, checkpoints, and the loop over parameters. The algorithm is in `step.py`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from adafactor import dtensor
from adafactor.kernels import Kernel, choose
from adafactor.layout import STEP_DTYPE, Layout, layout, statistics_dtype
from adafactor.record import Record, Trace
from adafactor.rounding import SHORT
from adafactor.settings import Settings, SettingsOf
from adafactor.sharding import Member, Ranks, Shard
from adafactor.standing import Standing
from adafactor.step import Update, release, step

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Adafactor(Optimizer):
    r"""Adafactor (Shazeer & Stern, 2018): adaptive learning rates with sublinear memory cost.

    With no arguments but the parameters this is the paper's Algorithms 4, 5 and 6, and there is no learning
    rate to tune:

        αₜ = max(ε₂, RMS(X))·ρₜ,  ρₜ = min(lr, 1/√t)
        Rₜ = β̂₂ₜ·Rₜ₋₁ + (1 − β̂₂ₜ)·(G² + ε₁)·1ₘ,  Cₜ likewise with 1ₙᵀ·(G² + ε₁),  β̂₂ₜ = 1 − t^−0.8
        U = G/√(R·C/ΣR),  X ← X − αₜ·U/max(1, RMS(U)/d)

    A matrix of n × m keeps n + m numbers; a vector keeps its own size. Every idea of the paper can be switched
    off or changed by a keyword, and every keyword but `backend` may differ per parameter group.

    Args:
        params: parameters, `model.named_parameters()`, or a list of groups.
        lr: the bound of the step size; always a plain number that schedulers and loggers can read and set.
        lr_decay: `"rsqrt"` for ρₜ = min(lr, 1/√t); None for ρₜ = lr.
        relative: scale the step by max(ε₂, RMS(X)) (§8); False for absolute steps, αₜ = ρₜ.
        factored: the second-moment estimate of matrices: `"outer"` (§3), `"row"`, `"column"` (§3.2), or False
            to keep it whole.
        beta1: decay of the momentum; 0 keeps no buffer.
        momentum: what β₁ averages: the clipped and scaled `"update"` (the authors' code, Table 2's row P) or
            the `"gradient"` with Adam's bias correction (Algorithms 1–3, row B).
        beta2: None for 1 − t^−decay_rate (§7.2); a number for a constant with Adam's correction (§7.1).
        decay_rate: c of §7.2; past gradients are forgotten only for c ≤ 1.
        clip: d of §6, the largest RMS(U); None for no clipping.
        eps: ε₁, which keeps G² from zero, and ε₂, the least scale of a parameter.
        weight_decay: λ, decoupled: X ← X·(1 − ρₜ·λ) before the update; RMS(X) is that before the decay.
        axes: the (row, column) axes to factor; None for the two largest.
        maximize: ascend instead of descend.
        on_nonfinite: for a gradient with a NaN, an infinity or a square beyond the range of the statistics:
            `"skip"` leaves that parameter and its state as they were and warns once (on a device other than the
            CPU with the next `report()`, so that no step waits for it), `"raise"` raises
            FloatingPointError before anything is changed (and makes the host wait for the device),
            `"ignore"` does not look.
        rounding: how bfloat16 and float16 parameters are rounded after a step that is computed in float32:
            `"nearest"`, where updates below half a unit in the last place are lost; `"stochastic"`, where they are
            right in the mean, for no memory; `"kahan"`, where they are kept in a second 16-bit number.
        seed: of stochastic rounding, whose random numbers are a function of seed, parameter, step and element.
        backend: `"eager"` is plain torch on any device; `"cpu"` is compiled by Numba (`pip install adafactor[cpu]`),
            for tensors on a CPU; `"auto"` takes `"cpu"` where it can, else `"eager"`.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Adafactor(model.named_parameters())
        >>> model(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.report()[0].name
        'weight'
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        *,
        lr_decay: str | None = "rsqrt",
        relative: bool = True,
        factored: str | bool = "outer",
        beta1: float = 0.0,
        momentum: str = "update",
        beta2: float | None = None,
        decay_rate: float = 0.8,
        clip: float | None = 1.0,
        eps: tuple[float, float] = (1e-30, 1e-3),
        weight_decay: float = 0.0,
        axes: tuple[int, int] | None = None,
        maximize: bool = False,
        on_nonfinite: str = "skip",
        rounding: str = "nearest",
        seed: int = 0,
        backend: str = "auto",
    ):
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "relative": relative,
            "factored": factored,
            "beta1": beta1,
            "momentum": momentum,
            "beta2": beta2,
            "decay_rate": decay_rate,
            "clip": clip,
            "eps": eps,
            "weight_decay": weight_decay,
            "axes": axes,
            "maximize": maximize,
            "on_nonfinite": on_nonfinite,
            "rounding": rounding,
            "seed": seed,
        }
        Settings(**defaults)  # type: ignore[arg-type]
        self._start(backend)
        super().__init__(params, defaults)

    def _start(self, backend: str) -> None:
        choose(backend, on_cpu=backend == "cpu")  # a wrong name and a missing package are told at once
        self.backend = backend
        self._settings = SettingsOf()
        self._known: dict[Tensor, Update] = {}  # of the last step
        self._traces: dict[Tensor, Trace] = {}
        self._shards: dict[Tensor, Shard] = {}
        self._places: dict[Tensor, tuple[int, str, int]] = {}  # group, name and number, while groups have these sizes
        self._sizes: list[int] = []
        self._standing: Standing | None = None
        self._warned = self._fell_back = False

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy; the figures behind `report()` start afresh in the copy."""
        return {**super().__getstate__(), "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From pickle, deepcopy and `load_state_dict`."""
        super().__setstate__(state)
        for group in self.param_groups:  # from a version that had fewer keywords
            for field in fields(Settings):  # and not all of `defaults`, to which torch has added one of its own by now
                group.setdefault(field.name, self.defaults.get(field.name, field.default))
        self._start(self.backend)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, check its keywords, and make its state.

        State exists from here on, not from the first step: torch's distributed loaders pass over an optimizer
        whose state is empty. Frozen parameters get theirs with their first gradient, if they ever have one.
        """
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            group = self.param_groups[before]
            settings = Settings.of(group)
            for p, name in zip(group["params"], self._names()[before], strict=True):
                _check_parameter(p, name)
                shapes = _layout(p, settings)  # complains about axes that the parameter does not have
                if p.requires_grad:
                    self.state[p] = _new_state(p, shapes, settings)
        except Exception:
            for p in self.param_groups.pop()["params"]:
                self.state.pop(p, None)
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step with every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss, as for any torch optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch._disable_dynamo  # type: ignore[attr-defined]  # a compiled training step calls it as it is
    def _step(self, only: Tensor | None = None) -> None:
        """Step what has a gradient, or `only` this parameter: `backward.py` hands them in one by one."""
        settings = [self._settings(number, group) for number, group in enumerate(self.param_groups)]
        if only is None and self._standing is not None and self.backend == self._standing.backend:
            grads = self._standing.gradients(self.param_groups, settings, self.state.values())
            if grads is not None:
                self._step_again(self._standing, grads)
                return
        self._standing = None  # until this step has come to its end
        updates, ranks = self._updates(only)
        try:
            self._step_with(updates, ranks)
        finally:
            release(updates)
        if only is None and ranks is None and Standing.can(self.param_groups, updates):
            self._standing = Standing(self.backend, self.param_groups, settings, self.state.values(), updates)

    def _step_again(self, standing: Standing, grads: list[Tensor]) -> None:
        if skipped := standing.fleet.step(grads):
            self._warn_once(skipped[0], stacklevel=9)

    def _step_with(self, updates: list[Update], ranks: Ranks | None) -> None:
        kernel = choose(self.backend, any(u.x.is_cpu for u in updates))
        if self.backend == "cpu":
            for u in updates:
                if u.fleet is None and (reason := kernel.obstacle(u)):
                    raise ValueError(f'backend="cpu" cannot step {u.name} (shape {u.shape}): {reason}; "auto" can')
        if not self._fell_back:
            self._tell_fallback(kernel, updates)
        # those that may raise go first and together, so that nothing has changed when they do; so do shards, whose
        # sums then travel together
        first = [u for u in updates if u.sharded or u.settings.on_nonfinite == "raise"]
        skipped = step(first, kernel, ranks)
        release(first)
        rest = [u for u in updates if not u.sharded and u.settings.on_nonfinite != "raise"]
        left_out, others = kernel.whole(rest)
        skipped += left_out
        for u in others:
            skipped += step([u], kernel)
            release([u])
        if skipped:
            self._warn_once(skipped[0], stacklevel=9)

    def _tell_fallback(self, kernel: Kernel, updates: list[Update]) -> None:
        for u in updates:
            if u.fleet is None and u.x.is_cpu and (reason := kernel.obstacle(u)):
                self._fell_back = True
                warnings.warn(
                    f"{u.name} (shape {u.shape}) is stepped by plain torch, more slowly: {reason}. Said once.",
                    RuntimeWarning,
                    stacklevel=9,
                )
                break

    def report(self) -> list[Record]:
        """One record per parameter: RMS(U), clip rate, step size and more of the last step (§5, §6).

        On a device other than the CPU this is where the host waits. The clip rate starts anew.
        """
        records = []
        for group, names in zip(self.param_groups, self._names(), strict=True):
            for p, name in zip(group["params"], names, strict=True):
                size = sum(v.nbytes for v in self.state.get(p, {}).values() if isinstance(v, Tensor))
                records.append(self._trace(p).record(name, p, size, group["clip"]))
        for record in records:
            if record.skipped:
                self._warn_once(record, stacklevel=3)
        return records

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict()` gave, keeping the statistics' precision.

        Torch's own loading casts every statistic to the parameter's dtype, which ruins float32 statistics of
        bfloat16 parameters. Shapes, and names where both sides have them, must match.
        """
        found: StateDict = {}
        # registered here, the first runs after all other hooks on the way in, the second before all on the way out
        before = self.register_load_state_dict_pre_hook(lambda _, given: found.update(self._matching(given)))
        after = self.register_load_state_dict_post_hook(lambda _: self._restore(found), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _updates(self, only: Tensor | None = None) -> tuple[list[Update], Ranks | None]:
        """Everything that can be wrong is found here, before anything is changed."""
        updates: list[Update] = []
        members: list[Member] = []
        for p, settings in self._parameters() if only is None else [(only, self._settings_of(only))]:
            g, known = p.grad, self._known.get(p)
            if known is not None and g is not None and self._holds(known, p, g, settings):
                known.g = g
                updates.append(known)
                continue
            if g is None and not (dtensor.is_sharded(p) and p.requires_grad):
                continue
            shapes, found, (_, name, number) = _layout(p, settings), None, self._place(p)
            if g is not None:
                _check_gradient(p, g, name)
                state = self._state(p, shapes, settings, name)
                found = Update(p, g, state, settings, shapes, self._trace(p), name, number)
                if shapes.count:
                    updates.append(found)
                    self._keep(found)
            if shapes.count and dtensor.is_sharded(p):  # without a gradient here, other ranks may still have one
                members.append((self._shard(p, name, shapes), found))
        return updates, Ranks(members) if members else None

    def _keep(self, u: Update) -> None:
        """For the next step, if it is an ordinary tensor."""
        if type(u.x) in (Tensor, Parameter):
            u.where, u.form = _where(u.x, u.state), _form(u.g)
            self._known[u.x] = u

    def _holds(self, u: Update, p: Tensor, g: Tensor, settings: Settings) -> bool:
        """Is all that was found out about a parameter in an earlier step still so?"""
        if u.settings.form != settings.form or u.state is not self.state[p] or u.where != _where(p, u.state):
            return False
        u.settings = settings
        form = _form(g)
        if u.form != form:
            _check_gradient(p, g, u.name)
            u.form, u.fleet = form, None
        return True

    def _parameters(self) -> Iterator[tuple[Tensor, Settings]]:
        """Every parameter with its group's settings."""
        for number, group in enumerate(self.param_groups):
            settings = self._settings(number, group)
            for p in group["params"]:
                yield p, settings

    def _settings_of(self, p: Tensor) -> Settings:
        number, _, _ = self._place(p)
        return self._settings(number, self.param_groups[number])

    def _place(self, p: Tensor) -> tuple[int, str, int]:
        """The number of a parameter's group, its name, and its own number."""
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != self._sizes or p not in self._places:
            number, self._sizes = itertools.count(), sizes
            self._places = {
                q: (i, name, next(number))
                for i, (group, names) in enumerate(zip(self.param_groups, self._names(), strict=True))
                for q, name in zip(group["params"], names, strict=True)
            }
        return self._places[p]

    def _shard(self, p: DTensor, name: str, shapes: Layout) -> Shard:
        known = self._shards.get(p)
        if known is None or not known.fits(p, shapes):
            known = self._shards[p] = Shard(p, name, shapes)
        return known

    def _state(self, p: Tensor, shapes: Layout, settings: Settings, name: str) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state.update(_new_state(p, shapes, settings))
        if settings.beta1 and "momentum" not in state:  # switched on in mid-run
            state["momentum"] = torch.zeros_like(p, dtype=statistics_dtype(p.dtype))
        if settings.rounding == "kahan" and p.dtype in SHORT and "compensation" not in state:
            state["compensation"] = torch.zeros_like(p)
        _check_shapes(state, shapes, name)
        # the model may have been moved or converted after the optimizer was made, and kernels trust the state's types
        dtype = statistics_dtype(p.dtype)
        for key, value in state.items():
            wanted = {"step": STEP_DTYPE, "compensation": p.dtype}.get(key, dtype)
            if isinstance(value, Tensor) and (value.dtype != wanted or value.device != p.device):
                state[key] = value.to(p.device, wanted)
        return state

    def _names(self) -> list[list[str]]:
        """The names in each group; without any, the numbers that `state_dict` has for the parameters."""
        number = itertools.count()
        unnamed = [[f"parameter {next(number)}" for _ in group["params"]] for group in self.param_groups]
        return [group.get("param_names", names) for group, names in zip(self.param_groups, unnamed, strict=True)]

    def _trace(self, p: Tensor) -> Trace:
        if p not in self._traces:
            self._traces[p] = Trace()
        return self._traces[p]

    def _warn_once(self, first: Update | Record, stacklevel: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"skipped {first.name} (shape {first.shape}): its gradient is not finite. The parameter and its state "
                "are as they were; report() counts such steps. This is said once.",
                RuntimeWarning,
                stacklevel=stacklevel,
            )

    def _matching(self, state_dict: StateDict) -> StateDict:
        """The same state dict if it fits this optimizer; else a ValueError that says where it does not."""
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved_groups]:
            return state_dict  # torch says so itself
        if all("param_names" in group for group in [*groups, *saved_groups]):
            ours, theirs = ([name for group in g for name in group["param_names"]] for g in (groups, saved_groups))
            # the same names in another order are a mistake; other names may be a wrapper's, with a prefix
            if ours != theirs and sorted(ours) == sorted(theirs):
                name, held = next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
                raise ValueError(f"the optimizer has {name!r} where the state dict has {held!r}: another order")
        for group, saved, names in zip(groups, saved_groups, self._names(), strict=True):
            try:
                settings = Settings.of({**group, **saved})
            except (TypeError, ValueError) as wrong:
                raise ValueError(f"the state dict is not of this optimizer: {wrong}") from wrong
            for p, key, name in zip(group["params"], saved["params"], names, strict=True):
                if state := state_dict["state"].get(key):
                    _check_shapes(state, _layout(p, settings), name)
        return state_dict

    def _restore(self, loaded: StateDict) -> None:
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            settings = Settings.of(group)
            for p, key in zip(group["params"], saved["params"], strict=True):
                values = loaded["state"].get(key)
                if not values and not p.requires_grad:
                    continue
                self.state[p] = _new_state(p, _layout(p, settings), settings)
                for name, value in (values or {}).items():
                    if name in self.state[p]:
                        dtensor.copy_(self.state[p][name], torch.as_tensor(value))
                    else:
                        self.state[p][name] = deepcopy(value)


def _where(p: Tensor, state: dict[str, Tensor]) -> tuple[object, ...]:
    """What must stay so that what is known of a parameter stays true: its memory and its state's, and their types."""
    kept = [(v.data_ptr(), v.dtype) if isinstance(v, Tensor) else None for v in state.values()]
    return p.data_ptr(), p.dtype, p.device, p.shape, p.stride(), kept


def _form(g: Tensor) -> tuple[object, ...]:
    """What must stay so that a gradient need not be looked at again."""
    return type(g), g.layout, g.dtype, g.device, g.shape, g.stride() if g.layout == torch.strided else ()


def _layout(p: Tensor, settings: Settings) -> Layout:
    return layout(tuple(p.shape), settings.factored, settings.axes)


def _new_state(p: Tensor, shapes: Layout, settings: Settings) -> dict[str, Tensor]:
    dtype = statistics_dtype(p.dtype)
    state = {"step": torch.zeros((), dtype=STEP_DTYPE, device=p.device)}
    for key, shape in shapes.statistics.items():
        if key == "full":
            state[key] = torch.zeros_like(p, dtype=dtype)  # lies in memory as the parameter does
        elif dtensor.is_sharded(p):
            summed = shapes.col_axis if key == "row" else shapes.row_axis
            state[key] = dtensor.zeros(p, summed or 0, dtype)
        else:
            state[key] = torch.zeros(shape, dtype=dtype, device=p.device)
    if settings.beta1:
        state["momentum"] = torch.zeros_like(p, dtype=dtype)
    if settings.rounding == "kahan" and p.dtype in SHORT:
        state["compensation"] = torch.zeros_like(p)
    return {key: value.detach() for key, value in state.items()}


def _check_parameter(p: Tensor, name: str) -> None:
    if hasattr(p, "_fsdp_flattened"):
        raise ValueError(
            f"{name} is a flat parameter of FSDP1, whose slices are not the model's matrices; use FSDP2 (fully_shard)"
        )
    if not p.is_floating_point():
        raise TypeError(f"{name} has dtype {p.dtype}; Adafactor steps real floating-point parameters only")


def _check_gradient(p: Tensor, g: Tensor, name: str) -> None:
    if dtensor.is_sharded(p) != dtensor.is_sharded(g):
        raise TypeError(f"{name} is a {type(p).__name__}, but its gradient a {type(g).__name__}: shard both or none")
    if g.shape != p.shape:
        raise ValueError(f"{name} of shape {tuple(p.shape)} has a gradient of shape {tuple(g.shape)}: was it replaced?")
    if g.layout != torch.strided:
        raise TypeError(f"the gradient of {name} is sparse ({g.layout}); make the layer dense (e.g. sparse=False)")
    if not g.is_floating_point():
        raise TypeError(f"the gradient of {name} has dtype {g.dtype}; only real floating-point gradients are supported")


def _check_shapes(state: dict[str, Any], shapes: Layout, name: str) -> None:
    for key, shape in shapes.statistics.items():
        has = tuple(state[key].shape) if key in state else None
        if has != shape:
            raise ValueError(
                f"{name} of shape {shapes.shape} needs a state {key!r} of shape {shape}, but the state has "
                f"{'none' if has is None else has}: the groups are in another order, or `factored` or `axes` changed"
            )
    for key in ("momentum", "compensation"):
        if key in state and tuple(state[key].shape) != shapes.shape:
            raise ValueError(f"{name} of shape {shapes.shape} has a {key} of shape {tuple(state[key].shape)}")
