"""The self-test on the user's card finds what is wrong. No test here needs a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from tests.kernels import needs

needs.triton()
from adafactor.check import selftest, selftest_cache  # noqa: E402
from adafactor.check.selftest import BF16, CASES, FP16, FP32, FP64, GRAPH, TENSORS, VARIANTS, TensorSpec, Variant  # noqa: E402
from adafactor.core.momentum import key  # noqa: E402
from adafactor.kernels import triton as backend  # noqa: E402

CPU = torch.device("cpu")
SMALL = (
    TensorSpec((9, 7)),
    TensorSpec((6, 5), "transposed"),
    TensorSpec((4, 3, 3, 3), "channels last"),
    TensorSpec((11,)),
    TensorSpec(()),
)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend say of tensors on the CPU what it would say on a card."""
    monkeypatch.setattr(backend, "INTERPRETED", True)


class Mistaken(selftest.Training):
    """Eager PyTorch in the place of Triton, with a mistake."""

    made = 0

    def __init__(self, data: selftest.Data, backend: str, **keywords: Any):
        """Remember which of the runs it is."""
        self.is_ours = backend == "triton"
        type(self).made += self.is_ours
        self.number = type(self).made
        super().__init__(data, "eager", **keywords)

    def step(self, grads: Any, scale: float = 1.0) -> None:
        """Step, and make the mistake."""
        before = self.snapshot()
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
        if int(state["step"]) == selftest.STEPS:  # too late to show in X
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


def findings(patch: pytest.MonkeyPatch, kind: type[selftest.Training], variant: Variant, *names: str) -> list[str]:
    patch.setattr(selftest, "Training", kind)
    cases = {name: CASES[name] for name in names} or None
    return [str(found) for found in selftest.examine(Adafactor, CPU, variant, SMALL, cases)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nothing_is_found_where_nothing_is_wrong(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(monkeypatch, Mistaken, variant) == []


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
def test_a_mistake_is_found(kind: type[selftest.Training], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(monkeypatch, kind, Variant(), "default")
    assert found and found[0].startswith(said), found


@pytest.mark.parametrize(
    ("kind", "tensor", "details"),
    [
        (Shifted, "6×5 transposed", r"X\[1, 1\] is -?[\d.]+, not -?[\d.]+; computed in the last pass"),
        (OneBit, "9×7", r"row\[0\] is [\d.]+, not [\d.]+; computed in the first pass"),
        (Forgetful, "11", r"full\[0\] is [\d.e-]+, not [\d.e-]+; computed in the last pass"),
        (Broken, "", r"(?s)Traceback.*raise RuntimeError\(.*ptxas: out of registers\nand much more"),
    ],
)
def test_a_finding_says_what_it_takes_to_mend_it_from_afar(
    kind: type[selftest.Training], tensor: str, details: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "Training", kind)
    finding = selftest.examine(Adafactor, CPU, Variant(), SMALL, {"default": CASES["default"]})[0]
    assert finding.tensor == tensor and re.fullmatch(details, finding.details), finding.details


def test_a_bad_gradient_that_moves_a_statistic_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(monkeypatch, Careless, Variant(), "gradients with NaN and infinity")
    assert found and found[0] == "float32, gradients with NaN and infinity: 9×7: row changed", found


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_momentum_may_be_rounded_either_way_but_seldom(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Border(Mistaken):
        """Some numbers are rounded to the other side in one step."""

        some = 1

        def err(self, before: list[dict[str, Tensor]]) -> None:
            """In the only tensor."""
            state = self.optimizer.state[self.params[0]]
            if int(state["step"]) == 2:
                t = state[key("update", is_int8=dtype == "int8")].view(-1)[: self.some]
                t.copy_(t * (1 + 2.0**-7) if dtype == "bfloat16" else t - t.sign())

    def found() -> list[selftest.Finding]:
        cases = {"default": CASES["default"]}
        return selftest.examine(Adafactor, CPU, variant, [TensorSpec((32, 256))], cases)

    variant = Variant(momentum_of="update", momentum_dtype=dtype)
    monkeypatch.setattr(selftest, "Training", Border)
    assert found() == []
    Border.some = 100
    assert found()


def test_what_triton_leaves_to_eager_pytorch_is_rounded_in_a_way_that_it_has() -> None:
    params = [torch.nn.Parameter(spec.copy(torch.ones(spec.shape, dtype=BF16))) for spec in TENSORS]
    for p in params:
        p.grad = torch.ones_like(p)
    int8: dict[str, Any] = {"beta1": 0.9, "momentum_dtype": "int8"}
    (everything,) = selftest.grouped(params, int8)
    assert everything["params"] == params
    by_rows, others = selftest.grouped(params, {**int8, "factored": False})
    assert len(by_rows["params"]) + 2 == len(params) and others["momentum_dtype"] == "float32"
    optimizer = Adafactor([by_rows, others], **int8, factored=False)
    assert sum("momentum_scale" in optimizer.state[p] for p in params) == 5
    (everything,) = selftest.grouped(params, {"rounding": "stochastic"})
    assert everything["params"] == params
    even, uneven = selftest.grouped(params, {"rounding": "stochastic", "factored": False})
    assert len(uneven["params"]) == 3 and uneven["rounding"] == "nearest"


@pytest.mark.parametrize("variant", [Variant(BF16, BF16), Variant(FP16, FP16, "update", "stochastic")], ids=str)
def test_sixteen_bits_may_be_rounded_either_way_but_seldom(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    class Border(Mistaken):
        """Some elements are rounded to the other side in one step."""

        some = 1

        def err(self, before: list[dict[str, Tensor]]) -> None:
            """In the first tensor."""
            if int(self.optimizer.state[self.params[0]]["step"]) == 3:
                flat = self.params[0].data.view(-1)
                flat[: self.some] = torch.nextafter(flat[: self.some], torch.tensor(float("inf"), dtype=variant.x))

    assert findings(monkeypatch, Border, variant, "default") == []
    Border.some = 20
    assert findings(monkeypatch, Border, variant, "default")


class Graphs:
    """Stands in for torch.cuda: what is stepped while it captures does not happen, and happens with every replay."""

    def __init__(self, patch: pytest.MonkeyPatch, forgets: str = ""):
        """Take the place of what the self-test uses; what the graph `forgets` stays as it was when captured."""
        self.trainings: list[Any] = []
        graphs, self.replays = self, 0

        class Noted(Mistaken):
            def __init__(self, data: selftest.Data, backend: str, **keywords: Any):
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
            before = ours.snapshot()
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
        patch.setattr(selftest, "Training", Noted)


@pytest.mark.parametrize(("forgets", "right"), [("", True), ("lr", False)])
def test_a_replay_is_compared_with_steps_that_are_not_captured(
    forgets: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs(monkeypatch, forgets)
    with torch.no_grad():
        compared = selftest.replay(selftest.Data(Adafactor, CPU, Variant(), SMALL))
        found = [wrong for _, wrong in compared if wrong]
    assert graphs.replays == selftest.STEPS
    assert (found == []) is right and (right or "X changed when replayed" in found[0][0]), found


def test_the_battery_has_every_dtype_shape_and_setting_of_the_backend() -> None:
    assert {variant.x for variant in VARIANTS} == {BF16, FP16, FP32, FP64} and any(
        variant.x != variant.g for variant in VARIANTS
    )
    assert {variant.rounding for variant in VARIANTS} == {"nearest", "stochastic", "kahan"}
    assert {variant.momentum_of for variant in VARIANTS} == {None, "update", "gradient", "direction"}
    assert {variant.momentum_dtype for variant in VARIANTS} == {"float32", "bfloat16", "int8"}
    assert len({str(variant) for variant in VARIANTS}) == len(VARIANTS), "answers are kept by name"
    assert {len(spec.shape) for spec in TENSORS} == {0, 1, 2, 3, 4}
    assert {spec.storage for spec in TENSORS} == {"", "transposed", "channels last"}
    longest = [spec.shape[-1] for spec in TENSORS if len(spec.shape) == 2]
    assert any(4096 < m <= 8192 or 8192 < m <= 16384 for m in longest) and max(longest) > 16384
    keywords: dict[str, set[Any]] = {}
    for case in CASES.values():
        for name, value in case.keywords["keywords"].items() if isinstance(case, partial) else ():
            keywords.setdefault(name, set()).add(value)
    assert keywords["factored"] == {"row", "column", False} and keywords["clip"] == {None}
    assert keywords["relative"] == {False} and keywords["maximize"] == {True} and keywords["weight_decay"]


def test_no_random_number_of_torchs_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    findings(monkeypatch, Mistaken, Variant(BF16, BF16, None, "stochastic"), "default")
    assert torch.equal(before, torch.get_rng_state())


def test_a_card_that_cannot_capture_graphs_is_used_for_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: selftest.Data) -> selftest.Comparisons:
        raise RuntimeError("operation not permitted when stream is capturing")

    def differ(data: selftest.Data) -> selftest.Comparisons:
        yield SMALL[0], ("X changed when replayed", "")

    assert CASES[GRAPH] is selftest.replay and GRAPH in selftest.cases_of(torch.device("cuda"))
    assert GRAPH not in selftest.cases_of(CPU)
    monkeypatch.setattr(selftest, "Training", Mistaken)
    found = selftest.examine(Adafactor, CPU, Variant(), SMALL, {"default": CASES["default"], GRAPH: fail})
    assert [str(finding) for finding in found] == [
        "float32, captured in a graph: RuntimeError: operation not permitted when stream is capturing"
    ]
    assert selftest_cache.sum_up(found) is None, "whoever captures gets an exception"
    found = selftest.examine(Adafactor, CPU, Variant(), SMALL, {GRAPH: differ})
    assert selftest_cache.sum_up(found), "but not for wrong numbers"
