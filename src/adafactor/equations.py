"""The old path of `adafactor.core.equations`."""

import warnings

from adafactor.core import equations
from adafactor.core.equations import *  # noqa: F403

__all__ = [name for name in vars(equations) if not name.startswith("_")]

warnings.warn(
    "adafactor.equations is now adafactor.core.equations, and will be removed", DeprecationWarning, stacklevel=2
)
