"""Trainers that take an optimizer by its path in a configuration: each with the package's own code that makes it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor, hf
from adafactor.trainers import FromModel

ROOT = Path(__file__).parents[2]
ABSOLUTE = {"lr": 1e-3, "relative": False, "lr_decay": None, "eps": [1e-30, 1e-3], "axes": [0, 1]}

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages' imports


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))


def assert_steps(optimizer: Any, model: nn.Module, kind: type[Adafactor] = Adafactor) -> None:
    """It is ours with plain settings, it steps, and its checkpoint is loaded without code of others."""
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert (group["lr"], group["relative"], group["lr_decay"]) == (1e-3, False, None)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("convert", ["none", "all"])
def test_hydra_instantiates_it_with_pairs_of_its_own_kind(convert: str) -> None:
    hydra, omegaconf = pytest.importorskip("hydra.utils"), pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"_target_": "adafactor.Adafactor", "_convert_": convert, **ABSOLUTE})
    model = net()
    optimizer = hydra.instantiate(config, params=model.parameters())
    assert tuple(optimizer.param_groups[0]["eps"]) == (1e-30, 1e-3)
    assert_steps(optimizer, model)


def test_omegaconf_values_may_be_given_as_they_are() -> None:
    """As torchtune does with optimizer_in_bwd."""
    omegaconf = pytest.importorskip("omegaconf")
    model = net()
    assert_steps(Adafactor(model.parameters(), **omegaconf.OmegaConf.create(ABSOLUTE)), model)


@pytest.mark.parametrize("path", ["adafactor.Adafactor", "adafactor.hf.Adafactor"])
def test_litgpt_makes_it_by_path_or_with_arguments(path: str) -> None:
    utils = pytest.importorskip("litgpt.utils")
    theirs = {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "rounding": "stochastic"}
    arguments = theirs if "hf" in path else {**ABSOLUTE, "rounding": "stochastic"}
    model = net()
    config = {"class_path": path, "init_args": dict(arguments)}
    optimizer = utils.instantiate_torch_optimizer(config, model.parameters(), fused=True, betas=(0.9, 0.95))
    assert optimizer.param_groups[0]["rounding"] == "stochastic"
    assert_steps(optimizer, model, hf.Adafactor if "hf" in path else Adafactor)
    assert type(utils.instantiate_torch_optimizer(path, net().parameters())).__module__.startswith("adafactor")


def test_nemo_automodel_makes_it_from_a_target() -> None:
    loader = pytest.importorskip("nemo_automodel.components.config.loader")
    optim = importlib.import_module("nemo_automodel.components.optim.optimizer")
    section = loader.ConfigNode({"_target_": "adafactor.Adafactor", **ABSOLUTE}).to_dict()
    target = section.pop("_target_")
    model = net()
    (optimizer,) = optim.build_optimizer_config(target, section).build(model)
    assert_steps(optimizer, model)


def test_torchtitan_makes_it_in_a_subclass() -> None:
    titan = pytest.importorskip("torchtitan.components.optimizer.optimizer")

    class Container(titan.OptimizersContainer):  # type: ignore[misc, name-defined]
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return {"Adafactor": Adafactor}[name]

    group = titan.ParamGroupConfig(pattern=".*", optimizer_name="Adafactor", optimizer_kwargs=ABSOLUTE)
    model = net()
    (optimizer,) = Container(titan.OptimizersContainer.Config(param_groups=[group]), model_parts=[model]).optimizers
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "1.weight"]
    assert_steps(optimizer, model)


def test_llm_foundry_finds_it_by_its_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    name, path = re.findall(r'\[project.entry-points.llmfoundry_optimizers\].*\n(\w+) = "(.*)"', text)[0]
    assert name == "adafactor" and EntryPoint(name, path, "llmfoundry_optimizers").load() is Adafactor


def arguments_for(optim_args: str) -> Any:
    """What FromModel looks at in transformers' TrainingArguments; those of transformers if they are there."""
    values: dict[str, Any] = {
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "optim_args": optim_args,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
    }
    transformers = pytest.importorskip("transformers")
    return transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], **values)


def test_axolotl_makes_it_by_its_plugin() -> None:
    base, mixin = (
        pytest.importorskip(f"axolotl.{name}") for name in ("integrations.base", "core.trainers.mixins.optimizer")
    )
    manager, arguments = base.PluginManager.get_instance(), arguments_for("rounding=stochastic")
    for name in ("loraplus_lr_ratio", "embedding_lr_scale", "embedding_lr", "lr_groups"):
        setattr(arguments, name, None)  # axolotl's own
    manager.register("adafactor.axolotl.Plugin")
    model = net()
    trainer = SimpleNamespace(args=arguments, model=model, optimizer=None, optimizer_cls_and_kwargs=None)
    try:
        manager.post_trainer_create({}, trainer)
    finally:
        del manager.plugins["adafactor.axolotl.Plugin"]
    optimizer = mixin.OptimizerMixin.create_optimizer(trainer)
    assert optimizer.param_groups[0]["rounding"] == "stochastic"
    assert_steps(optimizer, model)


def test_ms_swift_makes_it_by_the_plugin_file(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pytest.importorskip("transformers.trainer")
    for name in (
        "DEFAULT_PROGRESS_CALLBACK",
        "DEFAULT_CALLBACKS",
        "PrinterCallback",
    ):  # importing swift exchanges these
        monkeypatch.setattr(trainer, name, getattr(trainer, name))
    swift = pytest.importorskip("swift.optimizers")
    spec = importlib.util.spec_from_file_location("swift_plugin", ROOT / "examples/swift_plugin.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    model, arguments = net(), arguments_for("")
    callback = swift.optimizers_map.pop("adafactor")(arguments, SimpleNamespace(model=model))
    assert_steps(callback.create_optimizer(), model)


def test_training_arguments_give_what_is_not_given() -> None:
    model, arguments = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), arguments_for("rounding=kahan,seed=3")
    matrices, vectors = FromModel()(model, arguments, seed=4).param_groups
    assert (matrices["lr"], matrices["relative"], matrices["rounding"], matrices["seed"]) == (1e-3, False, "kahan", 4)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert arguments.max_grad_norm == 1.0


@pytest.mark.parametrize("way", ["keyword", "optim_args"])
def test_training_arguments_give_accumulation_and_the_norm_for_the_step_in_backward(way: str) -> None:
    model, arguments = net(), arguments_for("step_in_backward=true" if way == "optim_args" else "")
    optimizer = FromModel()(model, arguments, **({"step_in_backward": True} if way == "keyword" else {}))
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 6)).sum().backward()
    assert all(map(torch.equal, before, model.parameters())), "the first of two"
    model(torch.ones(2, 6)).sum().backward()
    assert not any(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert optimizer.param_groups[0]["grad_norm"] > 0 and arguments.max_grad_norm == 0


# The two ways of kohya's scripts and musubi-tuner, as they are written there: a path with Python literals, and hooks.
def kohya(optimizer_type: str, optimizer_args: list[str], params: Any, lr: float) -> Any:
    keywords = {}
    for word in optimizer_args:
        key, value = word.split("=")
        keywords[key] = ast.literal_eval(value)
    module, _, name = optimizer_type.rpartition(".")
    return getattr(importlib.import_module(module), name)(params, lr=lr, **keywords)


def test_the_arguments_of_every_kohya_guide_are_taken_by_the_path_of_ours() -> None:
    words = ["scale_parameter=False", "relative_step=False", "warmup_init=False", "rounding='stochastic'"]
    model = net()
    optimizer = kohya("adafactor.hf.Adafactor", words, model.parameters(), 1e-3)
    assert optimizer.param_groups[0]["rounding"] == "stochastic"
    assert_steps(optimizer, model, hf.Adafactor)


def test_an_optimizer_for_each_block_steps_inside_backward() -> None:
    """--blockwise_fused_optimizers and --fused_optimizer_groups: the last gradient of a block steps its optimizer."""
    model = net()
    optimizers = [
        kohya("adafactor.Adafactor", ["relative=False", "lr_decay=None"], [p], 1e-3) for p in model.parameters()
    ]
    for p, optimizer in zip(model.parameters(), optimizers, strict=True):

        def hook(_: Any, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        p.register_post_accumulate_grad_hook(hook)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 6)).sum().backward()
    assert not any(map(torch.equal, before, model.parameters())) and all(p.grad is None for p in model.parameters())


def test_kohyas_own_fused_pass_is_told_that_the_state_is_another() -> None:
    """It asks transformers' class, in whose place `adafactor run` has put ours, before it touches a state."""
    optimizer = hf.Adafactor(net().parameters())
    with pytest.raises(RuntimeError, match="--blockwise_fused_optimizers or --fused_optimizer_groups"):
        type(optimizer)._get_options(optimizer.param_groups[0], (6, 5))


@pytest.mark.parametrize("loaded", [False, True])
def test_musubi_tuners_fused_pass_is_told_what_to_use_instead(loaded: bool) -> None:
    """It does not ask, and looks for transformers' entries in our state: before the first step and after a resume."""
    model = net()
    optimizer = hf.Adafactor(model.parameters())
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[next(model.parameters())]
    for key in ("exp_avg", "exp_avg_sq_row", "RMS"):
        with pytest.raises(KeyError, match="--blockwise_fused_optimizers or --fused_optimizer_groups"):
            state[key]
    with pytest.raises(KeyError, match="^'mine'$"):
        state["mine"]
    assert {type(entry) for entry in optimizer.state_dict()["state"].values()} == {dict}  # for weights_only
