"""A run that a Trainer saved goes on with ours, with the lines of the page."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adafactor
from adafactor import Adafactor
from adafactor.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported


def weights(model: nn.Module) -> list[Tensor]:
    # a key's bias has no gradient but rounding, which every Adafactor scales up as it does all others
    return [p.detach().clone() for name, p in model.named_parameters() if not name.endswith("c_attn.bias")]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in zip(ours, theirs, strict=True))


def section(title: str) -> tuple[list[str], list[str]]:
    """The commands and the Python lines of a section of docs/migrate.md."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^    ((?:mv|adafactor) .*)$", text, flags=re.M), re.findall(
        r"```py\n(.*?)```", text, flags=re.S
    )


@pytest.mark.slow
def test_a_trainers_run_goes_on_with_the_lines_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    tokens = torch.randint(17, (20, 9), generator=torch.Generator().manual_seed(0))
    sentences = [{"input_ids": row, "labels": row} for row in tokens]

    def model() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 17, "n_positions": 9, "n_embd": 8, "n_layer": 1, "n_head": 2}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))

    arguments = transformers.TrainingArguments(
        output_dir="out",
        optim="adafactor",
        learning_rate=1e-3,
        use_cpu=True,
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=2,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    theirs = transformers.Trainer(model=model(), args=arguments, train_dataset=sentences)
    theirs.train()
    (move, command), (resume, groups) = section("In the middle of a Trainer run")
    subprocess.run(move.replace("500", "3").split(), check=True)
    assert main(command.replace("500", "3").split()[1:]) == 0
    names: dict[str, Any] = {"model": model(), "arguments": arguments, "sentences": sentences, "adafactor": adafactor}
    names["Trainer"] = transformers.Trainer
    exec(compile(resume.replace("500", "3"), "block", "exec"), names)
    assert isinstance(names["trainer"].optimizer.optimizer, Adafactor)
    assert same(weights(names["trainer"].model), weights(theirs.model))
    exec(compile(groups, "block", "exec"), names)
    names["optimizer"].load_state_dict(torch.load("out/checkpoint-3/optimizer.pt", weights_only=True))
