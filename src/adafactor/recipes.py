"""The paper's rows, and settings that others have trained with: `Adafactor(params, **recipes.LORA)`.

They are plain dicts of keywords; give another `lr`, or any keyword besides, as `{**recipes.LORA, "lr": 5e-5}`. None of
them was tuned by us. What a source does outside of its optimizer, such as a warm-up, is said and is yours to do.
"""

from __future__ import annotations

from typing import Any

PAPER: dict[str, Any] = {"lr": 1e-2, "lr_decay": "rsqrt", "relative": True, "decay_rate": 0.8, "clip": 1.0}
"""Shazeer & Stern (2018), Algorithm 6: the defaults, written out."""

_ABSOLUTE: dict[str, Any] = {"lr": 0.1, "lr_decay": None, "relative": False, "factored": False, "clip": None}
_RELATIVE: dict[str, Any] = {"lr": 1.0, "lr_decay": None, "relative": True, "factored": "outer", "clip": 1.0}
TABLE_2: dict[str, dict[str, Any]] = {
    "A": {**_ABSOLUTE, "beta2": 0.999},
    "B": {**_ABSOLUTE, "beta2": 0.999, "beta1": 0.9, "momentum_of": "gradient"},
    "C": {**_ABSOLUTE, "beta2": 0.999, "factored": "outer"},
    "D": {**_ABSOLUTE, "beta2": 0.999, "factored": "row"},
    "E": {**_ABSOLUTE, "beta2": 0.999, "factored": "column"},
    "F": {**_ABSOLUTE, "beta2": 0.99},
    "G": {**_ABSOLUTE, "beta2": 0.9},
    "H": {**_ABSOLUTE, "beta2": 0.999, "clip": 1.0},
    "I": {**_ABSOLUTE, "beta2": 0.999, "clip": 2.0},
    "J": {**_ABSOLUTE, "beta2": 0.999, "clip": 1.0, "factored": "outer"},
    "K": {**_ABSOLUTE, "decay_rate": 0.5},
    "L": {**_ABSOLUTE, "decay_rate": 0.8},
    "M": {**_ABSOLUTE, "decay_rate": 1.0},
    "N": {**_ABSOLUTE, "decay_rate": 0.8, "clip": 1.0},
    "O": {**_RELATIVE, "decay_rate": 0.8},
    "P": {**_RELATIVE, "decay_rate": 0.8, "beta1": 0.9, "momentum_of": "update"},
}
"""Shazeer & Stern (2018), Table 2, rows A to P: `Adafactor(params, **recipes.TABLE_2["J"])`.

Their lr is the factor before the paper's sₜ, which a schedule gives: `schedules.warmup(optimizer)`, or without warm-up
torch's `LambdaLR(optimizer, lambda t: schedules.without_warmup(t + 1))`.
"""

T5: dict[str, Any] = {"lr": 1e-3, "lr_decay": None, "relative": True}
"""Fine-tuning of T5 as given in T5X, `t5x/configs/runs/finetune.gin`: a constant 0.001, times the parameters' scale."""

T5_TRANSFORMERS: dict[str, Any] = {"lr": 1e-3, "lr_decay": None, "relative": False, "clip": 1.0}
"""Fine-tuning of T5 as given in transformers' documentation of its Adafactor, with a warm-up to a fixed lr."""

BIG_VISION: dict[str, Any] = {
    **{"lr": 1e-3, "lr_decay": None, "relative": False, "clip": None, "beta2_max": 0.999, "min_factored": 32},
    **{"beta1": 0.9, "momentum_of": "direction", "momentum_dtype": "bfloat16"},
}
"""Vision models (Zhai et al. 2021) as given in `big_vision/optax.py`, with the lr of `siglip_lit_coco.py`.

There, gradients are clipped to a global norm of 1, lr rises and falls with a schedule, and the momentum is rounded to
nearest. Its `wd` is multiplied by that schedule alone: our `weight_decay` is wd/lr.
"""

LORA: dict[str, Any] = {"lr": 1e-4, "lr_decay": None, "relative": False}
"""LoRA for FLUX.1 as given in kohya's sd-scripts, `docs/flux_train_network.md`: constant after a warm-up, no clipping
of gradients."""

SDXL: dict[str, Any] = {"lr": 4e-7, "lr_decay": None, "relative": False}
"""All weights of Stable Diffusion XL as given in the README of kohya's sd-scripts: constant after 100 steps of warm-up.

For weights in bfloat16 add `rounding="stochastic"`: to nearest, such steps are lost.
"""

__all__ = ["BIG_VISION", "LORA", "PAPER", "SDXL", "T5", "T5_TRANSFORMERS", "TABLE_2"]
