"""The benchmark measures what it says it does. No test here looks at how long anything takes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adafactor.bench import check, contenders, cost, formulas, memory, page, present, results, suites, targets
from adafactor.bench.contenders import CONTENDERS, Contender, TorchRunner
from adafactor.bench.floor import floor_bytes
from adafactor.bench.measure import Entry, measure
from adafactor.bench.results import Checked, Measured, Results, Timing
from adafactor.cli import main

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
    flat = formulas.Factored()(x.reshape(-1), [g.reshape(-1) for g in grads], unit)
    return flat.reshape(x.shape)


def measured(name: str, large: bool = True, **medians: float) -> Measured:
    """A suite of 1000 parameters with these medians; a key that ends in _bf16 is in bfloat16."""
    timings = []
    for key, median in medians.items():
        dtype = "bfloat16" if key.endswith("_bf16") else "float32"
        timings.append(
            Timing(
                key.removesuffix("_bf16").replace("_", "-"), dtype, [median] * 3, 0, 10, 6000 if key == "cpu" else None
            )
        )
    return Measured(name, name, 1, 1000, large, 1e4, timings)


def example() -> Results:
    """Round numbers."""
    first = measured("a", cpu=1.0, adamw_fused=2.0, timm=8.0, torch_loop=4.0, cpu_momentum=2.0)
    second = measured("b", False, cpu=2.0, adamw_fused=1.0, timm=64.0, torch_loop=2.0, cpu_bf16=1.0, adamw_fused_bf16=2)
    verdicts = [Checked("timm", "float32", 1e-6, True), Checked("torch-loop", "float32", 0.3, False)]
    sizes = [measured("10M", cpu=1.0), replace(measured("1B", cpu=150.0), parameters=100_000)]
    return Results(
        "adafactor bench", MACHINE, {"torch": "2"}, 2, 3, {"x": "not installed"}, verdicts, [first, second], sizes
    )


@pytest.mark.parametrize("key", [key for key, contender in CONTENDERS.items() if "cpu" in contender.devices])
def test_every_installed_contender_does_what_its_formula_says(key: str) -> None:
    contender = CONTENDERS[key]
    for dtype in contender.dtypes:
        if reason := contenders.why_not(contender, dtype):
            pytest.skip(reason)
        found = check.check(contender, dtype)
        assert found.correct, found


def test_the_check_tells_an_inverted_clip_from_the_right_one() -> None:
    def verdict(kind: Callable[..., torch.optim.Optimizer]) -> bool | None:
        return check.check(Contender("x", "x", "peer", lambda p: TorchRunner(p, kind(p)), whole), "float32").correct

    assert verdict(RightClip) is True
    assert verdict(InvertedClip) is False


def test_an_optimizer_without_a_formula_is_not_judged() -> None:
    assert check.check(contenders.find("torch.optim:Adagrad"), "float32").correct is None


def test_every_contender_is_measured_in_every_round() -> None:
    entries = [Entry(CONTENDERS[key], "float32") for key in ("sgd", "adamw-fused", "eager")]
    said: list[str] = []
    found = measure(suites.SUITES["tiny"], entries, 2, said.append)
    assert [t.contender for t in found.timings] == ["sgd", "adamw-fused", "eager"]
    assert all(len(t.seconds) == 2 and min(t.seconds) > 0 for t in found.timings)
    assert found.bandwidth > 0 and len(said) == len(entries) * 3
    numbers = suites.SUITES["tiny"].parameters
    assert found.timings[0].state_bytes == 0 and found.timings[1].state_bytes == 8 * numbers + 4 * 4


def test_the_ratios_are_those_of_known_numbers() -> None:
    found = {t.text: t.value for t in targets.targets(example())}
    assert found == {
        "time of fused AdamW, geometric mean": pytest.approx(1.0),  # 1/2 and 2
        "time of fused AdamW, worst suite": 2.0,
        "the same with momentum, geometric mean": pytest.approx(1.0),
        "the same in bfloat16, geometric mean": pytest.approx(0.5),
        # torch-loop is faster, but wrong
        "faster than the fastest correct other Adafactor, geometric mean": pytest.approx(16.0),  # 8 and 32
        "faster than the fastest correct other Adafactor, worst suite": 8.0,
        "extra memory in a step, of the parameters' bytes, worst large suite": 10 / 4000,
        "of the speed that memory allows, worst large suite": pytest.approx(0.6),  # 6000 bytes at 1e4 a second
        "cost of a parameter at 1 B against 10 M": pytest.approx(1.5),
    }


def test_a_target_is_met_up_to_its_bound_and_open_where_nothing_was_measured() -> None:
    met = {t.text: t.met for t in targets.targets(example())}
    assert met["time of fused AdamW, worst suite"] is False
    assert met["faster than the fastest correct other Adafactor, worst suite"] is True
    empty = targets.targets(replace(example(), suites=[], cost=[]))
    assert [t.met for t in empty] == [None] * len(empty)


def test_the_floor_counts_every_byte_that_must_move() -> None:
    factors = 2 * 4 * (100 + 50)
    assert floor_bytes([(100, 50)], 4, False, None) == 3 * 20_000 + factors
    assert floor_bytes([(100, 50)], 4, False, 0) == 4 * 20_000 + factors
    assert floor_bytes([(100, 50)], 2, True, 0) == 4 * 10_000 + factors + 2 * 20_000
    assert floor_bytes([(100,)], 4, False, 0) == 3 * 400 + 2 * 400 + 2 * 400


def test_results_come_back_from_json_as_they_were(tmp_path: Path) -> None:
    example().save(tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == example()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="not a result"):
        results.load(tmp_path / "other.json")


def test_the_tables_and_the_page_have_every_contender(tmp_path: Path) -> None:
    text = present.markdown(example())
    page.write(example(), tmp_path)
    shown = (tmp_path / "report.html").read_text()
    for label in ("adafactor, cpu", "torch.optim.AdamW, fused, bfloat16", "timm's Adafactor", "not installed"):
        assert label in text and label.replace("'", "&#x27;") in shown
    assert "| torch.optim.Adafactor, loop | 4,000 | 4,000–4,000 | 2.00 | – | 0 kB | 0.0100 kB | WRONG |" in text
    assert (tmp_path / "times.png").read_bytes()[1:4] == b"PNG" and "data:image/png" in shown


@pytest.mark.skipif(not memory.PEAK.exists(), reason="the peak can be read on Linux only")
def test_a_process_of_its_own_finds_a_known_allocation() -> None:
    found = memory.extra_bytes("tests.tools.test_bench:Hungry", [(8, 8)], "float32", 1)
    assert found is not None and abs(found - ALLOCATED) < 2 << 20  # the kernel counts pages in batches
    quiet = memory.extra_bytes("sgd", [(8, 8)], "float32", 1)
    assert quiet is not None and quiet < 1 << 20


def test_the_suites_are_the_models_they_name() -> None:
    counts = {name: (len(suite.shapes), suite.parameters) for name, suite in suites.SUITES.items()}
    assert counts["bert"] == (199, 17_488_640)
    assert counts["gpt2"] == (148, 124_439_808)
    assert counts["convolutions"] == (161, 25_557_032)
    for name, size in {"1M": 1e6, "10M": 1e7, "100M": 1e8, "1B": 1e9}.items():
        assert cost.suite(name).parameters == pytest.approx(size, rel=0.02)


def build() -> torch.nn.Module:
    """A model of a user's own."""
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4))


def test_a_model_of_ones_own_gives_its_shapes() -> None:
    assert suites.of_model("tests.tools.test_bench:build").shapes == ((4, 6), (4,), (4,), (4,))


def test_the_command_measures_a_model_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    words = "--model tests.tools.test_bench:build --contender sgd adamw-fused eager --rounds 2 --threads 1 --no-memory"
    try:
        assert main(["bench", *words.split(), "--dtype", "float32", "--output", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    found = results.load(tmp_path / "results.json")
    assert [m.name for m in found.suites] == ["tests.tools.test_bench:build"] and len(found.checks) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "times.png", "report.html"}
    capsys.readouterr()
    assert main(["bench", "--render", str(tmp_path / "results.json")]) == 0
    assert capsys.readouterr().out == present.markdown(found)


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
    ],
)
def test_a_mistake_is_one_clear_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[-1] and len(lines) == 1


def test_the_optimizer_imports_no_benchmark_and_help_needs_torch_alone() -> None:
    code = (
        "import sys, adafactor; assert not [name for name in sys.modules if 'adafactor.bench' in name]\n"
        "sys.modules.update(dict.fromkeys(['rich', 'matplotlib', 'numba', 'transformers', 'timm', 'jax']))\n"
        "from adafactor.cli import main\nmain(['bench', '--help'])"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and "--contender" in run.stdout, run.stderr


def test_the_tables_in_the_documents_are_those_of_the_committed_results() -> None:
    text = (ROOT / "docs" / "performance-tables.md").read_text()
    found = re.findall(r"<!-- from (\S+) -->\n(.*?)<!-- end -->", text, flags=re.S)
    assert found
    for name, shown in found:
        assert shown.strip() == present.markdown(results.load(ROOT / name)).strip(), name
