"""Checkpoints of strangers: tensors are read, nothing is run; a checkpoint is written whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from adafactor.migration.trees import flatten

NOTHING_ELSE = (
    "is not a whole checkpoint of tensors, dicts, lists and numbers, and nothing else is read from a checkpoint"
)


def locate(path: Path) -> Path:
    """Return the checkpoint itself, or the one with the optimizer in a folder of Trainer, Accelerate or Lightning."""
    if not path.is_dir() or is_distributed(path):
        return path
    checkpoints = [file for kind in ("optimizer*.pt", "optimizer*.bin", "*.ckpt") for file in sorted(path.glob(kind))]
    checkpoints += [file.parent for file in sorted(path.glob("optimizer*/.metadata"))]
    if len(checkpoints) == 1:
        return checkpoints[0]
    if checkpoints:
        raise ValueError(
            f"{path} holds several checkpoints: name one of {', '.join(file.name for file in checkpoints)}"
        )
    raise ValueError(f"{path} is a folder without optimizer.pt, optimizer.bin, a .ckpt file or .metadata")


def is_distributed(path: Path) -> bool:
    """Return whether it is a folder of torch.distributed.checkpoint."""
    return (path / ".metadata").is_file()


def read(path: Path) -> Any:
    """Return what a checkpoint holds: `.safetensors` as a tree, all else by torch's loader of tensors alone."""
    if not path.is_file() and not is_distributed(path):
        raise ValueError(f"{path} is not a file")
    is_safetensors = path.suffix == ".safetensors"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about the form of a file that is refused if it cannot be read
            if is_safetensors:
                return _read_safetensors(path)
            if is_distributed(path):
                return _read_distributed(path)
            return torch.load(path, map_location="cpu", weights_only=True)
    except (ImportError, PermissionError):
        raise
    except Exception as wrong:  # a parser can fail in any way on bytes that anybody has written
        what = "is not a whole safetensors file" if is_safetensors else NOTHING_ELSE
        raise ValueError(f"{path} {what} ({_reason(wrong)})") from wrong


def write(value: Any, path: Path, distributed: bool = False, keep: Path | None = None) -> None:
    """Write beside it, then rename: there is never half a checkpoint under this name. `keep` is for what was there."""
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        new = Path(folder, path.name)
        try:
            if distributed:
                _write_distributed(value, new)
            elif path.suffix == ".safetensors":
                _write_safetensors(value, new)
            else:
                torch.save(value, new)
        except (ImportError, OSError, ValueError):
            raise
        except Exception as wrong:  # of torch or safetensors: a full disk, or something too deep or of a wrong type
            raise ValueError(f"{path} cannot be written ({_reason(wrong)})") from wrong
        for file in (*new.iterdir(), new) if distributed else (new,):
            _sync(file)
        if keep is not None:
            _keep(path, keep, new)
        os.replace(new, path)
    _sync(path.parent)


def _keep(path: Path, keep: Path, new: Path) -> None:
    """Give a file a second name, so that there is one under the first at any time; a folder can have only one."""
    if path.is_dir():
        os.rename(path, keep)
        return
    shutil.copymode(path, new)
    if keep.exists():  # the same file: a conversion that was stopped at this point
        return
    try:
        os.link(path, keep)
    except OSError:  # a file system without hard links
        shutil.copy2(path, keep)
        _sync(keep)


def _reason(wrong: Exception) -> str:
    """Return the kind of error and its first line, without torch's advice how to load a file nevertheless."""
    match = re.search(r"WeightsUnpickler error: (.*?)(?:\. Please|\n|$)", str(wrong))
    return f"{type(wrong).__name__}: {(match[1] if match else str(wrong).strip().partition(chr(10))[0])[:200]}"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def key(word: str) -> str | int:
    """Return a number where the word is one."""
    return int(word) if word.isascii() and word.isdigit() else word


def _nested(flat: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Return dicts and lists again from paths, in which numbers are places in a list and words keys of a dict."""
    if () in flat:
        (leaf,) = flat.values()
        return leaf
    inner: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for (first, *rest), value in flat.items():
        inner.setdefault(first, {})[tuple(rest)] = value
    if all(isinstance(first, int) for first in inner):
        return [_nested(inner[first]) for first in sorted(inner)]
    return {key(str(first)): _nested(rest) for first, rest in inner.items()}


def _read_safetensors(path: Path) -> Any:
    """Names are paths ("state/0/row"); `param_groups`, which are no tensors, are JSON in the metadata."""
    with _safetensors().safe_open(str(path), framework="pt") as file:
        tree = _nested({tuple(name.split("/")): file.get_tensor(name) for name in file.keys()}) or {}  # noqa: SIM118
        groups = (file.metadata() or {}).get("param_groups")
    return tree if groups is None else {"state": {}, **tree, "param_groups": json.loads(groups)}


def _write_safetensors(value: Any, path: Path) -> None:
    tensors = {name: torch.as_tensor(leaf).contiguous() for name, leaf in flatten({"state": value["state"]})}
    _safetensors().torch.save_file(tensors, str(path), metadata={"param_groups": json.dumps(value["param_groups"])})


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as missing:
        raise ImportError("files that end in .safetensors need the package safetensors") from missing
    return safetensors


DESCRIPTIONS = {  # all that the `.metadata` of a distributed checkpoint is made of, besides torch's data types
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
}


class _Descriptions(pickle.Unpickler):
    """Makes nothing but what describes a distributed checkpoint; pickle itself would call anything."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of DESCRIPTIONS or a data type."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in DESCRIPTIONS.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no description of a tensor")
        return super().find_class(module, name)


def _read_distributed(path: Path) -> Any:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **keywords: Any) -> Any:
            return metadata

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            others[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    others: dict[str, Any] = {}  # all that are no tensors
    with open(path / ".metadata", "rb") as file:
        metadata = _Descriptions(file).load()
    items = metadata.state_dict_metadata
    tensors = {name: item for name, item in items.items() if hasattr(item, "size")}
    size = sum(prod(item.size) * item.properties.dtype.itemsize for item in tensors.values())
    if size > sum(file.stat().st_size for file in path.iterdir()):
        raise ValueError(f"it claims to hold {size} bytes")
    flat: dict[str, Any] = dict.fromkeys(items)
    flat |= {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in tensors.items()}
    try:
        load(flat, storage_reader=Reader(path), planner=Planner(flatten_state_dict=False))
    except CheckpointException as wrong:  # which is no Exception
        raise next(iter(wrong.failures.values()))[0] from wrong
    paths = metadata.planner_data or {}
    return _nested({tuple(paths.get(name, (name,))): value for name, value in {**flat, **others}.items()})


def _write_distributed(value: Any, path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(value, storage_writer=FileSystemWriter(path))
