"""The three ways to evaluate a run: the last weights, the mean of the last ones, and after a decay to zero."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lab.corpus import Corpus
from lab.evaluate import pack, unpack
from lab.presets import SCALES, Job
from lab.train import SNAPSHOTS, Options, Progress, Trainer, run, run_folder, snapshots

BRANCHED = replace(SCALES["tiny"], steps=30, branch=6, dev=0, test=8, shape=replace(SCALES["tiny"].shape, dropout=0.1))


def _job(**changes: Any) -> Job:
    return Job("O", replace(BRANCHED, **changes), warmup=False, corpus="generated")


class _Stopped(Exception):
    pass


def test_a_branch_does_not_change_the_run_it_starts_from(corpus: Corpus, tmp_path: Path) -> None:
    plain = run(_job(branch=0), corpus, Options(tmp_path / "plain"))
    record = run(_job(), corpus, Options(tmp_path / "branched"))
    for key in ("train_loss", "curve", "rms_update", "steps", "bleu"):
        assert record[key] == plain[key]
    one, other = (
        load_file(run_folder(_job(), tmp_path / name) / "weights.safetensors") for name in ("plain", "branched")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert set(record["ways"]) == {"mean", "decayed"}
    assert "ways" not in plain


@pytest.mark.parametrize("when", [25, 33])
def test_a_run_stopped_among_the_snapshots_or_in_the_branch_ends_the_same(
    when: int, corpus: Corpus, tmp_path: Path
) -> None:
    whole = run(_job(), corpus, Options(tmp_path / "whole"))

    def stop(progress: Progress) -> None:
        if progress.step == when:
            raise _Stopped

    with pytest.raises(_Stopped):
        run(_job(), corpus, Options(tmp_path / "parts", checkpoint_seconds=0, on_progress=stop))
    again = run(_job(), corpus, Options(tmp_path / "parts"))
    assert {key: again[key] for key in ("ways", "translations", "dev_loss", "bleu")} == {
        key: whole[key] for key in ("ways", "translations", "dev_loss", "bleu")
    }


def test_the_mean_is_that_of_the_last_weights(corpus: Corpus, tmp_path: Path) -> None:
    trainer = Trainer(_job(), corpus, Options(tmp_path))
    seen = []
    for step, batch in zip(range(1, 31), trainer.batches.stream(0), strict=False):
        trainer._step(batch)
        if step in snapshots(30):
            seen.append(trainer.model.embedding.detach().clone())
    assert len(seen) == SNAPSHOTS
    torch.testing.assert_close(trainer.averaged().embedding.detach(), torch.stack(seen).mean(0))


def test_the_step_size_of_the_branch_falls_in_a_line_from_the_last_to_zero(corpus: Corpus, tmp_path: Path) -> None:
    trainer = Trainer(_job(), corpus, Options(tmp_path))
    rates = []
    for step in range(30, 37):
        trainer.progress.step = step
        rates.append(trainer._rate())
    drops = [before - after for before, after in zip(rates, rates[1:], strict=False)]
    assert drops == pytest.approx([rates[0] / 7] * 6)
    assert rates[-1] == pytest.approx(rates[0] / 7)


def test_packed_translations_come_back() -> None:
    texts = {"last": ["Das Haus", "", "ein Baum ü"], "mean": ["Das Haus.", "x", "Baum"]}
    assert unpack(pack(texts)) == texts
