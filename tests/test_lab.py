"""The lab in seconds: a run from its job to its record, and the claims judged by the committed records."""

from pathlib import Path

from lab import answer, claims, records, results
from lab.corpus import generated_corpus
from lab.presets import SCALES, Job
from lab.train import Options, run


def test_a_small_run_learns_and_its_record_is_read_back(tmp_path: Path) -> None:
    job = Job("O", SCALES["tiny"], warmup=False, corpus="generated")
    record = run(job, generated_corpus(), Options(tmp_path))
    records.keep(record, tmp_path / "records")
    assert record["train_loss"] < 0.6 * record["initial_loss"]
    assert records.find(job, records.read(tmp_path / "records")) == record


def test_the_committed_records_decide_claims_and_the_answer_says_so() -> None:
    found = records.read(records.RECORDS)
    verdicts = {finding.verdict for _, finding in claims.judge_all(found)}
    assert verdicts <= {results.HOLDS, results.FAILS, results.UNDECIDED, results.TOO_FEW} and results.HOLDS in verdicts
    assert "ends level with Adam" in answer.answer(found)
