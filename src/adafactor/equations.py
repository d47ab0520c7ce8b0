"""The old path of `adafactor.core.equations`."""

import warnings

from adafactor.core.equations import (
    Decay,
    Scalar,
    average,
    clip_divisor,
    corrected_decay,
    i_divergence,
    increasing_decay,
    relative_step,
    root_mean_square,
    row_scale,
    second_moment_decay,
    step_size,
)

__all__ = [
    "Decay",
    "Scalar",
    "average",
    "clip_divisor",
    "corrected_decay",
    "i_divergence",
    "increasing_decay",
    "relative_step",
    "root_mean_square",
    "row_scale",
    "second_moment_decay",
    "step_size",
]

warnings.warn(
    "adafactor.equations is now adafactor.core.equations, and will be removed", DeprecationWarning, stacklevel=2
)
