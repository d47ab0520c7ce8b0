"""`FromModel` in transformers' `Trainer`: names, groups, and the step inside backward, all on the same bits."""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module

from adafactor import Adafactor
from adafactor.trainers import FromModel
from tests.integrations.exact import assert_same, copy_of

STEPS, ACCUMULATE = 4, 2


def trained(folder: Path, **keywords: Any) -> tuple[dict[str, Tensor], Any, list[float]]:
    """A tiny GPT-2 after some steps: its weights, its optimizer, and the norms that were logged."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=17, n_positions=9, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    tokens = torch.randint(17, (20, 9), generator=torch.Generator().manual_seed(0))
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            max_steps=STEPS,
            save_strategy="no",
            logging_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=ACCUMULATE,
            max_grad_norm=0.0,
            dataloader_pin_memory=False,
            report_to=[],
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizer_cls_and_kwargs=(FromModel, {"lr": 1e-2, "weight_decay": 0.1, **keywords}),
    )
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return copy_of(model), trainer.optimizer.optimizer, norms


@pytest.mark.slow
def test_the_trainer_gets_names_and_groups(tmp_path: Path) -> None:
    _, optimizer, _ = trained(tmp_path)
    assert type(optimizer) is Adafactor
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in matrices["params"]} == {2} and {p.ndim for p in vectors["params"]} == {1}
    assert "transformer.wte.weight" in {record.name for record in optimizer.report()}


@pytest.mark.slow
def test_the_step_moves_into_backward_on_the_same_bits(tmp_path: Path) -> None:
    ordinary, _, expected = trained(tmp_path)
    inside, optimizer, norms = trained(tmp_path, step_in_backward=True, accumulate=ACCUMULATE, max_norm=math.inf)
    assert_same(inside, ordinary)
    assert "grad_norm" in optimizer.param_groups[0], "it was attached"
    assert norms == pytest.approx(expected, rel=1e-5)


def test_a_model_of_matrices_alone_has_one_group() -> None:
    (group,) = FromModel()(nn.Linear(3, 2, bias=False)).param_groups
    assert group["param_names"] == ["weight"]


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = FromModel()(model)
    assert [name for group in optimizer.param_groups for name in group["param_names"]] == ["1.weight", "1.bias"]


def in_processes(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let trainers believe that there are so many."""
    patch.setattr("adafactor.trainers.is_initialized", lambda: True)
    patch.setattr("adafactor.trainers.get_world_size", lambda: count)


def test_the_step_in_backward_is_refused_among_several_processes_without_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer wraps the model in DistributedDataParallel only afterwards, so that nobody else could notice."""
    in_processes(monkeypatch, 2)
    model = nn.Linear(3, 2)
    optimizer = FromModel()(model, step_in_backward=True)
    with pytest.raises(ValueError, match="among 2 processes needs a model that FSDP2 has sharded.*process_group=…"):
        model(torch.ones(3))
    optimizer = FromModel()(model)
    model(torch.ones(3)).sum().backward()
    optimizer.step()


def test_among_processes_it_is_attached_when_the_model_or_what_wraps_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_processes(monkeypatch, 1)
    model, another = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = FromModel()(model, step_in_backward=True)
    another(torch.ones(3))
    assert model.weight._post_accumulate_grad_hooks is None
    nn.Sequential(model, nn.Tanh())(torch.ones(3)).sum().backward()
    assert float(optimizer.state[model.weight]["step"]) == 1
    assert not module._global_forward_pre_hooks


def test_a_model_that_nobody_calls_is_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    in_processes(monkeypatch, 1)
    model = nn.Linear(3, 2)
    reference = weakref.ref(model)
    FromModel()(model, step_in_backward=True)
    del model
    assert reference() is None
    nn.Linear(3, 2)(torch.ones(3))
    assert not module._global_forward_pre_hooks
