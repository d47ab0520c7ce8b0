"""Whose state dict is it? Told from the keys of its groups, which no two optimizers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# what `migrate` calls the source → its name, and keys that its groups have; the first that fits
SIGNS: dict[str, tuple[str, frozenset[str]]] = {
    "adafactor": ("this optimizer", frozenset({"lr_decay", "relative", "factored", "decay_rate"})),
    "torch": ("torch.optim.Adafactor", frozenset({"beta2_decay", "d"})),
    "timm": ("timm's Adafactor", frozenset({"eps_scale", "scale_parameter"})),
    "timm_bv": ("timm's AdafactorBigVision", frozenset({"beta2_cap", "clipping_threshold"})),
    "pytorch_optimizer": ("pytorch_optimizer's AdaFactor", frozenset({"ams_bound", "scale_parameter"})),
    "transformers": ("transformers' Adafactor", frozenset({"clip_threshold", "scale_parameter", "beta1"})),
    "adamw": ("Adam or AdamW", frozenset({"betas", "amsgrad"})),
}


def recognise(state_dict: Any) -> str | None:
    """The key in SIGNS of the optimizer whose state dict this is, or None; fairseq's is like transformers'."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, (list, tuple)) or not groups or not all(isinstance(group, Mapping) for group in groups):
        return None
    fitting = (name for name, (_, keys) in SIGNS.items() if all(keys <= group.keys() for group in groups))
    return next(fitting, None)
