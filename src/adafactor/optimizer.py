"""The optimizer: groups, state, checkpoints, reports. The algorithm itself is in `algorithm.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, overload

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from adafactor import kernels
from adafactor.core import checkpoint, dtensor
from adafactor.core import state as states
from adafactor.core.bucket import Contents
from adafactor.core.contract import Parameter, Unit
from adafactor.core.gather import Buckets, entries_of, slices_of
from adafactor.core.report import Record, Report
from adafactor.core.rules import Rules, divide_by_rules
from adafactor.core.settings import FOREIGN, SMALL_LR, CheckedGroups, Settings, from_text
from adafactor.core.step import step
from adafactor.core.warn import warn

P = ParamSpec("P")


def _as_given(init: Callable[P, None]) -> Callable[P, None]:
    """Look at the keywords that are written, before there are defaults: other optimizers' and a missing `relative`."""

    @wraps(init)
    def checked(*args: P.args, **keywords: P.kwargs) -> None:
        for name in keywords.keys() & FOREIGN.keys():
            raise TypeError(
                f"Adafactor has no keyword {name!r}; here it is {FOREIGN[name]}. "
                "adafactor.like(source, params, ...) takes the arguments of transformers' and torch's Adafactor and of "
                "AdamW, and the class adafactor.hf.Adafactor those of transformers'"
            )
        params = keywords["params"] if "params" in keywords else args[1] if len(args) > 1 else ()
        groups = [item for item in params if isinstance(item, dict)] if isinstance(params, (list, tuple)) else []
        is_meant = "relative" in keywords or any("relative" in group for group in groups)  # torch adds it to groups
        init(*args, **keywords)
        if not is_meant and isinstance(args[0], Adafactor):
            args[0]._warn_of_small_lr()

    return checked


class Adafactor(Optimizer):
    r"""Adafactor (Shazeer & Stern, 2018): adaptive learning rates with sublinear memory cost.

    With no arguments but the parameters this is the paper's Algorithms 4, 5 and 6, and there is no learning
    rate to tune:

        αₜ = max(ε₂, RMS(X))·ρₜ,  ρₜ = min(lr, 1/√t)
        Rₜ = β̂₂ₜ·Rₜ₋₁ + (1 − β̂₂ₜ)·(G² + ε₁)·1ₘ,  Cₜ likewise with 1ₙᵀ·(G² + ε₁),  β̂₂ₜ = 1 − t^−0.8
        U = G/√(R·C/ΣR),  X ← X − αₜ·U/max(1, RMS(U)/d)

    A matrix of n × m keeps n + m numbers; a vector keeps its own size. Every idea of the paper can be switched
    off or changed by a keyword, and every keyword but `backend` may differ per parameter group.

    A value that a command line or a YAML file has left as text, such as `"1e-3"` or `"False"`, is read as what it says.

    As in torch, `state_dict()` refers to the live tensors; use `copy.deepcopy` for a snapshot.

    Args:
        params: parameters, `model.named_parameters()`, or a list of groups.
        lr: the bound of the step size, by default as a share of each weight's size (`relative`); a number that
            schedulers and loggers can read and set, or a tensor of one element, which is read at every step. A share
            below 0.001 is more likely an lr of AdamW's: there is a warning, unless `relative=True` is written.
        lr_decay: `"rsqrt"` for ρₜ = min(lr, 1/√t); None for ρₜ = lr.
        relative: scale the step by max(ε₂, RMS(X)) (§8); False for absolute steps, αₜ = ρₜ.
        factored: the second-moment estimate of matrices: `"outer"` (§3), `"row"`, `"column"` (§3.2), or False
            to keep it whole.
        beta1: decay of the momentum; 0 keeps no buffer.
        momentum_of: what β₁ averages: the clipped and scaled `"update"` αₜ·Û (the authors' code, Table 2's row P), the
            `"direction"` Û, which αₜ scales afterwards (big_vision), or the `"gradient"` with Adam's bias correction
            (Algorithms 1–3, row B).
        momentum_dtype: how the momentum is kept: in `"float32"` (float64 for a float64 parameter), `"bfloat16"`, or
            `"int8"`, one byte for each element and a float32 scale for every 128; vectors and small tensors stay
            float32. A step computes it in float32, and rounds what it keeps: stochastically, so that small changes are
            right in the mean.
        beta2: None for 1 − t^−decay_rate (§7.2); a number for a constant with Adam's correction (§7.1).
        decay_rate: c of §7.2; past gradients are forgotten only for c ≤ 1.
        beta2_max: the largest β̂₂ₜ that 1 − t^−decay_rate may reach (big_vision: 0.999); None for no bound.
        clip: d of §6, the largest RMS(U); None for no clipping.
        eps: ε₁, which keeps G² from zero, and ε₂, the least scale of a parameter.
        weight_decay: λ, decoupled: X ← X·(1 − ρₜ·λ) before the update; RMS(X) is that before the decay.
        weight_decay_by: what λ is multiplied by: `"rho"` for ρₜ; `"alpha"` for αₜ (transformers, fairseq); `"lr"` for
            the learning rate (torch).
        axes: the (row, column) axes to factor; None for the two largest.
        min_factored: a second moment stays unfactored where one of these axes is shorter (optax has 128).
        per_slice: step each slice X[i] of a stack, of layers under a scan or of experts, as a parameter of its own. Of
            tensors of three axes and more; a matrix stays one.
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
        rules: keywords by names of parameters, as in `{"*embed*": {"factored": False}, "*.bias": {"clip": None}}`. The
            first pattern that matches a name decides. It needs names, and makes a group for each rule. A group that is
            added later has the keywords that it brings.
        foreach: accepted and ignored, as is `fused`: torchtitan and others give them to every optimizer of torch.
        fused: see `foreach`.
        backend: `"eager"` is eager PyTorch on any device; `"cpu"` is the C++ core, for tensors on a
            CPU; `"triton"` is for tensors on a GPU, where Triton comes with torch; `"auto"` takes the
            compiled one on a CPU where it can, else `"eager"`, also on a GPU: none has run Triton's step yet.
            Tensors of a subclass step in eager.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Adafactor(model.named_parameters())
        >>> model(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.report()[0].name
        'weight'
    """

    @_as_given
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = Settings.lr,
        *,
        lr_decay: str | None = Settings.lr_decay,
        relative: bool = Settings.relative,
        factored: str | bool = Settings.factored,
        beta1: float = Settings.beta1,
        momentum_of: str = Settings.momentum_of,
        momentum_dtype: str = Settings.momentum_dtype,
        beta2: float | None = Settings.beta2,
        decay_rate: float = Settings.decay_rate,
        beta2_max: float | None = Settings.beta2_max,
        clip: float | None = Settings.clip,
        eps: tuple[float, float] = Settings.eps,
        weight_decay: float = Settings.weight_decay,
        weight_decay_by: str = Settings.weight_decay_by,
        axes: tuple[int, int] | None = Settings.axes,
        min_factored: int = Settings.min_factored,
        per_slice: bool = Settings.per_slice,
        maximize: bool = Settings.maximize,
        on_nonfinite: str = Settings.on_nonfinite,
        rounding: str = Settings.rounding,
        seed: int = Settings.seed,
        rules: Rules | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        backend: str = "auto",
    ):
        defaults = from_text(locals())
        Settings(**defaults)
        self._start(backend)
        super().__init__(params if rules is None else divide_by_rules(params, rules), defaults)
        _check_momentum(defaults["momentum_dtype"], self.param_groups)

    def _start(self, backend: str) -> None:
        kernels.check(backend)  # a wrong name and a missing package are told at once
        self.backend = backend
        self._settings = CheckedGroups()
        before: Buckets | None = getattr(self, "_buckets", None)  # of an optimizer that a state is loaded into
        self._buckets = Buckets(kernels.prepare, before)
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy; the figures behind `report()` start afresh in the copy."""
        return {**super().__getstate__(), "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From pickle, deepcopy and `load_state_dict`."""
        super().__setstate__(state)
        self._start(self.backend)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, check its keywords, and make its state.

        State exists from here on, not from the first step: torch's distributed loaders pass over an optimizer
        whose state is empty. Frozen parameters get theirs with their first gradient, if they ever have one.
        """
        momentum_dtype, before = Settings.momentum_dtype, len(self.param_groups)
        if isinstance(param_group, dict):
            param_group.update(from_text(param_group))
            momentum_dtype = param_group.get("momentum_dtype", momentum_dtype)  # its own, not the optimizer's
        super().add_param_group(param_group)
        try:
            settings = Settings.of(self.param_groups[before])
            _check_momentum(momentum_dtype, self.param_groups[before:])
            for entry in entries_of(self.param_groups):
                if entry.group == before:
                    states.check_parameter(entry.p, entry.name, settings)
                    if entry.p.requires_grad:
                        self.state[entry.p] = {}
                        states.fit(self.state[entry.p], entry.p, settings, entry.name)
        except Exception:
            for p in self.param_groups.pop()["params"]:
                self.state.pop(p, None)
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

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

    def step_param(self, p: Tensor, group: dict[str, Any] | None = None) -> None:
        """Step one parameter, if it has a gradient, as `step()` would: what kohya's fused backward pass calls.

        `step_in_backward` does the same and more; this is for trainers that register the hooks themselves.

        Args:
            p: a parameter of this optimizer, not sharded.
            group: the group that it is in; not needed.
        """
        if dtensor.is_sharded(p):
            raise ValueError("a sharded parameter (DTensor) cannot step alone: its sums are reduced with the others'")
        self._opt_called = True  # so that torch's schedulers do not miss `step()`
        if not self._step((p,)):
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is in no group of this optimizer")

    @torch._disable_dynamo  # type: ignore[attr-defined]  # a compiled training step calls it as it is
    @torch.no_grad()
    def _step(self, only: Unit | None = None) -> bool:
        """Step what has a gradient, or `only` these: `backward` hands them in as their gradients come.

        Returns:
            False for parameters that are in no group (any more), and so take no step.
        """
        settings = [self._settings(number, group) for number, group in enumerate(self.param_groups)]
        now = Contents(self.param_groups, settings, self.state, self.backend)
        found = self._buckets.find(only, now)
        if found is None:
            return False
        bucket, grads = found
        if bucket.ranks is not None or any(g is not None for g in grads):
            self._buckets.flush_others(only)
            grads = bucket.match(grads)
            if skipped := step(bucket, grads, settings):
                self._warn_of_skipping(skipped[0])
        return True

    def report(self, model: Module | None = None) -> Report:
        """One record per parameter, or per slice: RMS(U), clip rate, step size and more of the last step (§5, §6).

        It is a list that prints as a table. On a device other than the CPU this is where the host waits.

        Args:
            model: where to take names from, if the optimizer was given parameters without.
        """
        self._buckets.flush()
        named: dict[Tensor, str] = {} if model is None else {p: name for name, p in model.named_parameters()}
        entries = [entry._replace(name=named.get(entry.p, entry.name)) for entry in entries_of(self.param_groups)]
        count = Counter(entry.name for entry in entries)  # groups may share names if each was named for itself
        report = Report(step=max((t for entry in entries for t in self._steps(entry.p)), default=0))
        for p, name, number, *_ in entries:
            name, group = name if count[name] == 1 else f"{name} (group {number})", self.param_groups[number]
            size = sum(v.nbytes for v in self.state.get(p, {}).values() if isinstance(v, Tensor))
            for part, x, place in slices_of(p, name, group["per_slice"]):
                share = size if place is None else size // len(p)
                metrics = self._buckets.metrics_of(p, place)
                report.append(metrics.record(part, x, p.requires_grad, share, group))
        for record in report:
            if record.skipped:
                self._warn_of_skipping(record)
        return report

    def _steps(self, p: Tensor) -> list[int]:
        """Return t of a parameter, or of each of its slices; nothing for one without a state."""
        step = self.state.get(p, {}).get("step")
        return [int(t) for t in dtensor.local(step).reshape(-1).tolist()] if isinstance(step, Tensor) else []

    def state_dict(self) -> StateDict:
        """As torch's, of the parameters that are in the groups now."""
        self._buckets.follow(self.param_groups, self.state)
        return super().state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict()` gave, keeping the statistics' precision.

        Torch's own loading casts every statistic to the parameter's dtype, which ruins float32 statistics of
        bfloat16 parameters. Shapes, and names where both sides have them, must match. A momentum that was kept in
        another `momentum_dtype` is converted, and a warning says so.
        """
        loaded: checkpoint.Loaded = {}
        formats = [group["momentum_dtype"] for group in self.param_groups]

        def read(_: Optimizer, given: StateDict) -> None:
            loaded.update(checkpoint.read(given, self.param_groups))

        def take(_: Optimizer) -> None:
            self.state.update(loaded)
            for group, momentum_dtype in zip(self.param_groups, formats, strict=True):
                group["momentum_dtype"] = momentum_dtype  # is this optimizer's own, as the dtype of X is

        # registered here, the first runs after all other hooks on the way in, the second before all on the way out
        before = self.register_load_state_dict_pre_hook(read)
        after = self.register_load_state_dict_post_hook(take, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _warn_of_small_lr(self) -> None:
        """AdamW's users bring its learning rate; the largest of the groups counts, as lower layers may have less."""
        lrs = [group["lr"] for group in self.param_groups if group["relative"]]
        if lrs and not any(isinstance(lr, Tensor) for lr in lrs) and 0 < (lr := max(lrs)) < SMALL_LR:
            warn(
                f"lr={lr:g} is a share of each weight's size here, and a very small one. If it is a learning rate of "
                f"AdamW's, write Adafactor(params, lr={lr:g}, relative=False, lr_decay=None); if the share is meant, "
                "write relative=True, which silences this",
                UserWarning,
            )

    def _warn_of_skipping(self, first: Parameter | Record) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"skipped {first.name} (shape {first.shape}): its gradient is not finite, or its second moment is "
                "not. The parameter and its state are as they were; report() counts such steps. (Shown once)"
            )


def _check_momentum(momentum_dtype: str, groups: list[dict[str, Any]]) -> None:
    """Refuse the format of a momentum that none of these groups has."""
    if momentum_dtype != Settings.momentum_dtype and not any(group["beta1"] for group in groups):
        raise ValueError(f"momentum_dtype={momentum_dtype!r} needs a momentum: set beta1, for example beta1=0.9")
