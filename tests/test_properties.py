"""What holds of every step: each property once, for every row of `tests/cases.py`, on every backend that takes it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from adafactor import Adafactor, step_in_backward
from tests import reference
from tests.cases import CASES, Case, crossed, is_there
from tests.exact import assert_same

NOT_FINITE = {"NaN": float("nan"), "infinity": float("inf")}


class Run:
    """A parameter of a case with its optimizer."""

    def __init__(self, case: Case, backend: str, **keywords: Any):
        """Before the first step."""
        self.case, self.t = case, 0
        self.model = nn.ParameterDict({"weight": case.start()})
        self.optimizer = replace(case, keywords={**case.keywords, **keywords}).optimizer(
            self.model.named_parameters(), backend
        )

    @property
    def p(self) -> Parameter:
        """The parameter."""
        weight: Parameter = self.model["weight"]
        return weight

    def step(self, times: int = 1) -> Run:
        """Some steps, each with the gradient of its number."""
        for _ in range(times):
            self.t += 1
            self.case.give(self.p, self.case.gradient(self.t))
            self.optimizer.step()
        return self

    def bits(self) -> dict[str, Tensor]:
        """A copy of all that a step may change."""
        return copy.deepcopy({"X": self.p.detach(), **self.optimizer.state[self.p]})


def parts(run: Run) -> Iterator[tuple[Any, Tensor, Tensor, dict[str, Tensor]]]:
    """Where to find what the paper takes for one tensor, and its X, G and state: of a stack `per_slice`, each slice."""
    state = dict(run.optimizer.state[run.p])
    g = run.case.gradient(run.t + 1)
    if not run.case.keywords.get("per_slice"):
        yield ..., run.p.detach(), g, state
        return
    for i in range(len(run.p)):
        yield i, run.p.detach()[i], g[i], {key: value[i] for key, value in state.items()}


def expected(run: Run) -> list[reference.Outcome]:
    """What the next step should leave, of each part."""
    group = {**run.optimizer.param_groups[0], "per_slice": False}
    return [
        reference.outcome(group, x.dtype, reference.exact(x), reference.exact(g), reference.values(state))
        for _, x, g, state in parts(run)
    ]


def assert_next_step_is_the_oracles(run: Run) -> list[reference.Outcome]:
    """Take it, and compare X and the whole state."""
    outcomes = expected(run)
    run.step()
    for (where, x, _, state), outcome in zip(parts(run), outcomes, strict=True):
        problem = reference.difference(run.optimizer.param_groups[0], x, state, outcome)
        assert not problem, f"step {run.t}, part {where}: {problem}"
    return outcomes


@crossed(every=True)
def test_every_step_is_the_oracles(case: Case, backend: str) -> None:
    run = Run(case, backend)
    for _ in range(4):
        (outcome, *_) = assert_next_step_is_the_oracles(run)
        assert outcome.taken and outcome.length > 0


@crossed([CASES[0], *(case for case in CASES if case.name in ("a stack", "unfactored"))], ["eager", "cpu"])
def test_a_tensor_of_many_chunks_steps_as_the_oracle_says(case: Case, backend: str) -> None:
    run = Run(case.grown(2**17), backend)
    for _ in range(2):
        assert_next_step_is_the_oracles(run)


@crossed(backends=["cpu"])
def test_the_number_of_threads_changes_no_bit(case: Case, backend: str, threads: Callable[[int], None]) -> None:
    large, ends = case.grown(2**17), []
    for count in (1, 2, 3):
        threads(count)
        ends.append(Run(large, backend).step(2).bits())
    for end in ends[1:]:
        assert_same(end, ends[0])


@crossed()
def test_a_saved_run_goes_on_to_the_same_bits(case: Case, backend: str) -> None:
    whole, stopped, file = Run(case, backend).step(2), Run(case, backend).step(2), io.BytesIO()
    torch.save([stopped.model.state_dict(), stopped.optimizer.state_dict()], file)
    resumed = Run(case, backend)
    weights, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(state)
    resumed.t = 2
    assert_same(resumed.step(2).bits(), whole.step(2).bits())


@crossed()
def test_a_copy_goes_on_to_the_same_bits_and_leaves_the_original_alone(case: Case, backend: str) -> None:
    run = Run(case, backend).step(2)
    before, twin, pickled = run.bits(), copy.deepcopy(run), pickle.dumps(run)
    twin.step(2)
    assert_same(run.bits(), before)
    assert_same(run.step(2).bits(), twin.bits())
    assert_same(pickle.loads(pickled).step(2).bits(), twin.bits())


@crossed()
@pytest.mark.filterwarnings("ignore:.*its gradient is not finite")
def test_a_gradient_that_is_not_finite_leaves_all_as_it_was(case: Case, backend: str) -> None:
    run, other = Run(case, backend).step(1), Run(case, backend).step(1)
    before = run.bits()
    for bad in NOT_FINITE.values():
        case.give(run.p, g := case.gradient(9))
        g[(-1,) * g.dim()] = bad
        run.optimizer.step()
        if not case.keywords.get("per_slice"):  # there, the other slices step
            assert_same(run.bits(), before)
    if not case.keywords.get("per_slice"):
        assert run.optimizer.report()[0].skipped == 2
        assert_same(run.step(2).bits(), other.step(2).bits())


@crossed()
def test_on_nonfinite_raise_changes_nothing(case: Case, backend: str) -> None:
    run = Run(case, backend, on_nonfinite="raise").step(1)
    before = run.bits()
    case.give(run.p, g := case.gradient(9))
    g[(0,) * g.dim()] = float("nan")
    with pytest.raises(FloatingPointError, match="weight"):
        run.optimizer.step()
    assert_same(run.bits(), before)
    assert_next_step_is_the_oracles(run)


@crossed([case for case in CASES if case.grad_dtype is None])
def test_a_step_inside_backward_has_the_same_bits(case: Case, backend: str) -> None:
    plain, within = Run(case, backend).step(3), Run(case, backend)
    with step_in_backward(within.model, within.optimizer):
        for t in range(1, 4):
            (within.p * case.gradient(t)).sum().backward()
            within.optimizer.step()
            assert within.p.grad is None
    assert_same(within.bits(), plain.bits())


@crossed()
def test_an_edited_weight_is_measured_before_the_step(case: Case, backend: str) -> None:
    run = Run(case, backend).step(2)
    with torch.no_grad():
        run.p.mul_(30)
    for _ in range(2):
        assert_next_step_is_the_oracles(run)


@crossed()
def test_an_edit_behind_torchs_back_is_known_after_one_step(case: Case, backend: str) -> None:
    run = Run(case, backend).step(2)
    run.p.data.mul_(30)
    run.step()
    for _ in range(2):
        assert_next_step_is_the_oracles(run)


@crossed([case for case in CASES if not case.keywords.get("per_slice")])
def test_the_report_says_what_the_step_did(case: Case, backend: str) -> None:
    run = Run(case, backend)
    for _ in range(2):
        (outcome,) = assert_next_step_is_the_oracles(run)
        (record,) = run.optimizer.report()
        np.testing.assert_allclose(record.rms_update, outcome.rms_update, 1e-6)
        np.testing.assert_allclose(record.step_size, outcome.step_size, 1e-6)
    assert (record.name, record.skipped) == ("weight", 0)


TWINS = [case for case in CASES if len(case.shape) == 2 and case.keywords.get("rounding") != "stochastic"]
MIRRORED = {"row": "column", "column": "row"}


@crossed([case for case in TWINS if case.keywords.get("momentum_dtype", "float32") == "float32"])
def test_the_step_of_the_transpose_is_the_transpose_of_the_step(case: Case, backend: str) -> None:
    run, other = Run(case, backend), Run(case, backend)
    factored = run.optimizer.param_groups[0]["factored"]
    turned = Parameter(other.p.detach().t().contiguous())
    mirrored = {**case.keywords, "factored": MIRRORED.get(factored, factored)}
    optimizer = replace(case, keywords=mirrored).optimizer([turned], backend)
    for t in range(1, 4):
        run.step()
        case.give(turned, case.gradient(t).t().contiguous())
        optimizer.step()
    far = (run.p.detach() - turned.detach().t()).abs().max()
    assert far <= 2 * torch.finfo(case.dtype).eps * run.p.detach().abs().max()


@crossed()
def test_without_a_gradient_nothing_changes(case: Case, backend: str) -> None:
    run = Run(case, backend).step(1)
    before, run.p.grad = run.bits(), None
    run.optimizer.step()
    assert_same(run.bits(), before)
    assert_next_step_is_the_oracles(run)


REFUSED = [(case, backend) for case in CASES for backend in case.left_to_eager if is_there(backend)]


@pytest.mark.parametrize(("case", "backend"), REFUSED, ids=[f"{case}-{backend}" for case, backend in REFUSED])
def test_what_is_left_to_eager_is_refused_by_name_before_anything_changes(case: Case, backend: str) -> None:
    run = Run(case, backend)
    before = run.bits()
    with pytest.raises(ValueError, match="cannot step weight"):
        run.step()
    assert_same(run.bits(), before)


AUTO = [(case, next(name for name in ("cpu", "eager") if name not in case.left_to_eager)) for case in CASES]


@pytest.mark.parametrize(("case", "backend"), AUTO, ids=[f"{case}-{backend}" for case, backend in AUTO])
def test_auto_takes_every_row(case: Case, backend: str) -> None:
    assert_same(Run(case, "auto").step(2).bits(), Run(case, backend).step(2).bits())


def test_every_keyword_has_a_row() -> None:
    asked = {name for case in CASES for name in case.keywords}
    optimizer = Adafactor([torch.ones(2, requires_grad=True)])
    keywords = set(optimizer.param_groups[0]) - {"params", "param_names"}
    assert keywords - asked <= {"on_nonfinite", "seed"}
