"""Moving in: other Adafactors' arguments and state dicts into ours, and ours back into two of them."""

from adafactor.migration.core import like, migrate
from adafactor.migration.translate import MigrationWarning

__all__ = ["MigrationWarning", "like", "migrate"]
