"""Trainers that take an optimizer by its path in a configuration: each with the package's own code that makes it."""

from __future__ import annotations

import ast
import importlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor, hf

ABSOLUTE = {"lr": 1e-3, "relative": False, "lr_decay": None, "eps": [1e-30, 1e-3], "axes": [0, 1]}

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages' imports


def hydra(model: nn.Module) -> Any:
    utils, omegaconf = pytest.importorskip("hydra.utils"), pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"_target_": "adafactor.Adafactor", **ABSOLUTE})
    return utils.instantiate(config, params=model.parameters())


def litgpt(model: nn.Module) -> Any:
    utils = pytest.importorskip("litgpt.utils")
    config = {"class_path": "adafactor.Adafactor", "init_args": dict(ABSOLUTE)}
    return utils.instantiate_torch_optimizer(config, model.parameters(), fused=True, betas=(0.9, 0.95))


def nemo_automodel(model: nn.Module) -> Any:
    loader = pytest.importorskip("nemo_automodel.components.config.loader")
    optim = importlib.import_module("nemo_automodel.components.optim.optimizer")
    section = loader.ConfigNode({"_target_": "adafactor.Adafactor", **ABSOLUTE}).to_dict()
    (optimizer,) = optim.build_optimizer_config(section.pop("_target_"), section).build(model)
    return optimizer


def torchtitan(model: nn.Module) -> Any:
    titan = pytest.importorskip("torchtitan.components.optimizer.optimizer")

    class Container(titan.OptimizersContainer):  # type: ignore[misc, name-defined]
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return {"Adafactor": Adafactor}[name]

    group = titan.ParamGroupConfig(pattern=".*", optimizer_name="Adafactor", optimizer_kwargs=ABSOLUTE)
    (optimizer,) = Container(titan.OptimizersContainer.Config(param_groups=[group]), model_parts=[model]).optimizers
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "1.weight"]
    return optimizer


def kohya(model: nn.Module) -> Any:
    """A path with Python literals, as kohya's scripts and musubi-tuner read them."""
    words = ["scale_parameter=False", "relative_step=False", "warmup_init=False", "rounding='stochastic'"]
    keywords = {word.split("=")[0]: ast.literal_eval(word.split("=")[1]) for word in words}
    module, _, name = "adafactor.hf.Adafactor".rpartition(".")
    return getattr(importlib.import_module(module), name)(model.parameters(), lr=1e-3, **keywords)


@pytest.mark.parametrize("make", [hydra, litgpt, nemo_automodel, torchtitan, kohya])
def test_it_is_made_with_its_settings_and_steps_and_its_checkpoint_needs_no_code(
    make: Callable[[nn.Module], Any],
) -> None:
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))
    optimizer = make(model)
    assert type(optimizer) is (hf.Adafactor if make is kohya else Adafactor)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["relative"], group["lr_decay"]) == (1e-3, False, None)
    assert tuple(group["eps"]) == (1e-30, 1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))


def test_kohyas_own_fused_pass_is_told_that_the_state_is_another() -> None:
    """It asks transformers' class, in whose place `adafactor run` has put ours, before it touches a state."""
    optimizer = hf.Adafactor([nn.Parameter(torch.ones(6, 5))])
    with pytest.raises(RuntimeError, match="--blockwise_fused_optimizers or --fused_optimizer_groups"):
        type(optimizer)._get_options(optimizer.param_groups[0], (6, 5))
