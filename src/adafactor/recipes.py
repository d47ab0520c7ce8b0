"""Settings that others have trained with, each as its source gives it: `Adafactor(params, **recipes.PALM)`.

They are plain dicts of keywords; give another `lr`, or any keyword besides, as `{**recipes.LORA, "lr": 5e-5}`. None of
them was tuned by us. What a source does outside of its optimizer, such as a warm-up, is said and is yours to do.
"""

from __future__ import annotations

from typing import Any

PAPER: dict[str, Any] = {"lr": 1e-2, "lr_decay": "rsqrt", "relative": True, "decay_rate": 0.8, "clip": 1.0}
"""Shazeer & Stern (2018), Algorithm 6: the defaults, written out."""

T5: dict[str, Any] = {"lr": 1e-3, "lr_decay": None, "relative": True}
"""Fine-tuning of T5 as given in T5X, `t5x/configs/runs/finetune.gin`: a constant 0.001, times the parameters' scale."""

T5_TRANSFORMERS: dict[str, Any] = {"lr": 1e-3, "lr_decay": None, "relative": False, "clip": 1.0}
"""Fine-tuning of T5 as given in transformers' documentation of its Adafactor, with a warm-up to a fixed lr."""

PALM: dict[str, Any] = {
    **{"lr": 1e-2, "lr_decay": "rsqrt", "relative": True, "factored": False, "beta1": 0.9, "decay_rate": 0.8},
    **{"weight_decay": 1.0, "weight_decay_by": 1.0},  # of ρₜ²/1
}
"""Pre-training as given in PaLM (Chowdhery et al. 2022, §5), with gradients clipped to a global norm of 1."""

BIG_VISION: dict[str, Any] = {
    **{"lr": 1e-3, "lr_decay": None, "relative": False, "clip": None, "beta2_max": 0.999, "min_factored": 32},
    **{"beta1": 0.9, "momentum_of": "direction", "momentum_dtype": "bfloat16", "momentum_rounding": "nearest"},
}
"""Vision models (Zhai et al. 2021) as given in `big_vision/optax.py`, with the lr of `siglip_lit_coco.py`.

There, gradients are clipped to a global norm of 1, and lr rises and falls with a schedule. Its `wd` is multiplied by
that schedule alone: our `weight_decay` is wd/lr.
"""

PRAXIS: dict[str, Any] = {
    **{"lr_decay": None, "relative": False, "clip": 1.0, "beta2": 0.98},
    **{"beta1": 0.9, "momentum_dtype": "int8", "momentum_rounding": "nearest"},
}
"""`ShardedAdafactor.HParamsAdamB` as given in `praxis/optimizers.py`, without an lr: give yours.

Its int8 momentum has a scale for each column, ours for every 128 elements.
"""

LORA: dict[str, Any] = {"lr": 1e-4, "lr_decay": None, "relative": False}
"""LoRA for FLUX.1 as given in kohya's sd-scripts, `docs/flux_train_network.md`: constant after a warm-up, no clipping
of gradients."""

SDXL: dict[str, Any] = {"lr": 4e-7, "lr_decay": None, "relative": False}
"""All weights of Stable Diffusion XL as given in the README of kohya's sd-scripts: constant after 100 steps of warm-up.

For weights in bfloat16 add `rounding="stochastic"`: to nearest, such steps are lost.
"""

ONETRAINER: dict[str, Any] = {"lr_decay": None, "relative": False, "clip": 1.0, "rounding": "stochastic"}
"""Diffusion models as given in OneTrainer, `modules/util/optimizer_util.py`, without an lr, which its presets have for
each model: give yours."""

__all__ = ["BIG_VISION", "LORA", "ONETRAINER", "PALM", "PAPER", "PRAXIS", "SDXL", "T5", "T5_TRANSFORMERS"]
