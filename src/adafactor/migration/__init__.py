"""Moving in: another's arguments and state dict into ours, and ours back into torch's or transformers' Adafactor.

A migration has two halves, and each goes both ways. Arguments: a peer's argument is a keyword of ours, by its name or
by a function. State: a peer's entry of a parameter holds the second moment V, or its means over two axes, and the
momentum, under names of its own. So a peer is one declaration:

    peer.py       `Peer` and `Argument`, the declaration; `Group`, a group of it in our words; `translate`, the way back
    state.py      `Moments`, what a state says in nobody's format; `Format`, under which names a peer has it
    peers.py      the declarations
    convert.py    `migrate` and `like`: read with one declaration, write with another
    command.py    `adafactor migrate`
"""

from adafactor.migration.convert import like, migrate
from adafactor.migration.peer import MigrationWarning

__all__ = ["MigrationWarning", "like", "migrate"]
