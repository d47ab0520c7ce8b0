"""Runs: rows and schedule, resuming, locks, divergence, records and their jobs."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import experiments, records
from lab.corpus import DEBIAN_12, Corpus
from lab.evaluate import unpack_figures
from lab.files import LockedError, locked
from lab.model import Transformer
from lab.pool import run_missing
from lab.presets import SCALES, Job
from lab.rows import ROWS, TABLE_2, make_optimizer, schedule, state_bytes
from lab.train import WATCHED, Options, Progress, Trainer, run, run_folder

TINY = SCALES["tiny"]
ROOT = Path(__file__).parents[2]


def _job(row: str = "O", **changes: Any) -> Job:
    return Job(row, replace(TINY, **changes), warmup=False, corpus="generated")


def test_table_2_has_44_runs_and_the_papers_scores() -> None:
    jobs = experiments.table_2(SCALES["mini"])
    assert len(jobs) == len({job.name for job in jobs}) == 44
    assert [row.warm for row in TABLE_2[:5]] == [25.6, 25.4, 25.4, 25.2, 0.3]
    assert sum(math.isnan(row.cold) for row in TABLE_2) == 4
    every = experiments.everything([])
    assert len({job.name for job in every}) == len(every)


@pytest.mark.parametrize("steps", [100_000, 1000])
def test_the_schedule_has_the_papers_shape_at_any_length(steps: int) -> None:
    knee = steps // 10
    for warmup in (True, False):
        values = [schedule(step, steps, warmup) for step in range(1, steps + 1)]
        assert max(values) == pytest.approx(1e-2)
        assert values[knee - 1] == pytest.approx(1e-2)
        assert values[-1] == pytest.approx(100_000**-0.5)
        assert values[knee // 2 - 1] == pytest.approx(5e-3 if warmup else 1e-2)


def test_rows_keep_as_much_state_as_the_paper_says() -> None:
    model = Transformer(TINY.shape, 400)
    weights = sum(p.nbytes for p in model.parameters())
    size = {name: state_bytes(make_optimizer(ROWS[name], model.named_parameters())) for name in "ABCDNO"}
    assert size["A"] == pytest.approx(weights, rel=0.01)
    assert size["B"] == pytest.approx(2 * weights, rel=0.01)
    assert size["O"] == size["C"] < 0.1 * weights
    assert size["D"] < size["C"]
    assert size["N"] == size["A"]


def test_a_run_learns_is_recorded_and_is_not_repeated(corpus: Corpus, tmp_path: Path) -> None:
    job = _job()
    record = run(job, corpus, Options(tmp_path))
    assert record["train_loss"] < 0.6 * record["initial_loss"]
    assert record["bleu"]["test"]["signature"].startswith("nrefs:1")
    assert len(record["rms_update"]["values"]) == TINY.steps
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["started"])
    assert record["started"] <= record["finished"]
    steps: list[Progress] = []
    assert run(job, corpus, Options(tmp_path, on_progress=steps.append)) == record
    assert not steps


def test_two_runs_at_once_do_not_touch_each_other(corpus: Corpus, tmp_path: Path) -> None:
    job = _job()
    with locked(run_folder(job, tmp_path) / "lock"), pytest.raises(LockedError):
        run(job, corpus, Options(tmp_path))
    assert not (run_folder(job, tmp_path) / "config.json").exists()


def test_a_diverged_run_stops_early_and_says_so(corpus: Corpus, tmp_path: Path) -> None:
    job = replace(_job("Q300", dev=5, test=5), multiplier=1e6)
    record = run(job, corpus, Options(tmp_path))
    assert record["diverged"]
    assert record["steps"] < TINY.steps
    assert record["dev_loss"] is None
    assert record["bleu"] == {}
    json.dumps(record, allow_nan=False)


def test_the_pool_runs_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    jobs = [Job("B", TINY, True, corpus="generated"), Job("O", TINY, False, corpus="generated")]
    folder = tmp_path / "records"
    assert run_missing(jobs, folder, tmp_path) == []
    found = records.read(folder)
    assert [record["name"] for record in found] == sorted(job.name for job in jobs)
    before = (folder / "tiny.jsonl").stat().st_mtime_ns
    assert run_missing(jobs, folder, tmp_path, found[0]["corpus"]["fingerprint"]) == []
    assert (folder / "tiny.jsonl").stat().st_mtime_ns == before


def test_a_record_of_another_text_is_not_the_jobs() -> None:
    job = _job()
    record = {"name": job.name, "config": json.loads(json.dumps(job.config())), "corpus": {"fingerprint": "of one"}}
    assert records.find(job, [record]) is records.find(job, [record], "of one") is record
    assert records.find(job, [record], "of another") is None


def test_the_committed_records_are_those_of_debians_text_in_any_order_that_it_has_had() -> None:
    committed = records.read(records.RECORDS)
    jobs = experiments.everything(committed)
    recorded = {text: [job.name for job in jobs if records.find(job, committed, text)] for text in DEBIAN_12}
    assert len(recorded["14b1382a3b03a0a6"]) > 250
    assert all(names == recorded["14b1382a3b03a0a6"] for names in recorded.values())
    assert not any(records.find(job, committed, "of another") for job in jobs)


def test_reproduce_makes_every_record() -> None:
    committed = records.read(records.RECORDS)
    configs = [json.loads(json.dumps(job.config())) for job in experiments.everything(committed)]
    assert [record["name"] for record in committed if record["config"] not in configs] == []


def test_neither_a_record_nor_a_checkpoint_of_another_text_is_taken_up(corpus: Corpus, tmp_path: Path) -> None:
    job = _job(steps=5, dev=0, test=0)
    other = Corpus("generated", corpus.train[:2000], corpus.dev, corpus.test)
    first = run(job, other, Options(tmp_path))
    again = run(job, corpus, Options(tmp_path))
    assert [r["corpus"]["fingerprint"] for r in (first, again)] == [other.fingerprint(), corpus.fingerprint()]
    begun = Trainer(job, other, Options(tmp_path))
    begun.train(until=3)
    taken = {text.fingerprint(): Trainer(job, text, Options(tmp_path)) for text in (corpus, other)}
    for trainer in taken.values():
        trainer.resume()
    assert [trainer.progress.step for trainer in taken.values()] == [0, 3]


def test_a_watched_run_ends_early_and_has_rms_u_of_every_parameter(corpus: Corpus, tmp_path: Path) -> None:
    job = _job("A", watched=12, dev=0, test=0)
    found = run(job, corpus, Options(tmp_path))
    figures = unpack_figures(found["updates"]["values"], len(found["updates"]["parameters"]))
    assert found["updates"]["parameters"] == [name for name, _ in Transformer(TINY.shape, 400).named_parameters()]
    assert figures.shape == (12, len(found["updates"]["parameters"])) and found["steps"] == len(found["curve"]) == 12
    column = found["updates"]["parameters"].index(WATCHED)
    assert figures[:, column] == pytest.approx([value for _, value in found["rms_update"]["values"]], rel=0.03)
    whole = run(_job("A", dev=0, test=0), corpus, Options(tmp_path / "whole"))
    assert found["curve"] == whole["curve"][:12], "of the same schedule"


def test_a_scales_records_are_one_file_with_a_line_for_each_run(tmp_path: Path) -> None:
    for name, loss in (("b", 1.0), ("a", 2.0), ("b", 3.0)):
        record = {"name": name, "config": {"scale": {"name": "tiny"}}, "dev_loss": loss, "text": "\u2028"}
        records.keep(record, tmp_path)
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["tiny.jsonl"]
    assert [(record["name"], record["dev_loss"]) for record in records.read(tmp_path)] == [("a", 2.0), ("b", 3.0)]
