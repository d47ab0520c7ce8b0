"""Moving in: other Adafactors' arguments and state dicts into ours, and ours back into two of them."""

from adafactor.migration.core import like, migrate
from adafactor.migration.peer import MigrationWarning

__all__ = ["MigrationWarning", "like", "migrate"]
