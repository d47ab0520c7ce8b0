"""What holds of every step: each property once, for every row of `tests/cases.py`, on every backend that takes it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from adafactor import Adafactor, step_in_backward
from tests import inside
from tests.cases import BY_NAME, CASES, Case, Run, crossed, is_there
from tests.exact import assert_same

NOT_FINITE = {"NaN": float("nan"), "infinity": float("inf")}
SKIPS = pytest.mark.filterwarnings("ignore:.*its gradient is not finite")


@crossed(every=True)
def test_every_step_is_the_oracles(case: Case, backend: str) -> None:
    run = Run(case, backend)
    for _ in range(4):
        (outcome, *_) = run.check()
        assert outcome.taken and outcome.length > 0


@crossed([BY_NAME["the defaults"], BY_NAME["a stack"], BY_NAME["unfactored"]], ["eager", "cpu"])
def test_a_tensor_of_many_chunks_steps_as_the_oracle_says(case: Case, backend: str) -> None:
    run = Run(case.grown(2**17), backend)
    for _ in range(2):
        run.check()


@crossed(backends=["eager"])
def test_cut_into_chunks_a_row_still_steps_as_the_oracle_says(
    case: Case, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by the same random words, whose number is the element's place in the whole."""
    whole = Run(case, backend).step()
    inside.cut_into_chunks(monkeypatch, 24)
    run = Run(case, backend)
    for _ in range(3):
        run.check()
    assert_rounded_alike(Run(case, backend).step(), whole)


@crossed(backends=["eager"])
@SKIPS
def test_as_on_a_device_where_no_scalar_is_read_a_row_steps_as_the_oracle_says(
    case: Case, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.keep_scalars_on_the_device(monkeypatch)
    run = Run(case, backend)
    for t in range(4):
        g = case.gradient(t + 1)
        g[(-1,) * g.dim()] = float("nan") if t == 2 else 0.0
        run.check(g)
    assert sum(record.skipped for record in run.optimizer.report()) == 1


def assert_rounded_alike(run: Run, other: Run) -> None:
    """By the same random words: only where a word meets its number may they differ."""
    ours, theirs = run.bits(), other.bits()
    for key in ours.keys() - {"compensation"}:
        if ours[key].dtype in (torch.bfloat16, torch.float16, torch.int8):
            assert (ours[key] != theirs[key]).double().mean() <= 0.002, key


@crossed(
    [case for case in CASES if case.dtype.itemsize == 2 or "momentum_dtype" in case.keywords],
    inside.COMPILED,
    every=True,
)
def test_a_compiled_step_rounds_as_eager_pytorch_does(case: Case, backend: str) -> None:
    large = case.grown(2**14)
    eager = Run(large, "eager").step()
    assert_rounded_alike(Run(large, backend).step(), eager)


@crossed(backends=["cpu"])
def test_the_number_of_threads_changes_no_bit(case: Case, backend: str, threads: Callable[[int], None]) -> None:
    large, ends = case.grown(2**17), []
    for count in (1, 2, 8):  # more than there are cores
        threads(count)
        ends.append(Run(large, backend).step(2).bits())
    for end in ends[1:]:
        assert_same(end, ends[0])


@crossed(backends=["cpu"])
def test_what_a_step_leaves_to_the_next_is_what_that_would_find(case: Case, backend: str) -> None:
    """ΣX² to the bit, so that a run that was loaded goes on as if it had not stopped."""
    large = case.grown(2**15)
    kept, anew = Run(large, backend), Run(large, backend)
    for _ in range(4):
        inside.forget(anew.optimizer)
        assert_same(anew.step().bits(), kept.step().bits())


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
@SKIPS
def test_a_gradient_that_is_not_finite_leaves_all_as_it_was(case: Case, backend: str) -> None:
    run, other = Run(case, backend).step(1), Run(case, backend).step(1)
    for bad in NOT_FINITE.values():
        g = case.gradient(9)
        g[(-1,) * g.dim()] = bad
        run.check(g)
    if not case.keywords.get("per_slice"):  # there, the other slices step
        assert run.optimizer.report()[0].skipped == 2
        run.t = 1
        assert_same(run.step(2).bits(), other.step(2).bits())


@crossed()
def test_on_nonfinite_raise_changes_nothing(case: Case, backend: str) -> None:
    run = Run(case, backend, on_nonfinite="raise").step(2)
    before = run.bits()
    assert_same(before, Run(case, backend).step(2).bits())  # a step that stops to look is the whole step
    case.give(run.p, g := case.gradient(9))
    g[(0,) * g.dim()] = float("nan")
    with pytest.raises(FloatingPointError, match="weight"):
        run.optimizer.step()
    assert_same(run.bits(), before)
    run.check()


@crossed()
def test_on_nonfinite_ignore_lets_it_through(case: Case, backend: str) -> None:
    run = Run(case, backend, on_nonfinite="ignore")
    run.check()
    case.give(run.p, g := case.gradient(9))
    g[(0,) * g.dim()] = float("nan")
    run.optimizer.step()
    assert run.p.isnan().any()


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
def test_autograd_is_told_that_the_weight_was_written(case: Case, backend: str) -> None:
    run = Run(case, backend).step(1)
    loss = (run.p * run.p).sum()  # which keeps the weight for its gradient
    run.step(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@crossed()
def test_an_edited_weight_is_measured_before_the_step(case: Case, backend: str) -> None:
    run = Run(case, backend).step(2)
    with torch.no_grad():
        run.p.mul_(30)
    for _ in range(2):
        run.check()


@crossed()
def test_an_edit_behind_torchs_back_is_known_after_one_step(case: Case, backend: str) -> None:
    run = Run(case, backend).step(2)
    run.p.data.mul_(30)
    run.step()
    for _ in range(2):
        run.check()


@crossed([BY_NAME["the defaults"]])
@pytest.mark.parametrize("is_as_on_a_device", [False, True])
@SKIPS
def test_the_report_is_of_the_last_step_that_was_taken(
    case: Case, backend: str, is_as_on_a_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a parameter that never had a gradient comes in, and with that all is prepared anew."""
    if is_as_on_a_device:
        inside.keep_scalars_on_the_device(monkeypatch)
    run, other = Run(case, backend).step(1), Parameter(torch.ones(3))
    run.optimizer.add_param_group({"params": [("other", other)]})
    before, *_ = run.optimizer.report()
    other.grad, run.p.grad = torch.ones(3), torch.full_like(run.p, float("nan"))
    run.optimizer.step()
    after, *_ = run.optimizer.report()
    assert after == replace(before, skipped=1)


@crossed([case for case in CASES if not case.keywords.get("per_slice")])
def test_the_report_says_what_the_step_did(case: Case, backend: str) -> None:
    run = Run(case, backend)
    for _ in range(2):
        (outcome,) = run.check()
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


@crossed([case for case in CASES if len(case.shape) == 2 and case.order is None], ["eager", "cpu"])
def test_a_stack_steps_per_slice_as_its_slices_would_alone(case: Case, backend: str) -> None:
    """To the bit, random words included: a slice counts as a parameter."""
    starts = [case.start().detach() * (i + 1) for i in range(3)]
    stack = Run(case, backend, torch.stack(starts), per_slice=True)
    alone = [Parameter(x) for x in starts]
    optimizer = case.optimizer(alone, backend)
    for t in range(3):
        grads = [case.gradient(3 * t + i) for i in range(3)]
        for p, g in zip([stack.p, *alone], [torch.stack(grads), *grads], strict=True):
            case.give(p, g)
        stack.optimizer.step()
        optimizer.step()
    for i, p in enumerate(alone):
        assert_same({"X": stack.p.detach()[i], **{key: v[i] for key, v in stack.state.items()}},
                    {"X": p.detach(), **optimizer.state[p]})  # fmt: skip


@crossed()
def test_without_a_gradient_nothing_changes(case: Case, backend: str) -> None:
    run = Run(case, backend).step(1)
    before, version, run.p.grad = run.bits(), run.p._version, None
    run.optimizer.step()
    assert_same(run.bits(), before)
    assert run.p._version == version  # so autograd may still use what it has kept of the weight
    run.check()


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
    assert keywords - asked <= {"on_nonfinite"}
