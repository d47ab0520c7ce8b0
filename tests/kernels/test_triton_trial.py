"""The trial on the user's card finds what is wrong. No test here needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import needs

needs.triton()
from adafactor.check.trial import BF16, CASES, FORMS, FP16, FP32, FP64, SORTS, Case, Form, Sort  # noqa: E402

from adafactor.check import trial, verdict  # noqa: E402

CPU = torch.device("cpu")
SMALL = (Form((9, 7)), Form((6, 5), "transposed"), Form((4, 3, 3, 3), "channels last"), Form((11,)), Form(()))


class Mistaken(trial.Training):
    """Plain torch in the place of Triton, with a mistake."""

    made = 0

    def __init__(self, data: trial.Data, backend: str, **keywords: Any):
        """Remember which of the runs it is."""
        self.is_ours = backend == "triton"
        type(self).made += self.is_ours
        self.number = type(self).made
        super().__init__(data, "eager", **keywords)

    def step(self, grads: Any, scale: float = 1.0) -> None:
        """Step, and make the mistake."""
        before = self.held()
        super().step(grads, scale)
        if self.is_ours:
            self.err(before)

    def err(self, before: list[dict[str, Tensor]]) -> None:
        """Make none."""


class Shifted(Mistaken):
    """One element is off by a thousandth of a step."""

    def err(self, before: list[dict[str, Tensor]]) -> None:
        """In the second tensor."""
        p, was = self.params[1].data, before[1]["X"]
        p[1, 1] += 2e-3 * (p - was).abs().max().item()


class OneBit(Mistaken):
    """The second run differs in the last bit of a statistic."""

    def err(self, before: list[dict[str, Tensor]]) -> None:
        """In the first tensor."""
        row = self.optimizer.state[self.params[0]]["row"]
        if self.number % 2 == 0:
            row[0] = torch.nextafter(row[0], row[0] * 2)


class Forgetful(Mistaken):
    """A statistic is not kept."""

    def err(self, before: list[dict[str, Tensor]]) -> None:
        """In the vector."""
        state = self.optimizer.state[self.params[3]]
        if int(state["step"]) == trial.STEPS:  # too late to show in X
            state["full"].mul_(1.01)


class Late(Mistaken):
    """A step is counted twice."""

    def err(self, before: list[dict[str, Tensor]]) -> None:
        """Of a scalar."""
        self.optimizer.state[self.params[4]]["step"].add_(1)


class Ugly(Mistaken):
    """X becomes NaN."""

    def err(self, before: list[dict[str, Tensor]]) -> None:
        """In one place."""
        self.params[0].data[0, 0] = float("nan")


class Careless(Mistaken):
    """A bad gradient moves the statistics."""

    def err(self, before: list[dict[str, Tensor]]) -> None:
        """Where nothing else has changed."""
        for p, was in zip(self.params, before, strict=True):
            if torch.equal(p, was["X"]) and "row" in was:
                self.optimizer.state[p]["row"].mul_(1 + 1e-6)


class Broken(Mistaken):
    """A kernel does not compile."""

    def err(self, before: list[dict[str, Tensor]]) -> None:
        """At once."""
        raise RuntimeError("ptxas: out of registers\nand much more")


def findings(patch: pytest.MonkeyPatch, kind: type[trial.Training], sort: Sort, *cases: Case) -> list[str]:
    patch.setattr(trial, "Training", kind)
    return [str(found) for found in trial.examine(CPU, sort, SMALL, cases or CASES)]


@pytest.mark.parametrize("sort", SORTS, ids=str)
def test_nothing_is_found_where_nothing_is_wrong(sort: Sort, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(monkeypatch, Mistaken, sort) == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Shifted, "float32, default: 6×5 transposed: X is off by 2e-03 of the distance travelled, in 1 of 30 elements"),
        (OneBit, "float32, default: 9×7: row changed from one run to the next"),
        (Forgetful, "float32, default: 11: state 'full' is off by"),
        (Late, "float32, default: a scalar: t is 6, not 3"),
        (Ugly, "float32, default: 9×7: X is off by inf"),
        (Broken, "float32, default: RuntimeError: ptxas: out of registers"),
    ],
)
def test_a_mistake_is_found(kind: type[trial.Training], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(monkeypatch, kind, Sort(), Case("default"))
    assert found and found[0].startswith(said), found


def test_a_bad_gradient_that_moves_a_statistic_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(monkeypatch, Careless, Sort(), CASES[-1])
    assert found and found[0] == "float32, gradients with NaN and infinity: 9×7: row changed", found


@pytest.mark.parametrize("sort", [Sort(BF16, BF16), Sort(FP16, FP16, "update", "stochastic")], ids=str)
def test_sixteen_bits_may_be_rounded_either_way_but_seldom(sort: Sort, monkeypatch: pytest.MonkeyPatch) -> None:
    class Border(Mistaken):
        """Some elements are rounded to the other side in one step."""

        some = 1

        def err(self, before: list[dict[str, Tensor]]) -> None:
            """In the first tensor."""
            if int(self.optimizer.state[self.params[0]]["step"]) == 3:
                flat = self.params[0].data.view(-1)
                flat[: self.some] = torch.nextafter(flat[: self.some], torch.tensor(float("inf"), dtype=sort.x))

    assert findings(monkeypatch, Border, sort, Case("default")) == []
    Border.some = 20
    assert findings(monkeypatch, Border, sort, Case("default"))


class Graphs:
    """Stands in for torch.cuda: what is stepped while it captures does not happen, and happens with every replay."""

    def __init__(self, patch: pytest.MonkeyPatch, forgets: str = ""):
        """Take the place of what the trial uses; what the graph `forgets` stays as it was when captured."""
        self.trainings: list[Any] = []
        graphs, self.replays = self, 0

        class Noted(Mistaken):
            def __init__(self, data: trial.Data, backend: str, **keywords: Any):
                super().__init__(data, backend, **keywords)
                graphs.trainings.append(self)

        class Graph:
            def replay(self) -> None:
                graphs.replays += 1
                ours = graphs.trainings[0]
                if forgets == "lr":
                    ours.optimizer.param_groups[0]["lr"] = torch.full((), 1e-2)
                ours.optimizer.step()

        @contextmanager
        def capture(graph: Graph, capture_error_mode: str) -> Iterator[None]:
            ours = graphs.trainings[0]
            before = ours.held()
            yield
            for p, was in zip(ours.params, before, strict=True):
                p.copy_(was.pop("X"))
                for name, value in was.items():
                    ours.optimizer.state[p][name].copy_(value)

        stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
        for name, value in {
            "Stream": lambda device: stream,
            "CUDAGraph": Graph,
            "device": lambda device: nullcontext(),
            "current_stream": lambda: stream,
            "stream": lambda stream: nullcontext(),
            "graph": capture,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(trial, "Training", Noted)


@pytest.mark.parametrize(("forgets", "right"), [("", True), ("lr", False)])
def test_a_replay_is_compared_with_steps_that_are_not_captured(
    forgets: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs(monkeypatch, forgets)
    with torch.no_grad():
        found = list(trial._replayed(trial.Data.make(CPU, Sort(), SMALL)))
    assert graphs.replays == trial.STEPS
    assert (found == []) is right and (right or "X changed when replayed" in found[0]), found


def test_the_battery_has_every_dtype_shape_and_setting_of_the_backend() -> None:
    assert {sort.x for sort in SORTS} == {BF16, FP16, FP32, FP64} and any(sort.x != sort.g for sort in SORTS)
    assert {sort.rounding for sort in SORTS} == {"nearest", "stochastic", "kahan"}
    assert {sort.momentum_of for sort in SORTS} == {None, "update", "gradient"}
    assert len({str(sort) for sort in SORTS}) == len(SORTS), "answers are kept by name"
    assert {len(form.shape) for form in FORMS} == {0, 1, 2, 3, 4}
    assert {form.storage for form in FORMS} == {"", "transposed", "channels last"}
    longest = [form.shape[-1] for form in FORMS if len(form.shape) == 2]
    assert any(4096 < m <= 8192 or 8192 < m <= 16384 for m in longest) and max(longest) > 16384
    keywords: dict[str, set[Any]] = {}
    for case in CASES:
        for name, value in case.keywords.items():
            keywords.setdefault(name, set()).add(value)
    assert keywords["factored"] == {"row", "column", False} and keywords["clip"] == {None}
    assert keywords["relative"] == {False} and keywords["maximize"] == {True} and keywords["weight_decay"]


def test_no_random_number_of_torchs_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    findings(monkeypatch, Mistaken, Sort(BF16, BF16, None, "stochastic"), CASES[0])
    assert torch.equal(before, torch.get_rng_state())


def test_a_card_that_cannot_capture_graphs_is_used_for_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: trial.Data) -> list[str]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(trial, "HAS_GRAPHS", ("cpu",))
    monkeypatch.setattr(trial, "_replayed", fail)
    monkeypatch.setattr(trial, "Training", Mistaken)
    found = trial.examine(CPU, Sort(), SMALL, CASES[:1])
    assert [str(finding) for finding in found] == [
        "float32, captured in a graph: RuntimeError: operation not permitted when stream is capturing"
    ]
    assert verdict.sum_up(found) is None, "whoever captures is told by an exception"
    monkeypatch.setattr(trial, "_replayed", lambda data: ["9×7: X changed when replayed"])
    assert verdict.sum_up(trial.examine(CPU, Sort(), SMALL, CASES[:1])), "but not of wrong numbers"
