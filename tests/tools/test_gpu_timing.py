"""Times on a GPU: each pass of `adafactor check --bench`, and the benchmark's steps; a queue stands in for the card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adafactor.check import timing
from adafactor.check.timing import OURS, Times, note_launches
from adafactor.optimizer import Adafactor
from benchmarks import __main__ as benchmark
from benchmarks import contenders, machine, results, tables
from benchmarks.contenders import CONTENDERS, parameters
from benchmarks.machine import Card
from benchmarks.measure import Entry, extra_bytes_on, measure
from benchmarks.results import Measured, Results, Timing
from benchmarks.suites import SUITES
from tests.kernels import needs

needs.triton()
from adafactor.kernels import triton as backend  # noqa: E402
from adafactor.kernels.triton import executor as work  # noqa: E402

CPU = torch.device("cpu")


class Queue:
    """A device whose events tick: every call between two events takes a millisecond."""

    def __init__(self) -> None:
        """At noon."""
        self.now, self.waits, self.peak = 0.0, 0, 0
        self.held = 1000

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802, as in torch
        """An event that notes when it was recorded."""
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now)
        event.synchronize = lambda: None
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def work(self) -> None:
        """Take a millisecond, and for its length 300 bytes."""
        self.now += 1.0
        self.peak = max(self.peak, self.held + 300)

    def work_after(self, function: Any, *arguments: Any) -> None:
        """Call this, and take two milliseconds."""
        function(*arguments)
        self.work()
        self.work()

    def synchronize(self, device: torch.device) -> None:
        """Count how often the host waits."""
        self.waits += 1

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """From here on."""
        self.peak = self.held

    def memory_allocated(self, device: torch.device) -> int:
        """Of parameters, say."""
        return self.held

    def max_memory_allocated(self, device: torch.device) -> int:
        """Since the reset."""
        return self.peak

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Free, and in all."""
        return 7000, 8000

    def get_device_properties(self, device: torch.device) -> Any:
        """Of a small card."""
        return SimpleNamespace(name="Abacus 4090", total_memory=8000, L2_cache_size=100)


class SlowQueue(Queue):
    """A device on which an event takes a millisecond, too."""

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802, as in torch
        """An event that notes when it was recorded, and takes its time."""
        event = super().Event(enable_timing)

        def record() -> None:
            event.at = self.now
            self.work()

        event.record = record
        return event


# ---- each pass of our step


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let the backend prepare tensors on the CPU, with a launcher that does nothing."""
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.setattr(work, "launch", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield


def test_every_pass_is_timed_apart_in_every_variant(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = SlowQueue()

    def launch(kernel: Any, programs: int, arguments: Any, options: Any) -> None:
        for _ in range({"first_pass": 1, "fold": 2, "last_pass": 3, "begin_step": 4, "measure": 5}[kernel.__name__]):
            queue.work()

    def other(params: Any) -> Any:
        return SimpleNamespace(step=lambda: queue.work_after(lambda: None))

    monkeypatch.setattr(work, "launch", launch)
    monkeypatch.setattr(timing, "OTHERS", {"torch.optim.AdamW, fused": other})
    said: list[str] = []
    found = timing.measure(Adafactor, CPU, 3, said.append, columns=(64, 48), elements=8192, module=queue)
    assert [(t.variant, t.rows, t.columns) for t in found] == [
        (variant, rows, columns)
        for variant in ("float32", "bfloat16", "bfloat16, stochastic rounding")
        for rows, columns in ((128, 64), (170, 48))
    ]
    assert len(said) == 6 and said[-1] == "bfloat16, stochastic rounding, 48 columns"
    for times, size in zip(found, (4, 4, 2, 2, 2, 2), strict=True):
        assert not times.problems, times.problems
        elements = times.rows * times.columns
        assert {name: round(1e3 * value) for name, value in times.passes.items()} == {
            "begin step": 4 + 1,
            "measure": 5 + 1,
            "first pass": 1 + 1,
            "fold": 2 + 1,
            "last pass": 3 + 1,
        }
        one = size * elements
        assert times.bytes == {OURS: 4 * one, "first pass": one, "last pass": 3 * one}
        assert times.steps == {OURS: pytest.approx(26e-3), "torch.optim.AdamW, fused": pytest.approx(3e-3)}
        assert times.copy_bandwidth == pytest.approx(2 * size * elements / 1e-3)


def test_what_fails_while_it_is_timed_is_told_with_its_traceback_and_the_rest_goes_on(on_cpu: None) -> None:
    def fail(params: Any, **keywords: Any) -> Any:
        raise RuntimeError("ptxas: out of registers")

    found = timing.measure(fail, CPU, 1, lambda text: None, columns=(16,), elements=64, module=SlowQueue())
    assert [list(t.problems) for t in found] == [[OURS]] * 3
    assert all(not t.passes and list(t.steps) == list(timing.OTHERS) for t in found)
    text = timing.show(found, 1e12)
    assert f"{OURS}, bfloat16, 4×16:\nTraceback" in text and 'raise RuntimeError("ptxas: out of registers")' in text


def test_steps_beside_ours_are_those_of_real_optimizers(on_cpu: None) -> None:
    [found, *_] = timing.measure(Adafactor, CPU, 1, lambda text: None, columns=(16,), elements=64, module=SlowQueue())
    assert list(found.steps) == [OURS, "torch.optim.AdamW, fused", "torch.optim.Adafactor"] and not found.problems


def test_the_columns_are_those_that_people_train() -> None:
    assert timing.COLUMNS == (768, 2304, 4096, 5120, 28672)
    assert all(columns <= timing.ELEMENTS // 1000 for columns in timing.COLUMNS), "a matrix has many rows"


def test_a_card_without_a_nominal_bandwidth_is_compared_with_its_copy() -> None:
    assert timing.nominal_bandwidth(CPU) is None
    text = timing.show([Times("float32", 8, 4, 1e9, {OURS: 1e-3}, bytes={OURS: 500_000})], None)
    assert "share of a copy's speed" in text and "1.000  50 %" in text


def test_the_launcher_is_given_back(on_cpu: None) -> None:
    before = work.launch
    with pytest.raises(ZeroDivisionError), note_launches():
        assert work.launch is not before
        raise ZeroDivisionError
    assert work.launch is before


def test_the_block_for_an_issue_has_every_number() -> None:
    passes, least = {"first pass": 4e-4, "fold": 1e-5}, {"first pass": 200_000_000, OURS: 500_000_000}
    narrow = Times("float32", 2**17, 768, 0.8e12, {OURS: 1e-3, "torch.optim.AdamW, fused": 2e-3}, passes, least)
    wide = Times("float32", 2**15, 4096, 0.9e12, {OURS: 2e-3}, {"first pass": 8e-4}, least)
    assert timing.show([narrow, wide], 1e12).splitlines() == [
        "float32: ms, and share of the nominal 1,000 GB/s; matrices of about 128 M elements",
        "  columns                                768            4096",
        "  first pass                     0.400  50 %     0.800  25 %",
        "  fold                           0.010                     -",
        "  adafactor, triton              1.000  50 %     2.000  25 %",
        "  torch.optim.AdamW, fused       2.000                     -",
        "  a copy, GB/s                           800             900",
    ]


# ---- the benchmark on a card


def card(queue: Queue | None = None) -> Card:
    return Card(CPU, queue or Queue())


def test_events_give_the_mean_of_the_calls_between_them() -> None:
    queue = Queue()
    assert card(queue).seconds(queue.work, 4) == pytest.approx(1e-3)
    assert queue.now == 4.0 and queue.waits == 1, "the queue is empty before the first event"


def test_the_peak_is_what_comes_on_top() -> None:
    queue = Queue()
    assert card(queue).peak(queue.work) == 300
    assert card(queue).peak(lambda: None) == 0


def test_a_card_describes_itself_beside_the_machine() -> None:
    found = card().describe()
    assert found["card"] == "Abacus 4090" and found["card_cache_bytes"] == 100 and found["cores"] == machine.cores()
    assert card().available_bytes() == 7000


def test_a_step_is_measured_on_the_card_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    monkeypatch.setattr(machine, "COPIED", 4000)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: queue.work())
    entries = [Entry(CONTENDERS[key], "float32") for key in ("sgd", "adamw-fused")]
    for entry in entries:
        step = torch.optim.SGD.step if entry.contender.key == "sgd" else torch.optim.AdamW.step
        monkeypatch.setattr(
            torch.optim.SGD if entry.contender.key == "sgd" else torch.optim.AdamW,
            "step",
            lambda self, closure=None, step=step: queue.work_after(step, self),
        )
    found = measure(SUITES["tiny"], entries, 2, lambda text: None, card(queue))
    assert [t.median for t in found.timings] == [pytest.approx(2e-3)] * 2, "two milliseconds of the card's own clock"
    assert found.bandwidth == pytest.approx(2 * 4000 / 1e-3)


def test_extra_memory_is_that_of_the_third_step() -> None:
    queue = Queue()

    class Runner:
        steps = 0

        def step(self) -> None:
            self.steps += 1
            if self.steps <= 3:
                queue.work()

    contender = contenders.Contender("x", "x", "peer", lambda params: Runner())  # type: ignore[arg-type, return-value]
    assert extra_bytes_on(card(queue), contender, [(2, 3)], "float32") == 300


def test_contenders_are_those_of_the_device() -> None:
    on = {kind: {key for key, c in CONTENDERS.items() if kind in c.devices} for kind in ("cpu", "cuda")}
    kinds = ("", "-momentum", "-momentum-bfloat16", "-momentum-int8", "-stochastic")
    assert {"optax", *(f"cpu{kind}" for kind in kinds)} == on["cpu"] - on["cuda"]
    assert {f"triton{kind}" for kind in kinds} == on["cuda"] - on["cpu"]
    assert {"eager", "adamw-fused", "torch-foreach", "floor"} <= on["cpu"] & on["cuda"]


def test_results_of_a_card_say_so_and_have_no_targets() -> None:
    measured = Measured("a", "a", 1, 1000, True, 1e4, [Timing("adamw-fused", "float32", [1.0], 0, 0)])
    machine_ = {
        **machine.Processor().describe(),
        "card": "Abacus 4090",
        "card_memory_bytes": 8000,
        "card_cache_bytes": None,
    }
    results = Results(
        "python -m benchmarks --device cuda", machine_, {"torch": "2"}, 2, 3, suites=[measured], device="cuda:0"
    )
    text = tables.markdown(results)
    assert "Abacus 4090 (cuda:0)" in text and "by the device's own events" in text and "the targets" not in text


def test_parameters_are_made_where_they_are_asked_for() -> None:
    assert parameters([(2, 3)], "float32", device=CPU)[0].device == CPU
    assert torch.equal(parameters([(2, 3)], "float32")[0], parameters([(2, 3)], "float32", device=CPU)[0])


def test_the_benchmark_takes_its_clock_and_memory_from_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Elsewhere(Card):
        """A card that lends its name to tensors on the CPU."""

        def seconds(self, function: Any, repeats: int = 1) -> float:
            function()
            return 0.25

        def peak(self, function: Any) -> int:
            function()
            return 77

    there = Elsewhere(CPU, Queue())
    monkeypatch.setattr(machine, "find", lambda name: there)
    monkeypatch.setattr(contenders, "parameters", parameters_on_cpu)
    monkeypatch.setattr("benchmarks.measure.parameters", parameters_on_cpu)
    monkeypatch.setattr(machine.Copy, "__init__", lambda self, where: setattr(self, "machine", where))
    monkeypatch.setattr(machine.Copy, "bandwidth", lambda self: 1e9)
    right = results.Checked("sgd", "float32", 0.0, True)
    monkeypatch.setattr(benchmark, "check", lambda contender, dtype, device: right)
    there.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    words = ["--suite", "tiny", "--contender", "sgd", "--rounds", "2", "--device", "cuda", "--dtype", "float32"]
    assert benchmark.main([*words, "--output", str(tmp_path)]) == 0
    timing = results.load(tmp_path / "results.json").suites[0].timings[0]
    assert timing.seconds == [0.25, 0.25] and timing.extra_bytes == 77
    assert "Abacus 4090" in capsys.readouterr().out
    assert results.load(tmp_path / "results.json").command.endswith("--device cuda")


def parameters_on_cpu(shapes: Any, dtype: str, seed: int = 0, device: Any = None) -> Any:
    """Whatever device is asked for."""
    return parameters(shapes, dtype, seed)
