"""Runs that others' trainers saved: converted in place, they go on with ours."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader, TensorDataset

import adafactor
from adafactor import Adafactor
from adafactor.cli import main
from tests.migration.test_files import Bomb

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator))


def train(model: nn.Module, optimizer: Any, span: range) -> None:
    x, y = data().tensors
    for t in span:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[4 * t : 4 * t + 4]), y[4 * t : 4 * t + 4]).backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    # a key's bias has no gradient but rounding, which every Adafactor scales up as it does all others
    return [p.detach().clone() for name, p in model.named_parameters() if not name.endswith("c_attn.bias")]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in zip(ours, theirs, strict=True))


def section(title: str) -> tuple[list[str], list[str]]:
    """The commands and the Python lines of a section of docs/migrate.md."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^    adafactor (.*)$", text, flags=re.M), re.findall(r"```py\n(.*?)```", text, flags=re.S)


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
    (command,), (resume, groups) = section("In the middle of a Trainer run")
    assert main(command.replace("500", "3").split()) == 0
    assert sorted(path.name for path in Path("out/checkpoint-3").glob("optimizer*")) == [
        "optimizer.pt",
        "optimizer.pt.before",
    ]
    names: dict[str, Any] = {"model": model(), "arguments": arguments, "sentences": sentences, "adafactor": adafactor}
    names["Trainer"] = transformers.Trainer
    exec(compile(resume.replace("500", "3"), "block", "exec"), names)
    assert isinstance(names["trainer"].optimizer.optimizer, Adafactor)
    assert same(weights(names["trainer"].model), weights(theirs.model))
    exec(compile(groups, "block", "exec"), names)
    names["optimizer"].load_state_dict(torch.load("out/checkpoint-3/optimizer.pt", weights_only=True))


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The package, whose `Accelerator` leaves its settings behind in the process."""
    package = pytest.importorskip("accelerate")
    yield package
    package.state.AcceleratorState._reset_state(reset_partial_state=True)
    package.state.GradientState._reset_state()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
def test_accelerates_folder_goes_on(accelerate: Any, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = net()
    prepared, theirs = accelerator.prepare(model, torch.optim.Adafactor(model.parameters(), lr=0.1))
    train(prepared, theirs, range(4))
    accelerator.save_state(tmp_path / "state")
    train(prepared, theirs, range(4, 8))
    assert main(["migrate", str(tmp_path / "state"), "--in-place"]) == 0
    accelerator = accelerate.Accelerator(cpu=True)
    twin = net()
    prepared_twin, ours = accelerator.prepare(twin, Adafactor(twin.parameters()))
    accelerator.load_state(tmp_path / "state")
    train(prepared_twin, ours, range(4, 8))
    assert ours.param_groups[0]["lr"] == 0.1 and same(weights(twin), weights(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_lightnings_checkpoint_goes_on(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, optimizer: Any):
            super().__init__()
            self.net, self.optimizer = net(), optimizer

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return self.optimizer(self.parameters())

    def fit(module: Any, epochs: int, checkpoint: str | None = None) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", enable_checkpointing=False, default_root_dir=tmp_path, **quiet
        )
        trainer.fit(module, DataLoader(data(), batch_size=4), ckpt_path=checkpoint)
        return trainer

    theirs = Classifier(lambda params: torch.optim.Adafactor(params, lr=0.1))
    fit(theirs, 1).save_checkpoint(tmp_path / "last.ckpt")
    fit(theirs, 2, str(tmp_path / "last.ckpt"))
    assert main(["migrate", str(tmp_path), "--in-place"]) == 0
    ours = Classifier(Adafactor)
    fit(ours, 2, str(tmp_path / "last.ckpt"))
    assert same(weights(ours), weights(theirs))


@pytest.mark.filterwarnings("ignore::adafactor.MigrationWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("source", ["adamw", "torch"])
@pytest.mark.parametrize("named", [True, False])
def test_a_folder_of_distributed_checkpoint_goes_on(source: str, named: bool, tmp_path: Path) -> None:
    model, folder = net(), tmp_path / "step-4"
    make = torch.optim.AdamW if source == "adamw" else torch.optim.Adafactor
    theirs = make(model.named_parameters() if named else model.parameters(), lr=1e-2)
    train(model, theirs, range(4))
    their_weights, their_state = get_state_dict(model, theirs)
    save({"model": their_weights, "optimizer": their_state, "epoch": 3}, checkpoint_id=folder)
    assert main(["migrate", str(folder), "--in-place"]) == 0
    assert (tmp_path / "step-4.before" / ".metadata").exists() and len(list(tmp_path.iterdir())) == 2

    twin = net()
    ours = adafactor.like(source, twin.named_parameters() if named else twin.parameters())  # has what is to be loaded
    our_weights, our_state = get_state_dict(twin, ours)
    everything = {"model": our_weights, "optimizer": our_state, "epoch": 0}
    load(everything, checkpoint_id=folder)
    set_state_dict(twin, ours, model_state_dict=our_weights, optim_state_dict=our_state)
    direct = Adafactor(model.parameters())
    direct.load_state_dict(adafactor.migrate(theirs.state_dict()))
    assert everything["epoch"] == 3 and ours.param_groups[0]["lr"] == 1e-2
    train(twin, ours, range(4, 8))
    train(model, direct, range(4, 8))
    assert same(weights(twin), weights(model))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_nothing_in_a_folder_of_distributed_checkpoint_is_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, proof = tmp_path / "in", tmp_path / "proof"
    held: dict[str, Any] = {"state": {}, "param_groups": [], "more": Bomb(proof) if name != ".metadata" else 3}
    save(held, checkpoint_id=folder)
    if name == ".metadata":
        (folder / name).write_bytes(pickle.dumps(Bomb(proof)))
    assert main(["migrate", str(folder), str(tmp_path / "out.pt")]) == 2
    assert "nothing else is read from a checkpoint" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
