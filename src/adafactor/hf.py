"""Adafactor with the arguments of transformers' Adafactor: for trainers that take a class by its path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NoReturn

from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from adafactor import optimizer
from adafactor.core.settings import Settings, read_text
from adafactor.migration import migrate
from adafactor.migration.peer import Group
from adafactor.migration.peers import TRANSFORMERS

# what `optimizer.Adafactor` calls things for which transformers has a word of its own
THEIR_WORD = {"lr_decay": "relative_step", "relative": "scale_parameter", "clip": "clip_threshold"}
FLAT, SLOPE = 1e-2, 1e-6  # of relative steps: min(FLAT, 1/√t), or with warm-up min(SLOPE·t, 1/√t)
FLAGS = ("relative_step", "warmup_init")  # of theirs, that are in our groups too
COUNT = "warmup_count"  # of steps, in a group that warms up


def _show_our_keywords(init: Callable[..., None]) -> Callable[..., None]:
    """Put our keywords into the signature, which command lines and configurations are checked against."""
    theirs, ours = (inspect.signature(each).parameters for each in (init, optimizer.Adafactor.__init__))
    named = [p for p in theirs.values() if p.kind is not p.VAR_KEYWORD]
    more = [p for p in ours.values() if p.name not in theirs and p.name not in THEIR_WORD]
    init.__signature__ = inspect.Signature(named + more)  # type: ignore[attr-defined]
    return init


class Adafactor(optimizer.Adafactor):
    """`adafactor.Adafactor` for those who have the arguments of transformers' Adafactor, or only a place for a path.

    A word that transformers has means what it means there, with the same default: `decay_rate` is negative, `lr` is
    None for relative steps. All other keywords of `adafactor.Adafactor`, such as `rounding`, may be given besides; but
    not `relative`, `lr_decay` and `clip`, for which transformers has words of its own. With `relative_step=True` no
    scheduler changes the step size, as in transformers; `AdafactorSchedule` works. `load_state_dict` also takes a
    state dict of transformers' Adafactor, so that a run can go on with this one.

    Args:
        params: parameters or groups, which may have arguments of their own.
        lr: the step size, with `relative_step=False`.
        eps: as in `adafactor.Adafactor`.
        clip_threshold: our `clip`.
        decay_rate: minus our `decay_rate`.
        beta1: None for no momentum.
        weight_decay: λ, which αₜ is multiplied by: our `weight_decay_by="alpha"`.
        scale_parameter: our `relative`.
        relative_step: steps of min(10⁻², 1/√t); our `lr=1e-2, lr_decay="rsqrt"`.
        warmup_init: steps of min(10⁻⁶·t, 1/√t) instead.
        **ours: keywords of `adafactor.Adafactor`.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Adafactor(
        ...     model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False, rounding="stochastic"
        ... )
        >>> optimizer.param_groups[0]["relative"], optimizer.param_groups[0]["rounding"]
        (False, 'stochastic')
    """

    @_show_our_keywords
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float | None = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        **ours: Any,
    ):
        """Translate the arguments."""
        self._theirs = {name: value for name, value in locals().items() if name in TRANSFORMERS.defaults}
        keywords, _ = self._translate(ours)
        super().__init__(params, **{**keywords, **ours})

    def _translate(self, group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a group's keywords in our words, and of theirs those that `_step` looks at."""
        for name in THEIR_WORD.keys() & group.keys():
            raise TypeError(f"adafactor.hf.Adafactor has transformers' word for {name!r}: {THEIR_WORD[name]}")
        own = {name: group[name] for name in self._theirs.keys() & group.keys()}
        theirs = {name: read_text(value) for name, value in {**self._theirs, **own}.items()}
        if theirs["warmup_init"] and not theirs["relative_step"]:
            raise ValueError(f"warmup_init={theirs['warmup_init']!r} needs relative_step=True")
        if isinstance(theirs["decay_rate"], float) and theirs["decay_rate"] >= 0:
            raise ValueError(f"decay_rate={theirs['decay_rate']!r} must be below 0, as transformers has it")
        keywords = Group(TRANSFORMERS, {**theirs, "warmup_init": False}, []).keywords
        return keywords, {name: theirs[name] for name in FLAGS}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose arguments are transformers' or ours."""
        if isinstance(param_group, dict):
            keywords, flags = self._translate(param_group)
            for name in TRANSFORMERS.fixed:  # words of ours alone: the group's own, or else the optimizer's
                del keywords[name]
            more = {name: value for name, value in param_group.items() if name not in self._theirs}
            param_group = {**keywords, **flags, **more, **({COUNT: 0} if flags["warmup_init"] else {})}
        super().add_param_group(param_group)

    def _step(self, only: tuple[Tensor, ...] | None = None) -> bool:
        """Set the size of relative steps, whatever a scheduler has written there."""
        for group in self.param_groups:
            if group.get("relative_step"):
                group["lr"] = SLOPE * (group[COUNT] + 1) if group["warmup_init"] else FLAT
        stepped = super()._step(only)
        if only is None:
            for group in self.param_groups:
                if COUNT in group:
                    group[COUNT] += 1
        return stepped

    def step_param(self, p: Tensor, group: dict[str, Any] | None = None) -> None:
        """As `adafactor.Adafactor.step_param`, without warm-up: nobody says where a step of the model ends."""
        if any(COUNT in each for each in self.param_groups):
            raise ValueError("warmup_init=True counts the calls of step(): it cannot be used with step_param alone")
        super().step_param(p, group)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict()` of this class or of transformers' Adafactor gave."""
        if any("clip_threshold" in group for group in state_dict["param_groups"]):
            state_dict = self._convert(state_dict)
        super().load_state_dict(state_dict)

    def _convert(self, state_dict: StateDict) -> StateDict:
        """Return transformers' state as ours, with the keywords of this optimizer that transformers does not have."""
        groups = state_dict["param_groups"]
        flat = [{**group, "warmup_init": False} for group in groups]
        converted = migrate({**state_dict, "param_groups": flat}, source="transformers")
        own = {field.name for field in fields(Settings)} - {*self._theirs, *THEIR_WORD, "factored", "axes"}
        for ours, theirs, here in zip(converted["param_groups"], groups, self.param_groups, strict=True):
            ours |= {name: here[name] for name in own} | {name: theirs[name] for name in FLAGS}
            if theirs["warmup_init"]:
                steps = [converted["state"][key]["step"] for key in ours["params"] if key in converted["state"]]
                ours[COUNT] = int(max(steps, default=0))
        return converted

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy."""
        return {**super().__getstate__(), "_theirs": self._theirs}

    @staticmethod
    def _get_lr(group: dict[str, Any], state: dict[str, Any]) -> float | Tensor:
        """What transformers' `AdafactorSchedule` asks for."""
        return group["lr"]  # type: ignore[no-any-return]

    @staticmethod
    def _get_options(group: dict[str, Any], shape: tuple[int, ...]) -> NoReturn:
        """What the fused backward pass of kohya's scripts asks for before it writes into transformers' state."""
        raise RuntimeError(
            "this fused backward pass steps the state of transformers' Adafactor by itself, not that of adafactor. "
            "Use --blockwise_fused_optimizers or --fused_optimizer_groups, which step any optimizer"
        )
