"""The optimizer: groups, state, checkpoints, reports. The algorithm itself is in `algorithm.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict
from torch.utils.weak import WeakTensorKeyDictionary

from adafactor import kernels
from adafactor.check import selftest_cache
from adafactor.core import checkpoint, dtensor
from adafactor.core import state as states
from adafactor.core.bucket import Bucket
from adafactor.core.contract import Executor, Fallback, Parameter
from adafactor.core.factoring import Factored, Factoring
from adafactor.core.grad_scaler import Scaling
from adafactor.core.momentum import KEYS
from adafactor.core.record import Record, StepMetrics, names_of
from adafactor.core.rules import Rules, divide_by_rules
from adafactor.core.settings import FOREIGN, SMALL_LR, CheckedGroups, Settings, from_text, read_text, rename_momentum
from adafactor.core.signals import held_back
from adafactor.core.step import step
from adafactor.core.warn import warn
from adafactor.distributed.agreement import Agreement
from adafactor.distributed.reductions import Ranks
from adafactor.distributed.shard import Shard

P = ParamSpec("P")
Unit = tuple[Tensor, ...]  # parameters that step together inside backward


def _as_given(init: Callable[P, None]) -> Callable[P, None]:
    """Look at the keywords that are written, before there are defaults: other optimizers' and a missing `relative`."""

    @wraps(init)
    def checked(*args: P.args, **keywords: P.kwargs) -> None:
        for name in keywords.keys() & FOREIGN.keys():
            raise TypeError(
                f"Adafactor has no keyword {name!r}; here it is {FOREIGN[name]}. "
                "adafactor.like(source, params, ...) takes the arguments of transformers', torch's or timm's Adafactor,"
                " and the class adafactor.hf.Adafactor those of transformers'"
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

    `state_dict()` holds the tensors of the state themselves, which later steps change, as torch's optimizers do after
    their first step; here also before it, since the state is there from the start. `copy.deepcopy` makes a snapshot.

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
            float32. A step computes it in float32, and rounds what it keeps.
        momentum_rounding: of `momentum_dtype`: `"stochastic"`, where small changes are right in the mean, or
            `"nearest"`.
        beta2: None for 1 − t^−decay_rate (§7.2); a number for a constant with Adam's correction (§7.1).
        decay_rate: c of §7.2; past gradients are forgotten only for c ≤ 1.
        beta2_max: the largest β̂₂ₜ that 1 − t^−decay_rate may reach (big_vision: 0.999); None for no bound.
        clip: d of §6, the largest RMS(U); None for no clipping.
        eps: ε₁, which keeps G² from zero, and ε₂, the least scale of a parameter.
        weight_decay: λ, decoupled: X ← X·(1 − ρₜ·λ) before the update; RMS(X) is that before the decay.
        weight_decay_by: what λ is multiplied by: `"rho"` for ρₜ; `"alpha"` for αₜ (transformers, fairseq); `"lr"` for
            the learning rate (torch); `"constant"` for 1 (optax, T5X); a number lr₀ for ρₜ²/lr₀ (timm's corrected one).
        axes: the (row, column) axes to factor; None for the two largest.
        min_factored: a second moment stays unfactored where one of these axes is shorter (optax has 128).
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
            first pattern that matches a name decides. It needs names, and makes a group for each rule.
        momentum: the former name of `momentum_of`.
        foreach: accepted and ignored, as are `fused` and `capturable`: some trainers give them to every optimizer of
            torch, and there is one way to step here.
        fused: see `foreach`.
        capturable: see `foreach`.
        differentiable: False; True is an error, because a step is not recorded for a gradient of its own.
        backend: `"eager"` is eager PyTorch on any device; `"cpu"` is compiled by Numba (`pip install "numba>=0.57"`),
            for tensors on a CPU; `"triton"` is for tensors on a GPU, where Triton comes with torch; `"auto"` takes the
            compiled one for the device where it can, on a GPU after a self-test (`adafactor check`), else `"eager"`.
            While a dispatch mode looks on (`make_fx`, `FakeTensorMode`), every step is eager: it would not see another.

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
        momentum_rounding: str = Settings.momentum_rounding,
        beta2: float | None = Settings.beta2,
        decay_rate: float = Settings.decay_rate,
        beta2_max: float | None = Settings.beta2_max,
        clip: float | None = Settings.clip,
        eps: tuple[float, float] = Settings.eps,
        weight_decay: float = Settings.weight_decay,
        weight_decay_by: str | float = Settings.weight_decay_by,
        axes: tuple[int, int] | None = Settings.axes,
        min_factored: int = Settings.min_factored,
        maximize: bool = Settings.maximize,
        on_nonfinite: str = Settings.on_nonfinite,
        rounding: str = Settings.rounding,
        seed: int = Settings.seed,
        rules: Rules | None = None,
        momentum: str | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        backend: str = "auto",
    ):
        keywords = locals()
        if read_text(differentiable):
            raise ValueError(f"differentiable={differentiable!r} must be False: a step cannot be differentiated")
        if momentum is not None:
            if not isinstance(read_text(momentum), str):
                raise TypeError(f"momentum={momentum!r} is called beta1 here: beta1={momentum!r}")
            _warn_of_momentum()
            keywords["momentum_of"] = momentum
        defaults = from_text(keywords)
        Settings(**defaults)
        self._start(backend)
        super().__init__(params if rules is None else divide_by_rules(params, rules), defaults)
        if momentum_dtype != Settings.momentum_dtype and not any(group["beta1"] for group in self.param_groups):
            raise ValueError(f"momentum_dtype={momentum_dtype!r} needs a momentum: set beta1, for example beta1=0.9")

    def _start(self, backend: str) -> None:
        kernels.check(backend)  # a wrong name and a missing package are told at once
        self.backend = backend
        self._settings = CheckedGroups()
        self._buckets: dict[Unit | None, Bucket] = {}  # None: the whole model; else what steps inside backward
        self._metrics: Any = WeakTensorKeyDictionary()  # what is behind `report()`
        self._made_for: Any = WeakTensorKeyDictionary()  # the factoring and `momentum_of` that a state was made for
        self._warned = self._fell_back = False
        # after load_state_dict the ranks have to agree anew; the others may not know and expect the same sums as before
        before: dict[Unit | None, Agreement] = getattr(self, "_agreements", {})
        self._agreements = {unit: Agreement(agreement.shards) for unit, agreement in before.items()}
        self._apart: set[Tensor] = getattr(self, "_apart", set())  # sharded ones that step inside backward

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy; the figures behind `report()` start afresh in the copy."""
        return {**super().__getstate__(), "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From pickle, deepcopy and `load_state_dict`."""
        super().__setstate__(state)
        for group in self.param_groups:  # from a version that had fewer keywords, or called one differently
            rename_momentum(group)
            for field in fields(Settings):  # and not all of `defaults`, to which torch has added one of its own by now
                group.setdefault(field.name, self.defaults.get(field.name, field.default))
        self._start(self.backend)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, check its keywords, and make its state.

        State exists from here on, not from the first step: torch's distributed loaders pass over an optimizer
        whose state is empty. Frozen parameters get theirs with their first gradient, if they ever have one.
        """
        if isinstance(param_group, dict):
            param_group.update(from_text(param_group))
            if rename_momentum(param_group):
                _warn_of_momentum()
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            group = self.param_groups[before]
            settings = Settings.of(group)
            for p, name in zip(group["params"], names_of(self.param_groups)[before], strict=True):
                states.check_parameter(p, name)
                factoring = states.factoring_of(p, settings)  # complains about axes that the parameter does not have
                if p.requires_grad:
                    self.state[p] = states.new_state(p, factoring, settings)
                    self._made_for[p] = factoring, settings.momentum_of
        except Exception:
            for p in self.param_groups.pop()["params"]:
                self.state.pop(p, None)
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler leaves scaled gradients to us: on a device, where reading its answer makes it wait."""
        return any(not p.is_cpu for group in self.param_groups for p in group["params"])

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
        self._step_undisturbed()
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
        if not self._step_undisturbed((p,)):
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is in no group of this optimizer")

    def step_parameter(self, p: Tensor, group: dict[str, Any] | None = None, i: int | None = None) -> None:
        """`step_param` as OneTrainer's fused backward pass calls it, with the parameter's place in its group."""
        self.step_param(p, group)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # a compiled training step calls it as it is
    def _step_undisturbed(self, only: Unit | None = None) -> bool:
        with held_back(), torch.no_grad():
            return self._step(only)

    def _step(self, only: Unit | None = None) -> bool:
        """Step what has a gradient, or `only` these: `backward` hands them in as their gradients come.

        Returns:
            False for parameters that are in no group (any more), and so take no step.
        """
        settings = [self._settings(number, group) for number, group in enumerate(self.param_groups)]
        watched = kernels.is_watched()
        bucket = None if watched else self._buckets.get(only)
        if bucket is None or not bucket.holds(self.backend, self.param_groups, settings, self.state):
            if only is not None and not any(True for _ in self._entries(only)):
                self._buckets.pop(only, None)
                return False
            bucket = self._gather(only, settings, None)
        grads = bucket.gradients(self.param_groups)
        if grads is None:  # of a parameter that never had one so far
            bucket = self._gather(only, settings, bucket)
            grads = bucket.gradients(self.param_groups)
        assert grads is not None
        if bucket.ranks is not None or any(g is not None for g in grads):
            if not watched:
                self._flush(only)
            grads = bucket.match(grads)
            self._warn_of_fallback(bucket)
            if skipped := step(bucket, grads, settings, Scaling.of(self)):
                self._warn_of_skipping(skipped[0])
        return True

    def _step_apart(self, apart: Iterable[Tensor]) -> None:
        """Leave these sharded parameters out of `step()`, where they would take part without a gradient too."""
        for bucket in self._buckets.values():
            bucket.flush()
        self._buckets.clear()
        self._apart = set(apart)

    def _flush(self, stepping: Unit | None) -> None:
        """Note the figures of earlier steps before those of another bucket of the same parameters."""
        if stepping is None:
            for key, bucket in self._buckets.items():
                if key is not None:
                    bucket.flush()
        elif None in self._buckets:
            self._buckets[None].flush()

    def _gather(self, only: Unit | None, settings: list[Settings], known: Bucket | None) -> Bucket:
        """Put together the parameters that step together. What is wrong with them is found before anything changes.

        Args:
            only: the parameters that step inside backward; None: all.
            settings: of each group.
            known: a bucket whose parameters are as they were; those without a gradient this time stay in.
        """
        watched = kernels.is_watched()  # then this bucket is for one step: what is in it may be the mode's own
        old = self._buckets.get(only)
        if old is not None and not watched:
            del self._buckets[only]
            old.flush()
        before = {} if old is None else {parameter.p: parameter for parameter in old.parameters}
        staying = set() if known is None else {parameter.p for parameter in known.parameters}
        if only is None:
            self._warn_of_flat_slices()
            self._follow_groups()
        parameters: list[Parameter] = []
        places = []
        for group, index, number, p, name in self._entries(only):
            places.append((group, index))
            # a sharded one without a gradient here may have one on other ranks
            is_shared = dtensor.is_sharded(p) and p.requires_grad and (only is not None or p not in self._apart)
            if p.grad is not None or p in staying or is_shared:
                parameters.append(self._parameter(p, settings[group], group, name, number, before.get(p)))
        ranks = None
        if any(p.shard is not None for p in parameters):
            ranks = Ranks(parameters, self._agreements.setdefault(only, Agreement()))
        backend = "eager" if watched else self.backend
        own = None if only is None else places
        bucket = Bucket(parameters, ranks, backend, _prepare, self.param_groups, settings, self.state, own)
        if not watched:
            self._buckets[only] = bucket
            self._forget_what_left()
        return bucket

    def _parameter(
        self, p: Tensor, settings: Settings, group: int, name: str, number: int, before: Parameter | None
    ) -> Parameter:
        factoring = states.factoring_of(p, settings)
        if p.grad is not None:
            states.check_gradient(p, p.grad, name)
        self._fit_state(p, factoring, settings, name)
        shard = before.shard if before is not None and isinstance(before.shard, Shard) else None
        if dtensor.is_sharded(p) and (shard is None or not shard.fits(p, factoring)):
            shard = Shard(p, name, factoring)
        state = self.state[p]
        if shard is not None:
            state = {key: dtensor.local(value) if isinstance(value, Tensor) else value for key, value in state.items()}
        metrics, form = self._metrics_of(p), None if before is None else before.form
        return Parameter(p, dtensor.local(p), state, factoring, settings, group, name, number, metrics, shard, form)

    def _fit_state(self, p: Tensor, factoring: Factoring, settings: Settings, name: str) -> None:
        """Make the state of a parameter fit its settings, which may have been edited since it was made."""
        state = self.state[p]
        was, momentum_of = self._made_for.get(p, (factoring, settings.momentum_of))
        if state and settings.beta1 and state.keys() & set(KEYS) and momentum_of != settings.momentum_of:
            raise ValueError(
                f"momentum_of of {name} changed in mid-run from {momentum_of!r} to {settings.momentum_of!r}: its state "
                f"'momentum' is an average of the {momentum_of}s. Delete that entry to start a new one"
            )
        if state:
            states.exchange(state, was, factoring, name)
        states.complete(state, p, factoring, settings, name)
        self._made_for[p] = factoring, settings.momentum_of

    def _entries(self, only: Unit | None) -> Iterator[tuple[int, int, int, Tensor, str]]:
        """Every parameter, or only some: its group, its place there, its number among all, itself, its name."""
        number, wanted = 0, None if only is None else set(only)
        for i, (group, names) in enumerate(zip(self.param_groups, names_of(self.param_groups), strict=True)):
            for j, (p, name) in enumerate(zip(group["params"], names, strict=True)):
                if wanted is None or p in wanted:
                    yield i, j, number, p, name
                number += 1

    def _forget_what_left(self) -> None:
        """Drop the buckets of parameters that are no longer in any group, so that they can be freed."""
        if len(self._buckets) > 1:
            held = {p for group in self.param_groups for p in group["params"]}
            for unit in [unit for unit in self._buckets if unit is not None and held.isdisjoint(unit)]:
                del self._buckets[unit]
                self._agreements.pop(unit, None)

    def report(self) -> list[Record]:
        """One record per parameter: RMS(U), clip rate, step size and more of the last step (§5, §6).

        On a device other than the CPU this is where the host waits. Each report resets the clip rate.
        """
        for bucket in self._buckets.values():
            bucket.flush()
        records = []
        for group, names in zip(self.param_groups, names_of(self.param_groups), strict=True):
            for p, name in zip(group["params"], names, strict=True):
                size = sum(v.nbytes for v in self.state.get(p, {}).values() if isinstance(v, Tensor))
                records.append(self._metrics_of(p).record(name, p, size, group))
        for record in records:
            if record.skipped:
                self._warn_of_skipping(record)
        return records

    def state_dict(self) -> StateDict:
        """As torch's, of the parameters that are in the groups now."""
        self._follow_groups()
        return super().state_dict()

    def _follow_groups(self) -> None:
        """Exchange states without a step where others stand in the groups now: Accelerate's FSDP2 puts them there."""
        held = {p for group in self.param_groups for p in group["params"]}
        for p, state in list(self.state.items()):
            if isinstance(p, Tensor) and p not in held and not state.get("step", 1):
                del self.state[p]
        for group, names in zip(self.param_groups, names_of(self.param_groups), strict=True):
            for p, name in zip(group["params"], names, strict=True):
                if p.requires_grad and not self.state.get(p):
                    settings = Settings.of(group)
                    self._fit_state(p, states.factoring_of(p, settings), settings, name)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict()` gave, keeping the statistics' precision.

        Torch's own loading casts every statistic to the parameter's dtype, which ruins float32 statistics of
        bfloat16 parameters. Shapes, and names where both sides have them, must match. A momentum that was kept in
        another `momentum_dtype` is converted, and a warning says so.
        """
        loaded: checkpoint.Loaded = {}
        formats = [group["momentum_dtype"] for group in self.param_groups]

        def read(_: Optimizer, given: StateDict) -> None:
            loaded.update(checkpoint.read(given, self.param_groups, self.defaults))

        def take(_: Optimizer) -> None:
            for p, (state, *made_for) in loaded.items():
                self.state[p], self._made_for[p] = state, tuple(made_for)
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

    def _metrics_of(self, p: Tensor) -> StepMetrics:
        if p not in self._metrics:
            self._metrics[p] = StepMetrics()
        metrics: StepMetrics = self._metrics[p]
        return metrics

    def _warn_of_flat_slices(self) -> None:
        """DeepSpeed's ZeRO puts one flat slice in place of all the parameters of a group."""
        params = [p for group in self.param_groups for p in group["params"]]
        if all(p.ndim == 1 for p in params) and any(p not in self._made_for for p in params):
            if any(isinstance(factoring, Factored) for factoring, _ in self._made_for.values()):
                warn(
                    "the optimizer was made for matrices, but its groups now hold flat tensors, as DeepSpeed's ZeRO "
                    "makes them: no second moment is factored, and no memory is saved. Use FSDP2 instead"
                )

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

    def _warn_of_fallback(self, bucket: Bucket) -> None:
        if bucket.fallback is not None and not self._fell_back:
            self._fell_back = True
            parameter, reason = bucket.fallback
            what = f"{parameter.name} (shape {parameter.shape})"
            warn(f"{what} is stepped by eager PyTorch, more slowly: {reason}. (Shown once)")

    def _warn_of_skipping(self, first: Parameter | Record) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"skipped {first.name} (shape {first.shape}): its gradient is not finite. The parameter and its state "
                "are as they were; report() counts such steps. (Shown once)"
            )


def _warn_of_momentum() -> None:
    warn("the keyword `momentum` is called `momentum_of` now: momentum is a number to schedulers", DeprecationWarning)


def _prepare(parameters: list[Parameter], backend: str) -> tuple[list[Executor], Fallback | None]:
    return kernels.prepare(parameters, backend, _doubt)


def _doubt(backend: str, parameter: Parameter) -> str | None:
    """Say why `"auto"` should not rely on a backend here: of Triton, what its self-test on this card has found."""
    return selftest_cache.why_not_here(Adafactor, parameter) if backend == "triton" else None
