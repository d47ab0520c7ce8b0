"""Step inside backward under Accelerate, the Trainers and torch.compile, and in the example."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor, step_in_backward
from tests.backward.loops import STEPS, plain
from tests.exact import assert_same, copy_of

ROOT = Path(__file__).parents[2]


def test_accelerate_accumulates_and_its_clipping_finds_nothing() -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(attach: bool, clip: bool = False) -> dict[str, Tensor]:
        model, optimizer = plain()
        if attach:
            step_in_backward(model, optimizer, accumulate=2)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        net, wrapped = accelerator.prepare(model, optimizer)
        for seed in range(2 * STEPS):
            with accelerator.accumulate(net):
                accelerator.backward(net(torch.randn(6, generator=torch.Generator().manual_seed(seed))).square().sum())
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                wrapped.step()
                wrapped.zero_grad()
        assert [optimizer.state[p]["step"] for p in model.parameters()] == [STEPS] * 4
        return copy_of(model)

    assert_same(train(attach=True), train(attach=False))
    assert_same(train(attach=True, clip=True), train(attach=False))  # clipping finds nothing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_the_lightning_trainer_takes_the_same_steps() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, attach: bool) -> None:
            super().__init__()
            self.net, self.attach = plain()[0], attach

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).square().sum()
            return loss

        def configure_optimizers(self) -> Adafactor:
            optimizer = Adafactor(self.named_parameters(), beta1=0.9)
            if self.attach:
                step_in_backward(self, optimizer, accumulate=2)
            return optimizer

    def train(attach: bool, clip: float | None = None) -> dict[str, Tensor]:
        x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
        module = Module(attach)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=clip,
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4))
        assert trainer.global_step == 6
        return copy_of(module)

    assert_same(train(attach=True), train(attach=False))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize("whole", [True, False], ids=["as a whole", "block by block"])
def test_a_compiled_model_takes_the_same_steps(whole: bool) -> None:
    """Compiled as a whole, it has one backward that returns all gradients together, as the documentation says."""
    together: list[int] = []

    def train(attach: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
        optimizer = Adafactor(model.named_parameters(), beta1=0.9)
        if attach:
            step_in_backward(model, optimizer)
        parts: list[Any] = [torch.compile(part) for part in ([model] if whole else model)]
        net = nn.Sequential(*parts)
        for seed in range(STEPS):
            y = net(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
            y.grad_fn.register_hook(lambda gradients, _: together.append(sum(g is not None for g in gradients)))
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return copy_of(model)

    assert_same(train(attach=True), train(attach=False))
    assert set(together) == {12 if whole else 3}  # a block's are those of its matrix, its bias and its input


def example(*words: str) -> tuple[list[float], float, float]:
    """Its losses, and the MiB of its weights and of the gradients that there were at a time."""
    output = subprocess.run(
        [sys.executable, "examples/step_in_backward.py", "--steps", "10", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    ).stdout
    sizes = re.findall(r"weights ([\d.]+) MiB, gradients at a time ([\d.]+) MiB", output)
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)], float(sizes[0][0]), float(sizes[0][1])


def test_the_loss_of_the_example_falls_with_a_fraction_of_the_gradients() -> None:
    losses, weights, gradients = example()
    assert len(losses) == 2 and losses[1] < losses[0] - 1
    assert 0 < gradients < weights / 10
