"""Moving in: other Adafactors' arguments and state dicts into ours, and ours back into two of them.

A migration has two halves, and each goes both ways. Arguments: a peer's argument is a keyword of ours, by its name or
by a function; what has no counterpart is said in a warning, with its size. State: a peer's entry of a parameter holds
the second moment V, or its means over two axes, and the momentum, under names of its own. So a peer is one declaration:

    peer.py       `Peer` and `Argument`, the declaration; `Group`, a group of it in our words; `translate`, the way back
    state.py      `Moments`, what a state says in nobody's format; `Format`, under which names a peer has it
    torch_optim.py, fairseq.py, trees.py      the declarations; the last also reads the trees of optax and T5X
    core.py       `migrate` and `like`: read with one declaration, write with another
    files.py, command.py      checkpoints in files and folders, and `adafactor migrate`
"""

from adafactor.migration.core import like, migrate
from adafactor.migration.peer import MigrationWarning

__all__ = ["MigrationWarning", "like", "migrate"]
