"""Checkpoints of strangers: tensors are read, nothing is run; a file is written whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    KeyError,
    ValueError,
    AttributeError,
    IndexError,
    TypeError,
)


def read(path: Path) -> Any:
    """What a checkpoint holds: `.safetensors` as a tree, everything else by torch's loader of tensors alone."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about the form of a file that is refused if it cannot be read
            return torch.load(path, map_location="cpu", weights_only=True)
    except (*UNREADABLE, zipfile.BadZipFile) as wrong:
        reason = str(wrong).strip().split("\n")[0][:200]
        raise ValueError(
            f"{path} is not a whole checkpoint of tensors, dicts, lists and numbers, and nothing else is read from a "
            f"checkpoint ({type(wrong).__name__}: {reason})"
        ) from wrong


def write(value: Any, path: Path) -> None:
    """Write to a temporary file beside it, then rename: there is never half a file under this name."""
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    try:
        if path.suffix == ".safetensors":
            _write_safetensors(value, name)
        else:
            torch.save(value, name)
        with open(name, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(name, 0o666 & ~_umask())  # a temporary file is its owner's alone
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read_safetensors(path: Path) -> dict[str | int, Any]:
    """Names are paths ("state/0/row"); `param_groups`, which are no tensors, are JSON in the metadata."""
    safetensors = _safetensors()
    tree: dict[str | int, Any] = {}
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                *folders, last = name.split("/")
                node = tree
                for folder in folders:
                    node = node.setdefault(_key(folder), {})
                node[_key(last)] = file.get_tensor(name)
            groups = (file.metadata() or {}).get("param_groups")
        if groups is not None:
            tree["param_groups"] = json.loads(groups)
            tree.setdefault("state", {})
    except (safetensors.SafetensorError, AttributeError, TypeError, ValueError, OSError) as wrong:
        raise ValueError(f"{path} is not a whole safetensors file ({type(wrong).__name__}: {wrong})") from wrong
    return tree


def _write_safetensors(value: Any, name: str) -> None:
    _safetensors()
    from safetensors.torch import save_file

    tensors = {path: _whole(leaf, path) for path, leaf in _leaves({"state": value["state"]})}
    save_file(tensors, name, metadata={"param_groups": json.dumps(value["param_groups"])})


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as missing:
        raise ImportError("files that end in .safetensors need the package safetensors") from missing
    return safetensors


def _key(word: str) -> str | int:
    return int(word) if word.isdigit() else word


def _leaves(tree: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        inner = f"{path}/{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, inner)
        else:
            yield inner, value


def _whole(value: Any, path: str) -> Tensor:
    if isinstance(value, (int, float)):
        return torch.tensor(value)
    if not isinstance(value, Tensor):
        raise ValueError(f"{path} is {type(value).__name__}, which a safetensors file cannot hold")
    return value.contiguous()
