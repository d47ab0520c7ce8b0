"""`adafactor migrate in.pt out.pt`, and `adafactor migrate checkpoint-500 --in-place`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from adafactor.migration import files, trees
from adafactor.migration.core import PEERS, TARGETS, guess, migrate
from adafactor.migration.peer import MigrationWarning
from adafactor.migration.state import refuse_damage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="in.pt",
        help="a checkpoint: .pt, .bin, .ckpt or .safetensors, or the folder of a Trainer, Accelerate or DCP checkpoint",
    )
    parser.add_argument(
        "target", type=Path, metavar="out.pt", nargs="?", help="the converted checkpoint; everything else in it is kept"
    )
    parser.add_argument(
        "--in-place", action="store_true", help="replace the checkpoint instead; the old one is kept as NAME.before"
    )
    parser.add_argument(
        "--from",
        dest="peer",
        choices=PEERS,
        metavar="NAME",
        help=f"whose state it holds: {', '.join(PEERS)} (default: told from its keys)",
    )
    parser.add_argument(
        "--to",
        default="adafactor",
        choices=TARGETS,
        metavar="NAME",
        help=f"whose to write: {', '.join(TARGETS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--key", help="where in the checkpoint the optimizer is, such as optimizer or optimizer_states.0"
    )
    parser.add_argument(
        "--arguments", type=_json, default={}, help="arguments that the checkpoint does not hold, as a JSON object"
    )
    parser.add_argument("--params", type=Path, help="the model's weights, to check names and shapes (for optax, T5X)")
    parser.add_argument("--paths", type=_json, default={}, help="names in --params to paths in the tree, as JSON")
    parser.add_argument("--force", action="store_true", help="replace out.pt if it exists")


def run(arguments: argparse.Namespace) -> int:
    """Convert one checkpoint; differences are told on stderr."""
    with refuse_damage(str(arguments.source)):
        if (arguments.target is None) != arguments.in_place:
            raise ValueError("name out.pt or say --in-place, one of the two")
        source = files.locate(arguments.source)
        before = source.with_name(f"{source.name}.before")
        target, keep = (source, before) if arguments.in_place else (arguments.target, None)
        if keep is not None and (keep.is_dir() or keep.exists() and not keep.samefile(source)):
            raise ValueError(
                f"{keep} exists, from an earlier conversion: move it away if {source.name} is to be converted"
            )
        if keep is None and target.exists() and not arguments.force:
            raise ValueError(f"{target} exists; --force replaces it")
        checkpoint = files.read(source)
        keys: list[str | int] = []
        if arguments.key is not None:
            keys = [files.key(word) for word in arguments.key.split(".")]
        elif (arguments.peer or trees.recognise(checkpoint)) not in trees.FIELDS:  # a tree is the checkpoint itself
            keys = _find(checkpoint, source)
        state_dict = _get(checkpoint, keys)
        peer = guess(state_dict) if arguments.peer is None else arguments.peer
        params = None if arguments.params is None else _weights(arguments.params)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", MigrationWarning)
            converted = migrate(
                state_dict, peer, arguments.to, params=params, arguments=arguments.arguments, paths=arguments.paths
            )
        for note in caught:
            print(f"adafactor migrate: {note.message}", file=sys.stderr)
        distributed = files.is_distributed(source) and not target.suffix
        files.write(_put(checkpoint, keys, converted), target, distributed, keep)
        kept = "" if keep is None else f"; what it was is {keep}"
        groups, name = len(converted["param_groups"]), PEERS[peer].name
        print(f"{target}: {len(converted['state'])} parameters in {groups} groups, from {name}{kept}")
        return 0


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not JSON: {wrong}") from wrong
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a JSON object")
    return value


def _find(checkpoint: Any, path: Path) -> list[str | int]:
    """Return where the only state dict is, in dicts and lists down to the third level."""
    places: list[list[str | int]] = []
    nodes: list[tuple[list[str | int], Any]] = [([], checkpoint)]
    for keys, node in nodes:  # which grows on the way
        if isinstance(node, Mapping) and {"state", "param_groups"} <= node.keys():
            places.append(keys)
        elif len(keys) < 3 and isinstance(node, (Mapping, list)):
            inner = node.items() if isinstance(node, Mapping) else enumerate(node)
            nodes += [([*keys, key], value) for key, value in inner]
    if not places:
        raise ValueError(f"{path} holds no optimizer's state dict, with 'state' and 'param_groups'")
    if len(places) > 1:
        names = ", ".join(".".join(map(str, keys)) for keys in places)
        raise ValueError(f"{path} holds several optimizers ({names}): choose one with --key")
    return places[0]


def _get(checkpoint: Any, keys: list[str | int]) -> Any:
    for key in keys:
        try:
            checkpoint = checkpoint[key]
        except (KeyError, IndexError, TypeError) as wrong:
            raise ValueError(f"the checkpoint has no {key!r} (of --key {'.'.join(map(str, keys))})") from wrong
    return checkpoint


def _put(checkpoint: Any, keys: list[str | int], value: Any) -> Any:
    """Return a copy of the containers on the way, with the value at its end."""
    if not keys:
        return value
    copy = dict(checkpoint) if isinstance(checkpoint, Mapping) else list(checkpoint)
    copy[keys[0]] = _put(checkpoint[keys[0]], keys[1:], value)  # type: ignore[index]
    return copy


def _weights(path: Path) -> dict[str, Tensor]:
    """Names and tensors of a model's weights; a safetensors file has no tree here, names may hold any sign."""
    weights = files.read(path)
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"{path} is not a model's state dict of names and tensors")
    return dict(weights)
