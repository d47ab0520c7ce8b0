"""What training scripts do between steps, in any order: after each step the optimizer is where it should be."""

# ruff: noqa: D102 -- the name of a rule says what happens

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor
from torch.nn import Parameter

from adafactor import step_in_backward
from adafactor.core.momentum import BUFFERS, buffer
from tests import inside
from tests.attack.rig import Rig, Tally

SHAPES = [(6, 5), (7,), (), (3, 4, 5), (40, 33), (5, 6)]
MOST = 8  # parameters
SEEDS = st.integers(0, 10**6)
WHICH = st.integers(0, MOST - 1)
FACTORS = st.sampled_from([0.5, -1.0, 0.0, 1e-6, 1e6])
LARGEST = 1e7  # that an edit leaves; exploding adds nine digits, and squares must stay in float32
Kind = tuple[torch.dtype, str | bool, tuple[float, str]]  # of a group: dtype, `factored`, `beta1` and what it averages
KINDS = st.tuples(
    st.sampled_from([torch.float64, torch.float64, torch.float64, torch.float32]),
    st.sampled_from(["outer", "outer", "outer", "row", "column", False]),
    st.sampled_from([(0.0, "update"), (0.0, "update"), (0.9, "update"), (0.9, "gradient")]),
)
SAME = ("factored", "beta1", "momentum_of")  # in a group that a parameter may be moved to, with the state that it has
SETTINGS: dict[str, list[Any]] = {
    "lr": [1e-2, 0.3, 1e-4, 0.0],
    "weight_decay": [0.0, 0.1, 1.0],
    "clip": [1.0, None, 0.1],
    "beta2": [None, 0.99, 0.5],
    "relative": [True, False],
    "on_nonfinite": ["skip", "raise", "ignore"],
    "eps": [(1e-30, 1e-3), (1e-30, 0.5), (1e-6, 1e-3)],
    "maximize": [False, True],
}


def between_steps(**draws: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """A rule that is followed by so many steps; some of what is kept from step to step takes three to settle."""

    def decorate(change: Callable[..., None]) -> Any:
        def run(self: Machine, seed: int, steps: int, **drawn: Any) -> None:
            change(self, **drawn)
            for number in range(steps):
                self.set_gradients(seed + number)
                self.rig.step()

        run.__name__ = change.__name__
        everything: dict[str, Any] = {"seed": SEEDS, "steps": st.sampled_from([0, 1, 2, 4]), **draws}
        return rule(**everything)(run)

    return decorate


def pickled(things: Any) -> Any:
    return pickle.loads(pickle.dumps(things))


class Machine(RuleBasedStateMachine):
    """One run of training with everything that may happen in it."""

    backend = "eager"
    rig: Rig

    def __init__(self) -> None:
        """Nothing is saved yet."""
        super().__init__()
        self.saved_model: dict[str, Tensor] = {}
        self.saved_optimizer: tuple[Any, Any, Any] | None = None

    @initialize(
        seed=SEEDS,
        kinds=st.lists(KINDS, min_size=1, max_size=2),
        shapes=st.lists(st.sampled_from(SHAPES), min_size=2, max_size=4),
    )
    def begin(self, seed: int, kinds: list[Kind], shapes: Any) -> None:
        torch.set_num_threads(1)
        self.rig = Rig(self.backend)
        self.grow(seed, kinds[0], shapes[1:])
        self.grow(seed + 1, kinds[-1], shapes[:1], lr=0.1, weight_decay=0.1)

    def grow(self, seed: int, kind: Kind, shapes: list[tuple[int, ...]], **keywords: Any) -> None:
        dtype, factored, (beta1, momentum_of) = kind
        if self.backend == "cpu" and dtype == torch.float64:
            dtype = torch.float32  # by its name it refuses float64, inside backward after others have stepped
        random = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]
        self.rig.grow(values, factored=factored, beta1=beta1, momentum_of=momentum_of, **keywords)

    def parameter(self, which: int) -> tuple[str, Parameter]:
        params = list(self.rig.params.items())
        return params[which % len(params)]

    def set_gradients(self, seed: int, kind: str = "all") -> None:
        for number, p in enumerate(self.rig.params.values()):
            random = torch.Generator().manual_seed(seed * 100 + number)
            chance = float(torch.rand((), generator=random))
            g = torch.randn(p.shape, generator=random, dtype=p.dtype) * 10 ** float(torch.randn((), generator=random))
            if kind == "not finite" and chance < 0.4:
                g.view(-1)[0] = [float("nan"), float("inf")][number % 2]
            if kind == "strides" and p.dim() > 1 and chance < 0.5:
                g = g.transpose(0, -1).contiguous().transpose(0, -1)
            elif kind == "strides" and p.dim() and chance < 0.7:
                g = g[:1].expand(p.shape)
            else:  # as backward leaves it
                g = torch.empty_like(p).copy_(g).detach()
            p.grad = None if not p.requires_grad or (kind == "missing" and chance < 0.5) else g

    # ---- steps

    @rule(seed=SEEDS, kind=st.sampled_from(["all", "missing", "not finite", "strides"]))
    def step(self, seed: int, kind: str) -> None:
        self.set_gradients(seed, kind)
        self.rig.step()

    @rule()
    def step_again_with_the_same_gradients(self) -> None:
        self.rig.step()

    @rule(seed=SEEDS)
    def step_inside_backward(self, seed: int) -> None:
        if not any(p.requires_grad for p in self.rig.params.values()):
            return
        self.set_gradients(seed)
        grads = {p: p.grad for p in self.rig.params.values() if p.grad is not None}

        def act() -> None:
            self.rig.optimizer.zero_grad()
            with step_in_backward(self.rig.model, self.rig.optimizer):
                torch.stack([(p * g).sum() for p, g in grads.items()]).sum().backward()
                self.rig.optimizer.step()

        self.rig.step(act)

    # ---- the weights

    def in_range(self, p: Tensor, factor: float) -> float:
        return factor if float(p.detach().abs().max()) * factor < LARGEST else 1 / LARGEST

    @between_steps(which=WHICH, factor=FACTORS)
    def edit_in_place(self, which: int, factor: float) -> None:
        _, p = self.parameter(which)
        with torch.no_grad():
            p.mul_(self.in_range(p, factor))

    def announce(self, name: str, p: Parameter) -> None:
        """Count an edit that torch has not counted: a compiled step would find it one step later.

        `tests/test_properties.py` has the one step that such an edit costs.
        """
        self.rig.unannounced.add(name)
        if self.backend != "eager":
            with torch.no_grad():
                p.mul_(1)

    @between_steps(which=WHICH, factor=FACTORS)
    def edit_through_data(self, which: int, factor: float) -> None:
        name, p = self.parameter(which)
        p.data.mul_(self.in_range(p, factor))
        self.announce(name, p)

    @between_steps(which=WHICH, factor=st.sampled_from([1.0, 1.0, 0.5]))
    def swap_data_for_a_copy(self, which: int, factor: float) -> None:
        name, p = self.parameter(which)
        p.data = p.data.clone() * factor
        self.announce(name, p)

    @between_steps(which=WHICH)
    def swap_data_for_another_order_of_memory(self, which: int) -> None:
        name, p = self.parameter(which)
        kept_whole = {"full", *BUFFERS} & set(self.rig.optimizer.state[p])
        if p.dim() > 1 and not (self.backend in inside.COMPILED and kept_whole):  # which these refuse, and says so
            p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1)
            p.grad = None
            self.announce(name, p)

    @between_steps(which=WHICH)
    def replace_a_parameter_and_move_its_state(self, which: int) -> None:
        name, old = self.parameter(which)
        new = Parameter(old.detach().clone() * 0.9, old.requires_grad)
        params = self.rig.group_of(name)["params"]
        params[next(i for i, p in enumerate(params) if p is old)] = new
        if old in self.rig.optimizer.state:
            self.rig.optimizer.state[new] = self.rig.optimizer.state.pop(old)
        self.rig.model.register_parameter(name, new)
        self.rig.tallies[name] = Tally()  # as the optimizer does for a parameter that it has not seen before

    @rule()
    def save_the_model(self) -> None:
        self.saved_model = copy.deepcopy(self.rig.model.state_dict())

    @precondition(lambda self: bool(self.saved_model))
    @between_steps()
    def roll_the_model_back(self) -> None:
        self.rig.model.load_state_dict(self.saved_model, strict=False)

    @between_steps(seed_of_spike=SEEDS, lr=st.sampled_from([0.5, 1e3]))
    def let_the_weights_explode_and_roll_them_back(self, seed_of_spike: int, lr: float) -> None:
        moving = [m for state in self.rig.optimizer.state.values() if (m := buffer(state)) is not None]
        if any(float(t.detach().abs().max()) > LARGEST for t in [*self.rig.params.values(), *moving]):
            return
        before = copy.deepcopy(self.rig.model.state_dict())
        usual = [(group["lr"], group["lr_decay"]) for group in self.rig.groups]
        for group in self.rig.groups:
            group["lr"], group["lr_decay"] = lr, None
        for number in range(3):
            self.set_gradients(seed_of_spike + number)
            self.rig.step()
        for group, (old, decay) in zip(self.rig.groups, usual, strict=True):
            group["lr"], group["lr_decay"] = old, decay
        self.rig.model.load_state_dict(before)

    @between_steps(through_data=st.booleans())
    def swap_with_an_average_and_back(self, through_data: bool) -> None:
        params = list(self.rig.params.values())
        averages = [p.detach().clone() * 0.7 for p in params]
        for _ in range(2):
            for p, average in zip(params, averages, strict=True):
                if through_data:
                    p.data, average.data = average.data, p.data
                else:
                    held = p.detach().clone()
                    with torch.no_grad():
                        p.copy_(average)
                    average.copy_(held)

    @between_steps(seed_of_sgd=SEEDS)
    def let_another_optimizer_write(self, seed_of_sgd: int) -> None:
        self.set_gradients(seed_of_sgd)
        torch.optim.SGD(self.rig.params.values(), lr=0.01).step()

    # ---- the groups

    @between_steps(which=WHICH, in_exchange=st.booleans())
    def move_to_another_group(self, which: int, in_exchange: bool) -> None:
        name, p = self.parameter(which)
        here = self.rig.group_of(name)
        others = (group for group in self.rig.groups if group is not here)
        there = next((group for group in others if all(group[key] == here[key] for key in SAME)), None)
        if there is None:
            return
        if in_exchange:
            here["params"].append(there["params"].pop())
        if len(here["params"]) > 1:
            here["params"] = [q for q in here["params"] if q is not p]
            there["params"].insert(0, p)

    @between_steps(which=WHICH, keyword=st.sampled_from(list(SETTINGS)), value=st.integers(0, 3))
    def change_a_setting(self, which: int, keyword: str, value: int) -> None:
        choices = SETTINGS[keyword]
        self.rig.groups[which % len(self.rig.groups)][keyword] = choices[value % len(choices)]

    @precondition(lambda self: len(self.rig.params) < MOST)
    @between_steps(seed_of_values=SEEDS, kind=KINDS, shape=st.sampled_from(SHAPES))
    def add_a_group(self, seed_of_values: int, kind: Kind, shape: tuple[int, ...]) -> None:
        self.grow(seed_of_values, kind, [shape], lr=0.05)

    @between_steps(which=WHICH)
    def freeze_or_thaw(self, which: int) -> None:
        _, p = self.parameter(which)
        p.requires_grad_(not p.requires_grad)
        p.grad = None

    @between_steps()
    def drop_gradients(self) -> None:
        self.rig.optimizer.zero_grad()

    # ---- the optimizer

    @rule()
    def save_the_optimizer(self) -> None:
        saved = copy.deepcopy(self.rig.optimizer.state_dict())
        self.saved_optimizer = (self.rig.structure, saved, copy.deepcopy(self.rig.kept))

    @precondition(lambda self: self.saved_optimizer is not None and self.saved_optimizer[0] == self.rig.structure)
    @between_steps()
    def load_the_optimizer(self) -> None:
        assert self.saved_optimizer is not None
        _, saved, kept = self.saved_optimizer
        self.rig.optimizer.load_state_dict(saved)
        self.rig.kept = copy.deepcopy(kept)
        self.rig.start_tallies_anew()

    @between_steps(how=st.sampled_from([copy.deepcopy, pickled]))
    def go_on_with_a_copy(self, how: Callable[[Any], Any]) -> None:
        self.rig.model, self.rig.optimizer = how((self.rig.model, self.rig.optimizer))
        self.rig.start_tallies_anew()

    @rule(count=st.sampled_from([1, 2, 4]))
    def change_the_number_of_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    @rule()
    def report(self) -> None:
        self.rig.report()


def play(backend: str, number: int) -> None:
    """Five runs of so many things that happen; other ones for each number."""
    profile = settings(
        max_examples=5,
        stateful_step_count=25 + 25 * (number % 2),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        # shrinking takes minutes, explaining takes more: a failure is reported as it was found, with what happened
        phases=(Phase.generate, Phase.shrink) if inside.seconds() > 60 else (Phase.generate,),
    )
    machine = seed(number)(type("Machine", (Machine,), {"backend": backend}))
    run_state_machine_as_test(machine, settings=profile)


@pytest.mark.parametrize("backend", inside.AND_AUTO)
def test_whatever_happens_between_steps_the_next_step_is_right(backend: str) -> None:
    end, number = time.monotonic() + inside.seconds() / len(inside.AND_AUTO), 0
    while number < 2 or time.monotonic() < end:
        play(backend, number)
        number += 1
