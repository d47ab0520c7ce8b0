"""transformers' `Trainer` with a tiny GPT-2: resumed, watched, made from the model, and stepping inside backward."""

from __future__ import annotations

import os
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module

from adafactor import Adafactor, schedules
from adafactor.diagnostics import Report, diagnose, to_callback
from adafactor.trainers import FromModel
from tests.exact import assert_float32_statistics, assert_same, copy_of

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS, SAVE_AFTER, ACCUMULATE = 7, 3, 2
MADE = {"optimizer_cls_and_kwargs": (Adafactor, {"lr": 1e-2, "beta1": 0.9})}


def gpt2(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 17, "n_positions": 9, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    return model.to(dtype)  # type: ignore[no-any-return]


def trainer(model: nn.Module, folder: Path, callbacks: tuple[Any, ...] = (), **given: Any) -> Any:
    tokens = torch.randint(17, (20, 9), generator=torch.Generator().manual_seed(0))
    optimizer = {name: given.pop(name) for name in ("optimizers", "optimizer_cls_and_kwargs") if name in given}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        save_steps=SAVE_AFTER,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
        **{"weight_decay": 0.1, "max_grad_norm": 0.0, **given},
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks), **optimizer)


def by_object(model: nn.Module) -> dict[str, Any]:
    """We make the optimizer, with names, and its warm-up."""
    optimizer = Adafactor(model.named_parameters(), lr=1.0, lr_decay=None)
    return {"optimizers": (optimizer, schedules.warmup(optimizer, slope=1e-2))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "dtype"), [(lambda _: MADE, torch.bfloat16), (by_object, torch.float32)], ids=["class", "object"]
)
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


@pytest.mark.slow
def test_a_run_is_watched_step_by_step_and_goes_on_counting_when_resumed(tmp_path: Path) -> None:
    from adafactor.diagnostics.transformers import ReportCallback

    history: list[Report] = []
    logged: dict[int, dict[str, float]] = {}
    callback = ReportCallback(history.append, to_callback(lambda values, step: logged.update({step: values})), every=3)
    run = trainer(gpt2(), tmp_path, (callback,), **MADE)
    run.train()
    assert type(run.optimizer) is not Adafactor, "Accelerate has wrapped it"
    assert [(report.step, report[0].steps) for report in history] == [(3, 3), (6, 3), (7, 1)] and [*logged] == [3, 6, 7]
    assert all(report.loss is not None for report in history), "the Trainer's own"
    assert {record.name for record in history[-1]} == {name for name, _ in run.model.named_parameters()}
    assert logged[7][f"rms_update/{history[-1][0].name}"] == history[-1][0].rms_update
    assert diagnose(run.optimizer) == []
    history.clear()
    again = trainer(gpt2(1), tmp_path, (ReportCallback(history.append, every=3),), **MADE)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVE_AFTER}"))
    assert [(report.step, report[0].steps) for report in history] == [(6, 3), (7, 1)]
    with pytest.raises(TypeError, match=r"diagnostics are of an adafactor\.Adafactor"):
        trainer(gpt2(), tmp_path, (ReportCallback(print),)).train()


@pytest.mark.slow
def test_from_the_model_the_step_moves_into_backward_on_the_same_bits_with_the_norm_in_its_group(
    tmp_path: Path,
) -> None:
    """As docs/recipes.md writes it."""
    runs = []
    for more in ({}, {"step_in_backward": True, "accumulate": ACCUMULATE}):
        keywords = {"lr": 1e-3, "relative": False, "lr_decay": None, "weight_decay": 0.1, **more}
        run = trainer(gpt2(), tmp_path, optimizer_cls_and_kwargs=(FromModel, keywords))
        run.train()
        runs.append(run)
    ordinary, inside = runs
    assert_same(copy_of(inside.model), copy_of(ordinary.model))
    matrices, vectors = inside.optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in matrices["params"]} == {2} and {p.ndim for p in vectors["params"]} == {1}
    assert "transformer.wte.weight" in matrices["param_names"]
    assert "grad_norm" in matrices, "it was attached"
    norms = [[entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry] for run in runs]
    assert norms[1] == [0.0] * STEPS, "the trainer finds no gradients"
    assert matrices["grad_norm"].item() == pytest.approx(norms[0][-1], rel=1e-5)


@pytest.mark.slow
def test_the_block_in_the_recipes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    (block,) = [code for code in re.findall(r"``` {.python}\n(.*?)```", text, re.S) if "FromModel" in code]
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(block, "block", "exec"), found)
    assert float(found["trainer"].optimizer.param_groups[0]["grad_norm"]) > 0


def test_frozen_parameters_are_left_out_and_a_model_of_matrices_has_one_group() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    (group,) = FromModel()(model).param_groups
    assert group["param_names"] == ["1.weight"]


def in_processes(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let trainers believe that there are so many."""
    patch.setattr("adafactor.trainers.is_initialized", lambda: True)
    patch.setattr("adafactor.trainers.get_world_size", lambda: count)


def test_among_several_processes_without_fsdp_the_step_in_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer wraps the model in DistributedDataParallel only afterwards, so that nobody else could notice."""
    in_processes(monkeypatch, 2)
    model = nn.Linear(3, 2)
    optimizer = FromModel()(model, step_in_backward=True)
    with pytest.raises(ValueError, match="among 2 processes needs a model that FSDP2 has sharded"):
        model(torch.ones(3))
    optimizer = FromModel()(model)
    model(torch.ones(3)).sum().backward()
    optimizer.step()


def test_among_processes_it_is_attached_when_the_model_is_called_and_does_not_keep_it_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_processes(monkeypatch, 1)
    model, another = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = FromModel()(model, step_in_backward=True)
    another(torch.ones(3))
    assert model.weight._post_accumulate_grad_hooks is None
    nn.Sequential(model, nn.Tanh())(torch.ones(3)).sum().backward()
    assert float(optimizer.state[model.weight]["step"]) == 1
    reference = weakref.ref(another)
    FromModel()(another, step_in_backward=True)
    del another
    assert reference() is None
    nn.Linear(3, 2)(torch.ones(3))
    assert not module._global_forward_pre_hooks
