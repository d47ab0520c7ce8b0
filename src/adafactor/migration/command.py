"""`adafactor migrate in.pt out.pt`: tensors are read, nothing is run; a file is written whole or not at all."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adafactor.migration.convert import guess, migrate
from adafactor.migration.peer import MigrationWarning
from adafactor.migration.peers import PEERS, TARGETS
from adafactor.migration.state import refuse_damage

Place = list[str | int]  # the keys that lead to something in a checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("source", type=Path, metavar="in.pt", help="a checkpoint; of a Trainer's folder it is optimizer.pt")
    add("target", type=Path, metavar="out.pt", help="the converted one, with everything else that was in it")
    add("--from", dest="peer", choices=PEERS, help="whose state it holds (default: told from its keys)")
    add("--to", default="adafactor", choices=TARGETS, help="whose to write (default: %(default)s)")
    add("--key", help="where in the checkpoint the optimizer is, if it holds several: optimizer_states.0")


def run(arguments: argparse.Namespace) -> int:
    """Convert one checkpoint; differences are told on stderr."""
    source, target = arguments.source, arguments.target
    if target.exists():
        raise ValueError(f"{target} exists: nothing is overwritten")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is not a folder")
    checkpoint = _read(source)
    place = _find(checkpoint, source, arguments.key)
    state_dict = _get(checkpoint, place)
    peer = guess(state_dict) if arguments.peer is None else arguments.peer
    with warnings.catch_warnings(record=True) as caught, refuse_damage(str(source)):
        warnings.simplefilter("always", MigrationWarning)
        converted = migrate(state_dict, peer, arguments.to)
    for note in caught:
        print(f"adafactor migrate: {note.message}", file=sys.stderr)
    _write(_put(checkpoint, place, converted), target)
    stepped, groups = _count(len(converted["state"]), "parameter"), _count(len(converted["param_groups"]), "group")
    print(f"{target}: {stepped} in {groups}, from {PEERS[peer].name}")
    return 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _read(path: Path) -> Any:
    """Return what a checkpoint holds, by torch's loader of tensors alone."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name the file with the optimizer in it, such as {path / 'optimizer.pt'}")
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about the form of a file that is refused if it cannot be read
            return torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as wrong:  # a parser can fail in any way on bytes that anybody has written
        raise ValueError(
            f"{path} is not a whole checkpoint of tensors, dicts, lists and numbers, and nothing else is read from a "
            f"checkpoint ({_reason(wrong)})"
        ) from wrong


def _write(value: Any, path: Path) -> None:
    """Write beside it, then rename: there is never half a checkpoint under this name."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        new = Path(folder, path.name)
        try:
            torch.save(value, new)
        except OSError:
            raise
        except Exception as wrong:  # a full disk, or something too deep
            raise ValueError(f"{path} cannot be written ({_reason(wrong)})") from wrong
        os.replace(new, path)


def _reason(wrong: Exception) -> str:
    """Return the kind of error and its first line, without torch's advice how to load a file nevertheless."""
    match = re.search(r"WeightsUnpickler error: (.*?)(?:\. Please|\n|$)", str(wrong))
    return f"{type(wrong).__name__}: {(match[1] if match else str(wrong).strip().partition(chr(10))[0])[:200]}"


def _find(checkpoint: Any, path: Path, key: str | None) -> Place:
    """Return where the state dict is: as `--key` says, or the only one in dicts and lists down to the third level."""
    if key is not None:
        return [int(word) if word.isascii() and word.isdigit() else word for word in key.split(".")]
    places: list[Place] = []
    nodes: list[tuple[Place, Any]] = [([], checkpoint)]
    for place, node in nodes:  # which grows on the way
        if isinstance(node, Mapping) and {"state", "param_groups"} <= node.keys():
            places.append(place)
        elif len(place) < 3 and isinstance(node, (Mapping, list)):
            inner = node.items() if isinstance(node, Mapping) else enumerate(node)
            nodes += [([*place, word], value) for word, value in inner]
    if not places:
        raise ValueError(f"{path} holds no optimizer's state dict, with 'state' and 'param_groups'")
    if len(places) > 1:
        names = ", ".join(".".join(map(str, place)) for place in places)
        raise ValueError(f"{path} holds several optimizers ({names}): choose one with --key")
    return places[0]


def _get(checkpoint: Any, place: Place) -> Any:
    for key in place:
        try:
            checkpoint = checkpoint[key]
        except (KeyError, IndexError, TypeError) as wrong:
            raise ValueError(f"the checkpoint has no {key!r} (of --key {'.'.join(map(str, place))})") from wrong
    return checkpoint


def _put(checkpoint: Any, place: Place, value: Any) -> Any:
    """Return a copy of the containers on the way, with the value at its end."""
    if not place:
        return value
    copy = dict(checkpoint) if isinstance(checkpoint, Mapping) else list(checkpoint)
    copy[place[0]] = _put(checkpoint[place[0]], place[1:], value)  # type: ignore[index]
    return copy
