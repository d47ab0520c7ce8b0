"""transformers' `Trainer` with a tiny GPT-2: killed after a checkpoint, it goes on as if it had not been."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor, schedules
from tests.integrations.exact import assert_float32_statistics, assert_same, copy_of

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow

STEPS, SAVE_AFTER = 6, 3


def sentences() -> list[dict[str, Tensor]]:
    """Random tokens, the same in every run."""
    tokens = torch.randint(17, (20, 9), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def gpt2(seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=9, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).to(dtype)
    return model


def by_class(model: nn.Module) -> dict[str, Any]:
    """The `Trainer` makes the optimizer: two groups, of which one has weight decay."""
    return {"optimizer_cls_and_kwargs": (Adafactor, {"lr": 1e-2, "beta1": 0.9})}


def by_object(model: nn.Module) -> dict[str, Any]:
    """We make the optimizer, with names, and its warm-up."""
    optimizer = Adafactor(model.named_parameters(), lr=1.0, lr_decay=None)
    return {"optimizers": (optimizer, schedules.warmup(optimizer, slope=1e-2))}


def trainer(model: nn.Module, folder: Path, **optimizer: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        save_steps=SAVE_AFTER,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=sentences(), **optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("how", [by_class, by_object])
def test_a_resumed_run_ends_on_the_same_bits(how: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model = gpt2(0, dtype)
    whole = trainer(model, tmp_path / "whole", **how(model))
    whole.train()

    model = gpt2(1, dtype)
    resumed = trainer(model, tmp_path / "resumed", **how(model))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{SAVE_AFTER}"))

    assert resumed.state.global_step == STEPS
    assert_same(copy_of(resumed.model), copy_of(whole.model))
    assert_same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    assert_float32_statistics(resumed.optimizer.state_dict(), STEPS)
