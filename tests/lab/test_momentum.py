"""The experiment on the momentum's formats: its runs, its tables, and the studies' tables of the same page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import precision
from lab.corpus import generated_corpus
from lab.momentum import BEGIN, END, FORMATS, jobs, render, tables
from lab.precision import SEEDS, PrecisionJob, PrecisionTrainer
from lab.presets import SCALES, Job
from lab.records import RECORDS, read
from lab.train import Options
from studies import momentum as studies

DOCUMENT = Path(__file__).parents[2] / "docs" / "precision.md"
TINY = replace(SCALES["tiny"], name="momentum", steps=6, dev=0, test=5)


def test_every_format_has_every_seed_from_scratch_and_fine_tuned() -> None:
    found = jobs()
    assert len({job.name for job in found}) == len(found) == 2 * len(FORMATS) * len(SEEDS)
    assert {job.settings.beta1 for job in found} == {0.9} and {job.momentum for job in found} == set(FORMATS)
    assert not {job.name for job in found} & {job.name for job in precision.jobs()}


def test_configurations_of_runs_without_momentum_are_as_they_were() -> None:
    assert all("momentum" not in job.config() for job in precision.jobs())
    assert all(job.config()["momentum"] == job.momentum for job in jobs())


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_keeps_its_momentum_in_the_format_of_its_job(format: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    job = PrecisionJob("P", TINY, False, 0, None, "generated", None, None, format)
    trainer = PrecisionTrainer(job, generated_corpus(), Options(tmp_path))
    (group,) = trainer.optimizer.param_groups
    assert (group["beta1"], group["momentum_dtype"], group["momentum_of"]) == (0.9, format, "update")


def made_up() -> list[dict[str, Any]]:
    """Each format has a loss of its own, and a tenth more with each seed; no momentum and Adam likewise."""
    found = []
    wanted: list[Job] = [*jobs(), *precision.jobs(), *(Job("B", SCALES["mini"], True, seed) for seed in SEEDS)]
    for job in wanted:
        format = getattr(job, "momentum", "") if job.row == "P" else job.row
        loss = 4.0 + [*FORMATS, "O", "B"].index(format) / 2 + job.seed / 10
        figures = {"dev_loss": loss, "state_bytes": 2_500_000, "corpus": {"fingerprint": "same"}}
        found.append({"name": job.name, "config": job.config(), **figures})
    return found


def test_tables_compare_with_float32_momentum_of_the_same_seed(tmp_path: Path) -> None:
    document = tmp_path / "precision.md"
    document.write_text(f"before\n{BEGIN}old\n{END}after\n", encoding="utf-8")
    render(made_up(), document)
    text = document.read_text(encoding="utf-8")
    assert text == f"before\n{BEGIN}\n{tables(made_up())}\n{END}after\n"
    assert text.count("| momentum in int8 | 5.100 ± 0.100 | +1.000 ± 0.000 | 3 | 2.50 MB |") == 2
    assert text.count("| no momentum | 5.600 ± 0.100 | +1.500 ± 0.000 | 3 | 2.50 MB |") == 2
    assert text.count("| Adam | 6.100 ± 0.100 | +2.000 ± 0.000 | 3 | 2.50 MB |") == 1
    assert tables([]) == ""


def test_the_document_shows_the_committed_records() -> None:
    wanted = {job.name: json.loads(json.dumps(job.config())) for job in jobs()}
    assert all(wanted[record["name"]] == record["config"] for record in read(RECORDS, "momentum"))
    text = DOCUMENT.read_text(encoding="utf-8")
    assert f"{BEGIN}\n{tables(read(RECORDS))}\n{END}" in text
    record = json.loads(studies.RECORD.read_text())
    for name, table in studies.TABLES.items():
        begin, end = studies.marks(name)
        assert f"{begin}\n{table(record[name])}\n{end}" in text
