"""The benchmark measures what it says it does. No test here looks at how long anything takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import suites, tables
from benchmarks.__main__ import main
from benchmarks.contenders import CONTENDERS, DTYPES, EMPTY, Floor, own, parameters
from benchmarks.machine import PEAK
from benchmarks.measure import extra_bytes
from benchmarks.record import Record, load
from studies import front

ALLOCATED = 64 << 20
SHAPES = [(40, 24), (7,), (3, 5, 4)]


class Hungry(torch.optim.SGD):
    """Takes a known amount of memory for the length of a step."""

    def step(self, closure: Any = None) -> Any:
        """Touch every page, then forget it."""
        torch.ones(ALLOCATED // 4).sum()
        return super().step(closure)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inside", "after"),
    [
        ("adamw-backward", "adamw"),
        ("adafactor-backward", "adafactor"),
        ("adafactor-stochastic-backward", "adafactor-stochastic"),
    ],
)
def test_steps_inside_backward_are_those_after_it(inside: str, after: str, dtype: str) -> None:
    if dtype not in CONTENDERS[inside].dtypes:
        pytest.skip("not measured in this dtype")
    first = parameters(SHAPES, dtype)
    second, third = own(first), own(first)
    runners = [CONTENDERS[after].make(first), CONTENDERS[inside].make(second), CONTENDERS[EMPTY].make(third)]
    before = [p.detach().clone() for p in first]
    for _ in range(3):
        for runner in runners:
            runner.step()
    assert runners[0].state_bytes() == runners[1].state_bytes() and runners[2].state_bytes() == 0
    for p, q, r, x in zip(first, second, third, before, strict=True):
        assert torch.equal(p, q) and not torch.equal(p, x) and torch.equal(r, x) and q.grad is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_floor_reads_and_writes_every_byte_that_a_step_must_move(dtype: str) -> None:
    params = parameters(SHAPES, dtype)
    floor = Floor(params, torch.float32)
    before = [[t.clone() for t in piece if t is not None] for piece in floor.pieces]
    floor.step()
    for (x, g, m), (old_x, old_g, old_m) in zip(floor.pieces, before, strict=True):
        assert m is not None and (x != old_x).all() and torch.equal(g, old_g) and (m != old_m).all()
    assert sum(m.numel() for *_, m in floor.pieces if m is not None) == sum(p.numel() for p in params)
    assert sum(x.nbytes for x, *_ in floor.pieces) == sum(p.nbytes // 4 * 4 for p in params)


@pytest.mark.skipif(not PEAK.exists(), reason="the peak can be read on Linux only")
def test_a_process_of_its_own_finds_a_known_allocation() -> None:
    found = extra_bytes("tests.tools.test_bench:Hungry", [(8, 8)], "float32")
    assert found is not None and abs(found - ALLOCATED) < 2 << 20  # the kernel counts pages in batches


def test_the_suites_are_the_models_they_name() -> None:
    counts = {name: (len(suite.shapes), suite.parameters) for name, suite in suites.SUITES.items()}
    assert counts["gpt2"] == (148, 124_439_808) and counts["bert"] == (199, 17_488_640)
    assert counts["convolutions"] == (161, 25_557_032) and counts["squares"] == (24, 24 * 2**20)


def build() -> torch.nn.Module:
    """A model of a user's own."""
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4))


def test_the_command_measures_a_model_and_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads, path = torch.get_num_threads(), tmp_path / "bench.json"
    words = ["--suite", "tests.tools.test_bench:build", "--contender", "adamw", "adamw-backward", "adafactor-eager"]
    try:
        assert main([*words, "--rounds", "2", "--threads", "1", "--no-memory", "--output", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    record, shown = load(path), capsys.readouterr().out
    asked = {"float32": [*words[3:], EMPTY, "copy"], "bfloat16": ["adamw", "adamw-backward", EMPTY, "copy"]}
    for dtype, names in asked.items():
        assert [row["contender"] for row in record.rows if row["dtype"] == dtype] == names
    assert all(len(row["seconds"]) == 2 and row["parameters"] == 36 for row in record.rows if "seconds" in row)
    assert record.about["threads"] == 1 and "--threads 1" in record.about["command"]
    assert len(record.rows[4]["load"]) == 2 and "load average" in shown
    assert main(["--render", str(path)]) == 0 and capsys.readouterr().out == shown == tables.markdown(record)


def a_row(contender: str, seconds: list[float]) -> dict[str, Any]:
    return {"suite": "gpt2", "contender": contender, "dtype": "float32", "state_bytes": 4_000_000, "seconds": seconds}


def test_ratios_are_taken_round_by_round_and_without_the_empty_backward() -> None:
    """The neighbours on a machine come and go: a round in which all are slow says as much as a quiet one."""
    rows = [("adamw", [2.0, 4.0]), ("adafactor", [1.0, 3.0]), ("adafactor-backward", [2.5, 4.0]), (EMPTY, [0.5, 1.0])]
    record = Record({}, [a_row(*row) for row in rows])
    assert tables.ratios(record, record.rows[1]) == [0.5, 0.75]
    assert tables.ratios(record, record.rows[2]) == [1.0, 0.75]
    best = {"setting": "adafactor-float32", "limit": 4 << 30, "parameters": 408_000_000}
    table = front.equal([record], Record({}, [best]))
    assert "| adafactor, float32 | 4.0 MB | 0.62 | 408 M |" in table
    assert "| adafactor, float32, in backward | 4.0 MB | 0.88 | – |" in table


def test_rounds_with_fast_memory_are_told_apart_and_joined_over_the_runs() -> None:
    copy = {"suite": "gpt2", "contender": "copy", "dtype": "float32"}
    speeds = ([40e9, 70e9, 70e9], [40e9, 40e9, 70e9])
    rows = [a_row("adamw", [1.0, 1.0, 1.0]), a_row("adafactor", [0.6, 0.9, 1.1])]
    runs = [Record({}, [*rows, {**copy, "bytes_per_second": list(each)}]) for each in speeds]
    assert "| float32 | 0.60 | 1.1 |" in front.ranges(runs), "the medians of 0.6, 0.6, 0.9 and of 0.9, 1.1, 1.1"
    assert "| float32 | – | – |" in front.ranges(runs[:1]), "two rounds and one say nothing"


def test_the_tables_of_the_documents_are_those_of_the_committed_records() -> None:
    shown = set()
    for document in (front.README, front.PAGE):
        text = document.read_text(encoding="utf-8")
        for name, table in front.tables().items():
            begin, end = front.marks(name)
            if begin in text:
                assert text.split(begin)[1].split(end)[0].strip() == table.strip(), "run: python -m studies.front"
                shown.add(name)
    assert shown == {"equal", "ranges", "conditions"}
