"""How a run is computed changes nothing that it should not: the compiler, 16-bit products, processes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lab.batches import Batch
from lab.corpus import Corpus
from lab.presets import SCALES, Job
from lab.train import Options, Trainer, run, run_folder
from tests.launch import torchrun

TINY = replace(SCALES["tiny"], steps=6, dev=0, test=0)


def _trainer(corpus: Corpus, cache: Path, **changes: Any) -> Trainer:
    options = Options(cache, **{key: changes.pop(key) for key in ("compiler",) if key in changes})
    return Trainer(Job("O", replace(TINY, **changes), False, corpus="generated"), corpus, options)


def _gradients(trainer: Trainer, batch: Batch) -> tuple[float, list[torch.Tensor]]:
    trainer.model.train()
    loss = trainer._backward(batch)
    return loss, [p.grad for p in trainer.model.parameters() if p.grad is not None]


def _losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return trainer.progress.losses


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # the compiler's own, as it is imported
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_run_is_the_run(compiler: str, corpus: Corpus, tmp_path: Path) -> None:
    plain = _trainer(corpus, tmp_path / "plain")
    compiled = _trainer(corpus, tmp_path / "compiled", compiler=compiler)
    assert compiled.model._compiled_call_impl is not None
    assert _losses(compiled) == pytest.approx(_losses(plain), rel=1e-4)
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()
    assert compiled.job.name == plain.job.name


def test_autocast_has_products_in_bfloat16_and_all_else_in_float32(corpus: Corpus, tmp_path: Path) -> None:
    plain, short = _trainer(corpus, tmp_path), _trainer(corpus, tmp_path, autocast=True)
    seen = []
    short.model.layers("decoder")[0].feed_forward.widen.register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    batch = next(plain.batches.stream(0))
    loss, expected = _gradients(plain, batch)
    found, gradients = _gradients(short, batch)
    assert seen == [torch.bfloat16]
    assert found != loss
    assert found == pytest.approx(loss, rel=1e-2)
    for one, other in zip(expected, gradients, strict=True):
        assert other.dtype == torch.float32
        assert (other - one).norm() < 0.05 * one.norm()
    short._step(batch)
    assert {p.dtype for p in short.model.parameters()} == {torch.float32}
    assert all(v.dtype == torch.float32 for s in short.optimizer.state.values() for v in s.values() if v.ndim)
    assert short.job.name != plain.job.name  # it is another run, with a record of its own


@pytest.mark.slow
def test_two_processes_train_as_one_process_does(corpus: Corpus, tmp_path: Path) -> None:
    scale = SCALES["tiny"]
    job = Job("O", scale, False, corpus="generated")
    whole = run(job, corpus, Options(tmp_path / "one"))
    words = ["-m", "lab", "run", "O", "--scale", "tiny", "--corpus", "generated", "--no-warmup", "--quiet"]
    status, output = torchrun([*words, "--cache", str(tmp_path / "two")], ranks=2)
    assert status == 0, output[-6000:]
    record = json.loads((run_folder(job, tmp_path / "two") / "record.json").read_text())
    assert record["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-3)
    assert [record[key] for key in ("state_bytes", "steps")] == [whole[key] for key in ("state_bytes", "steps")]
    one, two = (load_file(run_folder(job, tmp_path / name) / "weights.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        # biases, which start at zero, move by ρ·ε₂ = 3e-5 a step whatever the last digits of their gradients are
        assert (two[name] - value).norm() < 0.02 * value.norm() + 0.1 * 3e-5 * value.numel() ** 0.5
