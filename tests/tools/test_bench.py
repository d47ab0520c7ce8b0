"""The benchmark measures what it says it does. No test here looks at how long anything takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contenders, correctness, results, suites, tables
from benchmarks.__main__ import main
from benchmarks.contenders import CONTENDERS, Contender, FloorRunner, TorchRunner
from benchmarks.machine import PEAK
from benchmarks.measure import Entry, extra_bytes, measure
from benchmarks.results import Checked, Measured, Ratio, Results, Timing, targets

ROOT = Path(__file__).parents[2]
MACHINE = {
    "processor": "abacus",
    "cores": 2,
    "cache_bytes": None,
    "memory_bytes": None,
    "system": "none",
    "python": "3",
}
ALLOCATED = 64 << 20


class InvertedClip(torch.optim.Optimizer):
    """Algorithm 5 that divides by min(1, RMS(U)/d): two implementations have shipped this."""

    def __init__(self, params: list[torch.nn.Parameter]):
        """No options."""
        super().__init__(params, {})
        self.t = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Whole second moments, for every shape."""
        self.t += 1
        for p in self.param_groups[0]["params"]:
            v = self.state[p].setdefault("v", torch.zeros_like(p))
            v.lerp_(p.grad.square() + 1e-30, self.t**-0.8)
            u = p.grad / v.sqrt()
            alpha = max(1e-3, float(p.square().mean().sqrt())) * min(1e-2, self.t**-0.5)
            p.sub_(alpha * u / self.clip(u.square().mean().sqrt()))

    @staticmethod
    def clip(rms: torch.Tensor) -> torch.Tensor:
        """The wrong way round."""
        return rms.clamp(max=1.0)


class RightClip(InvertedClip):
    """The control: the same with max(1, RMS(U)/d)."""

    @staticmethod
    def clip(rms: torch.Tensor) -> torch.Tensor:
        """As in the paper."""
        return rms.clamp(min=1.0)


class Hungry(torch.optim.SGD):
    """Takes a known amount of memory for the length of a step."""

    def step(self, closure: Any = None) -> Any:
        """Touch every page, then forget it."""
        torch.ones(ALLOCATED // 4).sum()
        return super().step(closure)


def whole(x: Any, grads: Any, unit: float) -> Any:
    """Algorithm 5 for tensors of any shape."""
    flat = correctness.Factored()(x.reshape(-1), [g.reshape(-1) for g in grads], unit)
    return flat.reshape(x.shape)


def measured(name: str, large: bool = True, **medians: float) -> Measured:
    """A suite of 1000 parameters with these medians; a key that ends in _bf16 is in bfloat16."""
    timings = []
    for key, median in medians.items():
        dtype = "bfloat16" if key.endswith("_bf16") else "float32"
        timings.append(Timing(key.removesuffix("_bf16").replace("_", "-"), dtype, [median] * 3, 0, 10))
    return Measured(name, name, 1, 1000, large, 1e4, timings)


def example() -> Results:
    """Round numbers."""
    first = measured("a", cpu=1.0, adamw_fused=2.0, timm=8.0, torch_loop=4.0, cpu_momentum=2.0, floor=0.6)
    second = measured("b", False, cpu=2.0, adamw_fused=1.0, timm=64.0, torch_loop=2.0, cpu_bf16=1.0, adamw_fused_bf16=2)
    checks = [Checked("timm", "float32", 1e-6, True), Checked("torch-loop", "float32", 0.3, False)]
    sizes = [measured("10M", cpu=1.0), replace(measured("1B", cpu=150.0), parameters=100_000)]
    return Results(
        "python -m benchmarks", MACHINE, {"torch": "2"}, 2, 3, {"x": "not installed"}, checks, [first, second], sizes
    )


@pytest.mark.parametrize("key", [key for key in correctness.FORMULAS if "cpu" in CONTENDERS[key].devices])
def test_every_installed_contender_does_what_its_formula_says(key: str) -> None:
    contender = CONTENDERS[key]
    for dtype in contender.dtypes:
        if reason := contenders.why_not(contender, dtype):
            pytest.skip(reason)
        found = correctness.check(contender, dtype)
        assert found.correct, found


def test_the_check_tells_an_inverted_clip_from_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(correctness.FORMULAS, "x", whole)

    def is_right(kind: Callable[..., torch.optim.Optimizer]) -> bool | None:
        return correctness.check(Contender("x", "x", "peer", lambda p: TorchRunner(p, kind(p))), "float32").correct

    assert is_right(RightClip) is True
    assert is_right(InvertedClip) is False


def test_an_optimizer_without_a_formula_is_not_judged() -> None:
    assert correctness.check(contenders.find("torch.optim:Adagrad"), "float32").correct is None


def test_every_contender_is_measured_in_every_round() -> None:
    entries = [Entry(CONTENDERS[key], "float32") for key in ("sgd", "adamw-fused", "eager")]
    said: list[str] = []
    found = measure(suites.SUITES["tiny"], entries, 2, said.append)
    assert [t.contender for t in found.timings] == ["sgd", "adamw-fused", "eager"]
    assert all(len(t.seconds) == 2 and min(t.seconds) > 0 for t in found.timings)
    assert found.bandwidth > 0 and len(said) == len(entries) + 2, "a line for each contender and each round"
    numbers = suites.SUITES["tiny"].parameters
    assert found.timings[0].state_bytes == 0 and found.timings[1].state_bytes == 8 * numbers + 4 * 4


def test_the_ratios_are_those_of_known_numbers() -> None:
    found = {t.text: t.value for t in targets(example())}
    assert found == {
        "time of fused AdamW, geometric mean": pytest.approx(1.0),  # 1/2 and 2
        "time of fused AdamW, worst suite": 2.0,
        "the same with momentum, geometric mean": pytest.approx(1.0),
        "the same in bfloat16, geometric mean": pytest.approx(0.5),
        # torch-loop is faster, but wrong
        "faster than the fastest correct other Adafactor, geometric mean": pytest.approx(16.0),  # 8 and 32
        "faster than the fastest correct other Adafactor, worst suite": 8.0,
        "extra memory in a step, of the parameters' bytes, worst large suite": 10 / 4000,
        "of the speed that memory allows, worst large suite": pytest.approx(0.6),  # the floor took 0.6 of 1 s
        "cost of a parameter at 1 B against 10 M": pytest.approx(1.5),
    }


def test_a_target_is_met_up_to_its_bound_and_open_where_nothing_was_measured() -> None:
    met = {t.text: t.met for t in targets(example())}
    assert met["time of fused AdamW, worst suite"] is False
    assert met["faster than the fastest correct other Adafactor, worst suite"] is True
    empty = targets(replace(example(), suites=[], cost=[]))
    assert [t.met for t in empty] == [None] * len(empty)


def test_the_floor_reads_and_writes_every_byte_that_a_step_must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "PIECE", 4000)
    for dtype, words in (("float32", [5000, 3016]), ("bfloat16", [4004, 4])):
        params = contenders.parameters([(100, 50), (8,), (60, 50), (8,)], dtype)
        floor = FloorRunner(params, momentum=torch.int8 if dtype == "bfloat16" else torch.float32)
        # tensors that are large enough are stepped alone, since each pass depends on sums over all of a tensor
        assert [x.numel() for x in floor.values()] == words
        before = [[t.clone() for t in piece if t is not None] for piece in floor.pieces]
        floor.step()
        for (x, g, m), (old_x, old_g, old_m) in zip(floor.pieces, before, strict=True):
            assert m is not None and (x != old_x).all() and torch.equal(g, old_g) and (m != old_m).all()
        assert sum(m.numel() for _, _, m in floor.pieces if m is not None) == sum(p.numel() for p in params)


def test_ratios_are_taken_round_by_round() -> None:
    """The neighbours on a machine come and go: a round in which all are slow says as much as a quiet one."""
    ours, base = Timing("cpu", "float32", [1.0, 3.0, 9.0], 0), Timing("adamw-fused", "float32", [2.0, 4.0, 10.0], 0)
    ratio = Ratio.of(ours, base)
    assert ratio == (0.75, 0.5, 0.9) and str(ratio) == "0.75 (0.50–0.90)" and Ratio.of(ours, None) is None


def test_results_come_back_from_json_as_they_were(tmp_path: Path) -> None:
    example().save(tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == example()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="not a result"):
        results.load(tmp_path / "other.json")


def test_the_tables_and_the_plot_have_every_contender(tmp_path: Path) -> None:
    text = tables.markdown(example())
    for label in ("adafactor, cpu", "torch.optim.AdamW, fused, bfloat16", "timm's Adafactor", "not installed"):
        assert label in text
    assert "WRONG, off its own formula: torch.optim.Adafactor, loop by 3e-01." in text
    for cells in ("4,000 ms, 2.00 | 2,000 ms, 2.00", "0 kB + 0.0100 kB | 0 kB + 0.0100 kB"):
        assert f"| torch.optim.Adafactor, loop | {cells} |" in text
    alone = tables.markdown(replace(example(), suites=example().suites[:1], checks=[]))
    assert "| torch.optim.Adafactor, loop | 4,000 ms, 2.00 | 0 kB + 0.0100 kB |" in alone and "formula" not in alone
    [picture] = tables.plot(replace(example(), cost=[]), tmp_path)
    assert picture.name == "times.png" and picture.read_bytes()[1:4] == b"PNG"


def test_ours_as_people_run_it_and_the_floor_are_compared_with_fused_adamw() -> None:
    """Stochastic rounding, which is what most run in bfloat16, has a row of its own; so has the floor."""
    suite = measured("a", cpu_bf16=3.0, cpu_stochastic_bf16=5.0, floor_bf16=2.0, adamw_fused_bf16=4.0)
    table = tables.tables(replace(example(), suites=[suite]))[0]
    assert table.heads[:2] == ["optimizer", "time of a step, and × fused AdamW"]
    assert [row[1].split()[-1] for row in table.rows] == ["0.75", "1.25", "0.50", "1.00"]
    assert "stochastic" in table.rows[1][0]


def test_the_record_says_how_busy_the_machine_was() -> None:
    busy = replace(example(), load_before=[0.5, 0.4, 0.3], load_after=[2.0, 1.0, 0.5])
    assert "Load average of a minute 0.5 before, 2.0 after." in tables.about(busy)
    assert "Load" not in tables.about(example())


@pytest.mark.skipif(not PEAK.exists(), reason="the peak can be read on Linux only")
def test_a_process_of_its_own_finds_a_known_allocation() -> None:
    found = extra_bytes("tests.tools.test_bench:Hungry", [(8, 8)], "float32", 1)
    assert found is not None and abs(found - ALLOCATED) < 2 << 20  # the kernel counts pages in batches
    quiet = extra_bytes("sgd", [(8, 8)], "float32", 1)
    assert quiet is not None and quiet < 1 << 20


def test_the_suites_are_the_models_they_name() -> None:
    counts = {name: (len(suite.shapes), suite.parameters) for name, suite in suites.SUITES.items()}
    assert counts["bert"] == (199, 17_488_640)
    assert counts["gpt2"] == (148, 124_439_808)
    assert counts["convolutions"] == (161, 25_557_032)
    for name, size in {"1M": 1e6, "10M": 1e7, "100M": 1e8, "1B": 1e9}.items():
        assert suites.stack(name).parameters == pytest.approx(size, rel=0.02)


def build() -> torch.nn.Module:
    """A model of a user's own."""
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4))


def test_a_model_of_ones_own_gives_its_shapes() -> None:
    assert suites.of_model("tests.tools.test_bench:build").shapes == ((4, 6), (4,), (4,), (4,))


def test_the_command_measures_a_model_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    words = "--contender sgd adamw-fused eager floor --rounds 2 --threads 1 --no-memory --dtype float32".split()
    try:
        assert main(["--model", "tests.tools.test_bench:build", *words, "--output", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    found = results.load(tmp_path / "results.json")
    assert [m.name for m in found.suites] == ["tests.tools.test_bench:build"] and len(found.checks) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "times.png", "tables.md"}
    assert (found.load_before is not None) == (found.load_after is not None) == hasattr(os, "getloadavg")
    said = capsys.readouterr().err.splitlines()  # no terminal: one line for each
    assert [line for line in said if "warming up" in line] == [
        f"tests.tools.test_bench:build: warming up {CONTENDERS[key].label}"
        for key in ("sgd", "adamw-fused", "eager", "floor")
    ]
    assert main(["--render", str(tmp_path / "results.json")]) == 0
    assert capsys.readouterr().out == tables.markdown(found) == (tmp_path / "tables.md").read_text()


def raises() -> torch.nn.Module:
    raise KeyError("nobody knows")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--suite", "gpt9"], "unknown suite 'gpt9'; there are bert, gpt2"),
        (["--contender", "adamax"], "unknown contender 'adamax'; there are sgd"),
        (["--contender", "nowhere:Optimizer"], "none of the contenders can run here"),
        (["--model", "torch"], "must be module:function"),
        (["--model", "torch:nothing"], "has no function 'nothing'"),
        (["--cost", "2M"], "unknown size '2M'"),
        (["--rounds", "0"], "must be at least 1"),
        (["--render", "nowhere.json"], "nowhere.json"),
        (["--model", "..:x"], "..:x raised TypeError"),
        (["--model", "tests.tools.test_bench:raises"], "raised KeyError: 'nobody knows'"),
        (["--threads", "100000000"], "--threads 100000000 must be from 1 to 1024"),
        (["--contender", "triton"], "triton cannot step tensors on cpu"),
        (["--device", "nonsense"], "not a device that torch knows"),
        (["--device", "meta"], "there are cpu, cuda"),
    ],
)
def test_a_mistake_is_one_clear_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[-1] and all(line.startswith("checking ") for line in lines[:-1])


def test_a_wrong_suite_is_named_before_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    for suite, said in {"none": "unknown suite 'none'", "tiny": "rich is missing"}.items():
        assert main(["--suite", suite]) == 2
        assert said in capsys.readouterr().err


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> Results:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.__main__.bench", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "python -m benchmarks: interrupted\n"


def test_help_needs_torch_alone() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['rich', 'matplotlib', 'numba', 'transformers', 'timm', 'jax']))\n"
        "from benchmarks.__main__ import main\nmain(['--help'])"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0 and "--contender" in run.stdout, run.stderr


def test_the_tables_in_the_documents_are_those_of_the_committed_results() -> None:
    text = (ROOT / "docs" / "performance-tables.md").read_text()
    found = re.findall(r"<!-- from (\S+) -->\n(.*?)<!-- end -->", text, flags=re.S)
    assert found
    for name, shown in found:
        assert shown.strip() == tables.markdown(results.load(ROOT / name)).strip(), name
