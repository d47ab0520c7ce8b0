"""The experiment on bfloat16 weights: what is stored in 16 bits, resuming, fine-tuning, and its document."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lab.corpus import Corpus, generated_corpus
from lab.model import Transformer
from lab.precision import (
    BEGIN,
    END,
    ROUNDINGS,
    SEEDS,
    PrecisionJob,
    PrecisionTrainer,
    ShortTransformer,
    group,
    jobs,
    measure,
    only,
    render,
    run,
    tables,
)
from lab.presets import SCALES
from lab.records import RECORDS, read
from lab.train import Options, run_folder

ROOT = Path(__file__).parents[2]
TINY = replace(SCALES["tiny"], name="precision", steps=6, dev=0, test=5)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    torch.set_num_threads(1)
    return generated_corpus()


def job(rounding: str | None, domain: str | None = None, **changes: Any) -> PrecisionJob:
    rate = 1e-3 if domain else None
    return PrecisionJob("O", replace(TINY, **changes), False, 0, rate, "generated", rounding, domain)


def records() -> list[dict[str, Any]]:
    return read(RECORDS, "precision")


def test_every_rounding_has_every_seed_from_scratch_and_fine_tuned() -> None:
    found = jobs()
    assert len({one.name for one in found}) == len(found) == 2 * len(ROUNDINGS) * len(SEEDS)


def test_weights_gradients_and_results_of_layers_are_bfloat16_and_the_loss_is_near_that_of_float32() -> None:
    torch.manual_seed(0)
    wide = Transformer(TINY.shape, 50)
    short = ShortTransformer(wide)
    seen: list[torch.Tensor] = []
    short.layers("encoder")[0].feed_forward.widen.register_forward_hook(
        lambda module, inputs, output: seen.append(output)
    )
    ids = torch.randint(4, 50, (5, 7))
    loss = short.loss(ids, ids, ids, 0.1)
    torch.autograd.backward(loss)
    assert all(p.dtype == torch.bfloat16 for p in short.parameters())
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in short.parameters())
    assert torch.equal(seen[0], seen[0].bfloat16().float())
    expected = wide.loss(ids, ids, ids, 0.1)
    torch.autograd.backward(expected)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    for p, q in zip(short.parameters(), wide.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert (p.grad.float() - q.grad).norm() < 0.05 * q.grad.norm()
    counted = measure(short, [p.detach().clone() for p in short.parameters()])
    assert counted["gradient_bytes"] == sum(p.grad.nbytes for p in short.parameters() if p.grad is not None)
    assert counted["unchanged"] == 1 and counted["distance"] == 0


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_a_run_that_is_cut_goes_on_to_the_same_weights(rounding: str, corpus: Corpus, tmp_path: Path) -> None:
    def trainer(cache: Path) -> PrecisionTrainer:
        return PrecisionTrainer(job(rounding), corpus, Options(cache))

    whole = trainer(tmp_path / "whole")
    whole.train()
    cut = trainer(tmp_path / "cut")
    stream = cut.batches.stream(0)
    for _ in range(3):
        cut._step(next(stream))
    cut.checkpoint()
    rest = trainer(tmp_path / "cut")
    rest.resume()
    assert rest.progress.step == 3
    rest.train()
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), rest.model.parameters(), strict=True))


def test_fine_tuning_starts_from_what_float32_learned_at_a_constant_step_size(corpus: Corpus, tmp_path: Path) -> None:
    domain = corpus.train[0].domain
    record = run(job("nearest", domain, steps=2), corpus, Options(tmp_path), TINY)
    base = json.loads((run_folder(job(None), tmp_path) / "record.json").read_text())
    assert base["config"]["rounding"] is None and base["unchanged"] < 0.1
    assert record["unchanged"] > 0.5  # steps of a thousandth are lost by most weights
    assert record["parameter_bytes"] == record["gradient_bytes"] == base["parameter_bytes"] / 2
    weights = run_folder(job(None), tmp_path) / "weights.safetensors"
    trainer = PrecisionTrainer(job("nearest", domain), corpus, Options(tmp_path), weights)
    assert trainer._rate() == 1e-3 and {pair.domain for pair in trainer.corpus.train} == {domain}
    learned = load_file(weights)
    assert all(torch.equal(p, learned[name].bfloat16()) for name, p in trainer.model.named_parameters())
    assert record["initial_loss"] < 0.9 * base["initial_loss"]


def test_a_domain_is_taken_out_of_all_parts(corpus: Corpus) -> None:
    other = replace(corpus.dev[0], domain="other")
    mixed = Corpus("generated", [*corpus.train, other], [other, *corpus.dev], corpus.test)
    assert only(mixed, "other") == Corpus("generated", [other], [other], [])


def made_up() -> list[dict[str, Any]]:
    """Records as of all jobs: each rounding has a loss of its own, and a tenth more with each seed."""
    found = []
    for one in jobs():
        loss = 4.0 + ROUNDINGS.index(one.rounding) + one.seed / 10
        found.append(
            {
                "name": one.name,
                "config": one.config(),
                "initial_loss": 8.0,
                "dev_loss": loss,
                "bleu": {"test": {"all": 3.0}},
            }
            | {"curve": [[12, 6.0], [24, loss]], "unchanged": 0.25, "distance": 0.5, "parameters": 1000}
            | {"parameter_bytes": 2000, "gradient_bytes": 2000, "state_bytes": 60}
        )
    return found


def test_tables_and_figure_are_put_between_the_marks_and_nothing_else_is_changed(tmp_path: Path) -> None:
    document, picture = tmp_path / "precision.md", tmp_path / "precision.png"
    document.write_text(f"before\n{BEGIN}old\n{END}after\n", encoding="utf-8")
    render(made_up(), document, picture)
    text = document.read_text(encoding="utf-8")
    assert text == f"before\n{BEGIN}\n{tables(made_up())}\n{END}after\n"
    assert "| bfloat16, nearest | 5.100 ± 0.100 | +1.000 ± 0.000 | 25.0 % | 50.0 % |" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    document.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="marks"):
        render(made_up(), document, picture)


def test_the_document_shows_the_committed_records() -> None:
    assert tables(records()) in (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")


def test_committed_records_are_of_these_jobs_and_each_part_is_of_one_text() -> None:
    wanted = {one.name: json.loads(json.dumps(one.config())) for one in jobs()}
    found = records()
    assert all(wanted[record["name"]] == record["config"] for record in found)
    for runs in group(found).values():
        assert len({record["corpus"]["fingerprint"] for each in runs.values() for record in each}) <= 1
