"""The diagnostics inside of real runs: transformers' and Lightning's trainers, Accelerate, TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adafactor import Adafactor
from adafactor.diagnostics import Report, Watch, diagnose, to_callback, to_tensorboard, unwrap

pytestmark = [
    pytest.mark.slow,
    # Lightning's own business with this torch, and its advice for larger data
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]

STEPS = 7


def data(batches: int = STEPS) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4 * batches, 6, generator=generator), torch.randint(3, (4 * batches,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


# ---- transformers


def trainer(folder: Path, callback: Any, **given: Any) -> Any:
    """A `Trainer` of a tiny GPT-2 with two micro-batches a step."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=9, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        save_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    tokens = torch.randint(17, (20, 9), generator=torch.Generator().manual_seed(0))
    return transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
        **given,
    )


def test_a_transformers_trainer_is_watched_step_by_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from adafactor.diagnostics.transformers import ReportCallback

    history: list[Report] = []
    logged: dict[int, dict[str, float]] = {}
    log = to_callback(lambda values, step: logged.update({step: values}))
    callback = ReportCallback(history.append, log, every=3)
    run = trainer(tmp_path, callback, optimizer_cls_and_kwargs=(Adafactor, {"lr": 1e-2}))
    run.train()
    assert type(run.optimizer) is not Adafactor, "Accelerate has wrapped it"
    assert [report.step for report in history] == [3, 6, 7] == list(logged)
    assert [report[0].steps for report in history] == [3, 3, 1], "steps, not micro-batches"
    names = {name for name, _ in run.model.named_parameters()}
    assert {record.name for record in history[-1]} == names, "the Trainer gave the optimizer none"
    assert all(0.1 < record.rms_update < 10 for report in history for record in report)
    assert logged[7][f"rms_update/{(first := history[-1][0]).name}"] == first.rms_update
    assert diagnose(run.optimizer) == []


def test_a_resumed_transformers_run_goes_on_counting(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from adafactor.diagnostics.transformers import ReportCallback

    reports: list[Report] = []
    for resume in (None, str(tmp_path / "checkpoint-4")):
        reports.clear()
        run = trainer(
            tmp_path, ReportCallback(reports.append, every=3), optimizer_cls_and_kwargs=(Adafactor, {"lr": 1e-2})
        )
        run.train(resume_from_checkpoint=resume)
    assert [(report.step, report[0].steps) for report in reports] == [(7, 3)]


def test_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from adafactor.diagnostics.transformers import ReportCallback

    with pytest.raises(TypeError, match=r"diagnostics are of an adafactor\.Adafactor"):
        trainer(tmp_path, ReportCallback(print)).train()


# ---- Lightning


def fit(folder: Path, callback: Any, logger: Any = False, broken_at: int | None = None) -> None:
    L = pytest.importorskip("lightning")

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = classifier()

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            if number == broken_at:
                raise ZeroDivisionError
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Adafactor:
            return Adafactor(self.named_parameters())

    L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        callbacks=[callback],
        logger=logger,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    ).fit(Module(), data(2 * STEPS))


def test_a_lightning_trainer_is_watched_step_by_step(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from adafactor.diagnostics.lightning import ReportCallback

    history: list[Report] = []
    fit(tmp_path, ReportCallback(history.append, every=3))
    assert [(report.step, report[0].steps) for report in history] == [(3, 3), (6, 3), (7, 1)]
    assert [record.name for record in history[0]][:2] == ["net.0.weight", "net.0.bias"]


def test_without_sinks_the_figures_go_to_lightnings_loggers(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    from adafactor.diagnostics.lightning import ReportCallback

    fit(tmp_path, ReportCallback(every=3), logger=CSVLogger(tmp_path, name="", version=""))
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert "rms_update/net.0.weight" in lines[0] and len(lines) == 4


def test_the_last_report_is_taken_when_a_lightning_run_fails(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from adafactor.diagnostics.lightning import ReportCallback

    history: list[Report] = []
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, ReportCallback(history.append, every=100), broken_at=10)
    assert [report.step for report in history] == [5]
    with pytest.raises(ValueError, match="optimizer=1"):
        fit(tmp_path, ReportCallback(history.append, optimizer=1))


# ---- Accelerate


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """Its state is that of the process, and is put back."""
    package = pytest.importorskip("accelerate")
    yield package
    package.state.AcceleratorState._reset_state(reset_partial_state=True)
    package.state.GradientState._reset_state()


def test_accelerates_wrapped_optimizer_is_unwrapped_and_only_real_steps_count(accelerate: Any) -> None:
    model = classifier()
    inner = Adafactor(model.named_parameters())
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, inner, data(8))
    reports: list[Report] = []
    with Watch(optimizer, reports.append, every=3):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    assert unwrap(optimizer) is inner is not optimizer
    assert [report.step for report in reports] == [3, 4]


# ---- TensorBoard


def test_tensorboard_reads_back_what_was_reported(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = classifier()
    history: list[Report] = []
    optimizer = Adafactor(model.named_parameters())
    with SummaryWriter(str(tmp_path)) as writer, Watch(optimizer, history.append, to_tensorboard(writer), every=2):
        for x, y in data():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for figure in ("rms_update", "clip_rate", "relative_change"):
        for i, record in enumerate(history[0]):
            seen = [(event.step, event.value) for event in events.Scalars(f"{figure}/{record.name}")]
            told = [(report.step, pytest.approx(getattr(report[i], figure), rel=1e-6)) for report in history]
            assert seen == told and [step for step, _ in seen] == [2, 4, 6, 7]
    assert f"adafactor/{figure}_max" in events.Tags()["scalars"]
