"""The old path of `adafactor.planning.communication`."""

import warnings

from adafactor.planning.communication import Traffic, fully_sharded, traffic

__all__ = ["Traffic", "fully_sharded", "traffic"]

warnings.warn(
    "adafactor.traffic is now adafactor.planning.communication, and will be removed", DeprecationWarning, stacklevel=2
)
