"""`adafactor check`, and a GPU's part of `adafactor bench`, with a stand-in for the card: there is none here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adafactor.bench import contenders, gpu_times, machine, memory, place, present, results
from adafactor.bench.contenders import CONTENDERS, parameters
from adafactor.bench.launches import Launches
from adafactor.bench.measure import Entry, measure
from adafactor.bench.results import Measured, Results, Timing
from adafactor.bench.suites import SUITES
from adafactor.check import gpu as gpu_check
from adafactor.cli import main
from tests.kernels import needs

needs.triton()
from adafactor.check import trial, verdict  # noqa: E402
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


def card(queue: Queue | None = None) -> place.Card:
    return place.Card(CPU, queue or Queue())


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
    assert memory.extra_bytes_on(card(queue), contender, [(2, 3)], "float32") == 300


def test_contenders_are_those_of_the_device() -> None:
    on = {kind: {key for key, c in CONTENDERS.items() if kind in c.devices} for kind in ("cpu", "cuda")}
    assert {"cpu", "cpu-momentum", "optax"} == on["cpu"] - on["cuda"]
    assert {"triton", "triton-momentum"} == on["cuda"] - on["cpu"]
    assert {"eager", "adamw-fused", "torch-foreach"} <= on["cpu"] & on["cuda"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "--device", "cuda"], "there is no cuda device here"),
        (["bench", "--device", "nonsense"], "not a device that torch knows"),
        (["bench", "--device", "meta"], "there are cpu, cuda"),
        (["bench", "--contender", "triton"], "triton cannot step tensors on cpu"),
        (["check"], "there is no GPU here that torch"),
        (["check", "--device", "cuda:3"], "there is no cuda device here"),
        (["check", "--device", "cpu"], "for the CPU with TRITON_INTERPRET=1"),
    ],
)
def test_without_a_gpu_one_sentence_says_so(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let the backend prepare tensors on the CPU, with a launcher that does nothing."""
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.setattr(work, "launch", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield


def test_every_launch_is_timed_apart(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()

    def launch(kernel: Any, programs: int, arguments: Any, options: Any) -> None:
        for _ in range({"first_pass": 1, "fold": 2, "last_pass": 3, "begin_step": 4, "measure": 5}[kernel.__name__]):
            queue.work()

    monkeypatch.setattr(work, "launch", launch)
    found = gpu_times.time_launches(card(queue), SUITES["tiny"], "float32", 3)
    # two kinds: tensors whose rows are a multiple of 16 and others; of each, rows of several lengths
    assert [x.name for x in found] == ["begin step", "measure", "first pass", "fold", "last pass"]
    assert [x.number for x in found if x.name != "first pass"] == [2] * 4
    each = {x.name: x.seconds / x.number for x in found}
    assert list(each.values()) == pytest.approx([4e-3, 5e-3, 1e-3, 2e-3, 3e-3])
    elements = SUITES["tiny"].parameters
    last = next(x for x in found if x.name == "last pass")
    assert 12 * elements < last.bytes < 14 * elements and last.bandwidth == pytest.approx(last.bytes / 6e-3)


def test_the_launcher_is_given_back(on_cpu: None) -> None:
    before = work.launch
    with pytest.raises(ZeroDivisionError), Launches():
        assert work.launch is not before
        raise ZeroDivisionError
    assert work.launch is before


def test_the_block_for_an_issue_has_every_figure() -> None:
    timings = [
        Timing("triton", "float32", [1e-3], 5000, None, None),
        Timing("adamw-fused", "float32", [2e-3], 8_000_000, None, None),
    ]
    measured = Measured("gpt2", "GPT-2 small", 148, 1_000_000, True, 1e12, timings)
    launches = [gpu_times.Launch("first pass", 2, 4e-4, 200_000_000), gpu_times.Launch("measure", 1, 1e-5, 0)]
    text = gpu_times.show([gpu_times.Times(measured, "float32", launches, {"torch-loop": "not installed"})])
    assert text.splitlines() == [
        "GPT-2 small, float32: 148 tensors, 1,000,000 parameters",
        "  a copy moves 1,000 GB/s",
        "  adafactor, triton                    1.00 ms   1.00 x  state 5.00 kB",
        "  torch.optim.AdamW, fused             2.00 ms   2.00 x  state 8.00 MB",
        "    first pass, 2 launches            0.400 ms      500 GB/s   50 % of a copy",
        "    measure                          0.0100 ms",
        "  torch.optim.Adafactor, loop: not installed",
    ]


def test_models_and_contenders_are_measured_and_those_that_cannot_run_are_named() -> None:
    queue = Queue()
    queue.work = lambda: None  # type: ignore[method-assign]
    real = place.Processor()
    stand_in = card(queue)
    stand_in.seconds = real.seconds  # type: ignore[method-assign]
    found = gpu_times.measure(stand_in, 1, lambda text: None, [(SUITES["tiny"], "float32")], ("triton", "adamw-fused"))
    assert [t.contender for t in found[0].measured.timings] == ["adamw-fused"] and not found[0].launches
    assert list(found[0].missing) == ["triton"]


def test_results_of_a_card_say_so_and_have_no_targets() -> None:
    measured = Measured("a", "a", 1, 1000, True, 1e4, [Timing("adamw-fused", "float32", [1.0], 0, 0, None)])
    machine_ = {**machine.describe(), "card": "Abacus 4090", "card_memory_bytes": 8000, "card_cache_bytes": None}
    results = Results(
        "adafactor bench --device cuda", machine_, {"torch": "2"}, 2, 3, suites=[measured], device="cuda:0"
    )
    text = present.markdown(results)
    assert "Abacus 4090 (cuda:0)" in text and "by the device's own events" in text and "the targets" not in text


# ---- the command


@pytest.fixture
def a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Pretend that there is a card, and note what is tried on it."""
    tried: list[Any] = []
    device = torch.device("cuda", 0)

    def examine(where: torch.device, sort: trial.Sort, forms: Any, cases: Any, tell: Any) -> list[trial.Finding]:
        assert where == device and forms == trial.FORMS and cases == trial.CASES
        tried.append(sort)
        return [trial.Finding(sort, "default", "9×7: X is off")] if sort.rounding == "kahan" else []

    monkeypatch.setattr(trial, "examine", examine)
    monkeypatch.setattr(gpu_check, "_device", lambda name: (device, card()))
    found = {"name": "Abacus", "capability": "8.9", "driver": "12", "torch": "2", "triton": "3", "adafactor": "0"}
    monkeypatch.setattr(verdict, "describe", lambda device: found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tried


def test_the_command_says_how_each_went_and_keeps_the_answers(
    a_card: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--only", "bfloat16"]) == 1
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ") and "default" not in line] == [
        "OFF" if sort.rounding == "kahan" else "ok" for sort in a_card
    ]
    assert out.startswith("adafactor 0, torch 2, triton 3; Abacus (cuda:0, 8.9, driver 12)") and "9×7: X is off" in out
    assert "1 things are off, in [bfloat16, kahan rounding, momentum of the update]" in out
    kept = verdict.read(verdict.describe(CPU))
    assert {name for name, answer in kept.items() if answer} == {"bfloat16, kahan rounding, momentum of the update"}
    assert len(kept) == len(a_card) == 4


def test_all_is_right(a_card: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--only", "float64"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("All is right")
    assert main(["check", "--only", "float7"]) == 2
    assert "there are float32; float32, momentum" in capsys.readouterr().err


def test_an_exception_is_shown_and_not_kept(
    a_card: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = trial.Finding(trial.Sort(), "default", "OSError: No space left on device", is_exception=True)
    monkeypatch.setattr(trial, "examine", lambda *_: [full])
    assert main(["check", "--only", "float64"]) == 1
    assert "No space left on device" in capsys.readouterr().out and not verdict.read(verdict.describe(CPU))


def test_json_has_what_was_checked_and_what_is_off(a_card: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--only", "bfloat16", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["name"] == "Abacus" and found["device"] == "cuda:0" and found["times"] == []
    assert found["checked"] == [str(sort) for sort in a_card]
    assert found["off"] == [
        {"sort": "bfloat16, kahan rounding, momentum of the update", "case": "default", "what": "9×7: X is off"}
    ]
    assert "1 things are off" in err


def test_a_missing_gpu_is_said_before_a_missing_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["check"]) == 2
    assert "there is no GPU here" in capsys.readouterr().err


def test_bench_adds_a_block(
    a_card: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_times, "measure", lambda card, rounds, tick: [rounds])
    monkeypatch.setattr(gpu_times, "show", lambda found: f"figures of {found[0]} rounds")
    assert main(["check", "--only", "float64", "--bench", "--rounds", "4"]) == 0
    block = capsys.readouterr().out.split("```")[1]
    assert "Abacus (cuda:0" in block and "All is right" in block and "figures of 4 rounds" in block


@pytest.mark.slow
def test_the_interpreter_is_called_by_its_name() -> None:
    code = (
        "from adafactor.bench import gpu_check\nfrom adafactor.kernels.triton import trial\n"
        "from adafactor.cli import main\n"
        "gpu_check.forms_for = lambda device: [trial.Form((3,))]; trial.CASES = trial.CASES[:1]\n"
        "raise SystemExit(main(['check', '--only', 'float64']))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert child.returncode == 0, child.stderr
    assert "in Triton's interpreter" in child.stdout and "ok  float64" in child.stdout
    assert child.stdout.splitlines()[-1] == "All is right, in the interpreter."


def test_parameters_are_made_where_they_are_asked_for() -> None:
    assert parameters([(2, 3)], "float32", device=CPU)[0].device == CPU
    assert torch.equal(parameters([(2, 3)], "float32")[0], parameters([(2, 3)], "float32", device=CPU)[0])


def test_the_benchmark_takes_its_clock_and_memory_from_the_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Elsewhere(place.Card):
        """A card that lends its name to tensors on the CPU."""

        def seconds(self, function: Any, repeats: int = 1) -> float:
            function()
            return 0.25

        def peak(self, function: Any) -> int:
            function()
            return 77

    there = Elsewhere(CPU, Queue())
    monkeypatch.setattr(place, "find", lambda name: there)
    monkeypatch.setattr(contenders, "parameters", parameters_on_cpu)
    monkeypatch.setattr("adafactor.bench.measure.parameters", parameters_on_cpu)
    monkeypatch.setattr("adafactor.bench.machine.Copy.__init__", lambda self, where: setattr(self, "place", where))
    monkeypatch.setattr("adafactor.bench.machine.Copy.bandwidth", lambda self: 1e9)
    right = results.Checked("sgd", "float32", 0.0, True)
    monkeypatch.setattr("adafactor.bench.check.check", lambda contender, dtype, device: right)
    there.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    words = ["--suite", "tiny", "--contender", "sgd", "--rounds", "2", "--device", "cuda", "--dtype", "float32"]
    assert main(["bench", *words, "--output", str(tmp_path)]) == 0
    timing = results.load(tmp_path / "results.json").suites[0].timings[0]
    assert timing.seconds == [0.25, 0.25] and timing.extra_bytes == 77
    assert "Abacus 4090" in capsys.readouterr().out
    assert results.load(tmp_path / "results.json").command.endswith("--device cuda")


def parameters_on_cpu(shapes: Any, dtype: str, seed: int = 0, device: Any = None) -> Any:
    """Whatever device is asked for."""
    return parameters(shapes, dtype, seed)
