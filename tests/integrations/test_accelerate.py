"""A loop around Accelerate with gradient accumulation: resumed from `save_state`, watched, and through TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adafactor import Adafactor, schedules, step_in_backward
from adafactor.diagnostics import Report, Watch, to_tensorboard, unwrap
from tests.exact import assert_float32_statistics, assert_same, copy_of

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow

ACCUMULATE, STEPS, SAVE_AFTER = 2, 6, 3  # batches per step; steps


@pytest.fixture(autouse=True)
def no_state_between_tests() -> Iterator[None]:
    """Accelerate keeps the mixed precision of the first `Accelerator` for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def batches() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    count = 4 * ACCUMULATE * STEPS
    x, y = torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


@dataclass
class Run:
    """What `accelerator.prepare` gave back."""

    accelerator: Any
    model: Any
    optimizer: Any
    batches: Any
    scheduler: Any

    def train(self, loader: Any, save_after: int | None = None, folder: Path | None = None) -> None:
        """One pass over the loader, with a checkpoint after that many batches."""
        for number, (x, y) in enumerate(loader, start=1):
            with self.accelerator.accumulate(self.model):
                logits = self.model(x.to(self.model[0].weight.dtype))
                self.accelerator.backward(nn.functional.cross_entropy(logits.float(), y))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if number == save_after:
                self.accelerator.save_state(folder)


def start(seed: int, dtype: torch.dtype = torch.float32, mixed_precision: str = "no", inside: bool = False) -> Run:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)
    optimizer = Adafactor(model.named_parameters(), lr=1.0, lr_decay=None, beta1=0.9)
    if inside:
        step_in_backward(model, optimizer, accumulate=ACCUMULATE)
    scheduler = schedules.warmup(optimizer, slope=1e-2)
    how = {"mixed_precision": mixed_precision, "gradient_accumulation_steps": ACCUMULATE}
    accelerator = accelerate.Accelerator(cpu=True, **how)
    return Run(accelerator, *accelerator.prepare(model, optimizer, batches(), scheduler))


@pytest.mark.parametrize(
    ("dtype", "mixed_precision"),
    [(torch.float32, "no"), (torch.float32, "bf16"), (torch.bfloat16, "no")],
    ids=["float32", "mixed", "bfloat16"],
)
def test_a_resumed_run_ends_on_the_same_bits(dtype: torch.dtype, mixed_precision: str, tmp_path: Path) -> None:
    whole = start(0, dtype, mixed_precision)
    whole.train(whole.batches, ACCUMULATE * SAVE_AFTER, tmp_path)
    resumed = start(1, dtype, mixed_precision)
    resumed.accelerator.load_state(tmp_path)
    assert_float32_statistics(resumed.optimizer.state_dict(), SAVE_AFTER)
    resumed.train(resumed.accelerator.skip_first_batches(resumed.batches, ACCUMULATE * SAVE_AFTER))
    assert_same(copy_of(resumed.model), copy_of(whole.model))
    assert_same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    assert_float32_statistics(resumed.optimizer.state_dict(), STEPS)


def test_the_wrapped_optimizer_is_watched_by_steps_and_tensorboard_reads_back_what_was_reported(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    run, history = start(0), list[Report]()
    with SummaryWriter(str(tmp_path)) as writer, Watch(run.optimizer, history.append, to_tensorboard(writer), every=4):
        run.train(run.batches)
    assert unwrap(run.optimizer) is not run.optimizer and [report.step for report in history] == [4, 6]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for metric in ("rms_update", "clip_rate", "relative_change"):
        for i, record in enumerate(history[0]):
            seen = [(event.step, event.value) for event in events.Scalars(f"{metric}/{record.name}")]
            assert seen == [(r.step, pytest.approx(getattr(r[i], metric), rel=1e-6)) for r in history]
        assert f"adafactor/{metric}_max" in events.Tags()["scalars"]


def test_the_step_moves_into_backward_on_the_same_bits_and_clipping_finds_nothing() -> None:
    ordinary, inside = start(0), start(0, inside=True)
    for run in (ordinary, inside):
        run.train(run.batches)
    assert_same(copy_of(inside.model), copy_of(ordinary.model))
    assert_float32_statistics(inside.optimizer.state_dict(), STEPS)
    for _ in range(ACCUMULATE):
        inside.accelerator.backward(inside.model(torch.ones(6)).square().sum())
    assert inside.accelerator.clip_grad_norm_(inside.model.parameters(), 1.0) == 0
