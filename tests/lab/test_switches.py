"""How a run is computed changes nothing that it should not: the compiler, 16-bit products, processes."""

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lab import records
from lab.__main__ import main
from lab.batches import Batch
from lab.corpus import Corpus, generated_corpus
from lab.decode import beam_search, translate
from lab.presets import SCALES, Job
from lab.train import Options, Trainer, run, run_folder

TINY = replace(SCALES["tiny"], steps=6, dev=0, test=0)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    torch.set_num_threads(1)
    return generated_corpus()


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


def test_base_is_the_papers_setting() -> None:
    base = SCALES["base"]
    shape = base.shape
    assert (shape.layers, shape.width, shape.heads, shape.filter) == (6, 512, 8, 2048)
    assert (base.vocabulary, base.tokens, base.steps, base.dev) == (32_000, 4096, 100_000, 3000)
    assert (base.adaptive, base.relative, shape.dropout, shape.inner_dropout) == (1.0, 1.0, 0.1, 0.1)
    assert base.branch == base.steps // 10, "so that the mean and the decayed weights are evaluated, too"
    assert inspect.signature(translate).parameters["beam"].default == 4
    assert inspect.signature(beam_search).parameters["alpha"].default == 0.6


def test_base_runs_end_to_end_from_files_with_every_switch(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(TINY.shape, dropout=0.1, inner_dropout=0.1)
    shrunk = replace(SCALES["base"], shape=shape, vocabulary=400, tokens=300, steps=20, branch=2, dev=30)
    monkeypatch.setitem(SCALES, "base", shrunk)
    words = ["lab", "run", "--scale", "base", "--no-warmup", "--bfloat16", "--quiet"]
    monkeypatch.setattr(sys, "argv", [*words, "--device", "cpu", "--cache", str(tmp_path), *files])
    assert main() == 0
    (record,) = records.read(tmp_path / "records", "base")
    assert record["bleu"]["dev"]["sentences"] == record["ways"]["decayed"]["bleu"]["dev"]["sentences"] == 30
    assert record["config"]["row"]["name"] == "O"
    assert record["config"]["scale"]["autocast"]


@pytest.mark.slow
def test_two_processes_train_as_one_process_does(corpus: Corpus, tmp_path: Path) -> None:
    scale = SCALES["tiny"]
    job = Job("O", scale, False, corpus="generated")
    whole = run(job, corpus, Options(tmp_path / "one"))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lab", "run"]
    words += ["O", "--scale", "tiny", "--corpus", "generated", "--no-warmup", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "--cache", str(tmp_path / "two")], cwd=ROOT, env=environment, check=True, timeout=300)
    record = json.loads((run_folder(job, tmp_path / "two") / "record.json").read_text())
    assert record["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-3)
    one, two = (load_file(run_folder(job, tmp_path / name) / "weights.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        # biases, which start at zero, move by ρ·ε₂ = 3e-5 a step whatever the last digits of their gradients are
        assert (two[name] - value).norm() < 0.02 * value.norm() + 0.1 * 3e-5 * value.numel() ** 0.5
