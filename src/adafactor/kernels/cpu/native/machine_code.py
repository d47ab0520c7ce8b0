"""Machine code on disk: where it is kept, how it is loaded, and who compiles what is missing.

A file holds one compiled function. Its name says all that it depends on: our sources, the versions of Numba and LLVM,
and the processor. Its first bytes are a checksum of the rest, and it appears under its name only when it is complete,
so neither a process that is killed nor a full disk leaves anything that could be mistaken for code. A checksum is no
signature: `cache` makes sure that nobody else has written a file. Processes that miss the same files take turns: the
first compiles, the others wait, and load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba

from adafactor.core import equations, momentum
from adafactor.kernels import cache
from adafactor.kernels import memory_order as memory_order
from adafactor.kernels.progress import say

config: Any = numba.config
Compile = Callable[[], bytes]
OUTSIDE = memory_order.__file__, equations.__file__, momentum.__file__
SOURCES = [*sorted(Path(__file__).parent.glob("*.py")), *map(Path, OUTSIDE)]
CHECKSUM = sha256().digest_size
PATIENCE = 30.0  # seconds in which another process must have compiled a function, which takes one or two


@lru_cache(maxsize=1)
def key() -> str:
    """Return a short name for all that machine code depends on."""
    named = config.CPU_NAME, config.CPU_FEATURES  # as NUMBA_CPU_NAME and NUMBA_CPU_FEATURES have them
    cpu = named[0] or llvm.get_host_cpu_name()
    features = llvm.get_host_cpu_features().flatten() if named[1] is None else named[1]
    flags = config.ENABLE_AVX, config.OPT, config.LOOP_VECTORIZE, config.SLP_VECTORIZE
    versions = version("numba"), version("llvmlite"), llvm.get_default_triple()
    sources = b"".join(file.read_bytes() for file in SOURCES)
    return sha256(sources + repr((cpu, features, flags, versions)).encode()).hexdigest()[:16]


def folders() -> list[Path]:
    """Return where files are looked for; a new one goes into the first that can be had."""
    if config.CACHE_DIR:  # NUMBA_CACHE_DIR
        return [Path(config.CACHE_DIR) / "adafactor"]
    return [Path(__file__).parent / "__pycache__", cache.users_folder()]


def read(name: str) -> bytes | None:
    """Return the machine code of a function; None if there is none, or none that is whole."""
    file = f"{name}-{key()}.o"
    for folder in folders():
        content = cache.read(folder, file)
        if content is None:
            continue
        if sha256(content[CHECKSUM:]).digest() == content[:CHECKSUM]:
            return content[CHECKSUM:]
        cache.warn_once(f"compiled code in the cache {folder} is damaged; it is compiled anew", file)
    return None


def write(name: str, code: bytes) -> Path | None:
    """Keep the machine code of a function; return the folder, or None where it cannot be kept."""
    trouble = "every process compiles again, as there is no folder for the cache; NUMBA_CACHE_DIR can name one"
    return cache.write(folders(), f"{name}-{key()}.o", sha256(code).digest() + code, trouble)


def kept() -> list[Path]:
    """Return the files that hold machine code for this machine."""
    found: list[Path] = []
    for folder in folders():
        with suppress(OSError):
            found += sorted(cache.trusted(folder).glob(f"*-{key()}.o"))
    return found


# ---- memory


@lru_cache(maxsize=1)
def _engine() -> Any:
    """Return what loads object files into this process."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


_addresses: dict[str, int] = {}
_one_thread = threading.RLock()


def _load(name: str, code: bytes) -> None:
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _addresses[name] = engine.get_function_address(name)
    assert _addresses[name], f"there is no {name} in its own machine code"


def addresses(wanted: Mapping[str, Compile], what: str) -> list[int]:
    """Return where the machine code of these functions is: in memory, or else on disk, or else compiled now."""
    with _one_thread:
        for name in wanted:
            if name not in _addresses and (code := read(name)) is not None:
                _load(name, code)
        missing = {name: wanted[name] for name in wanted if name not in _addresses}
        if missing:
            _compile(missing, what)
        return [_addresses[name] for name in wanted]


def _compile(missing: Mapping[str, Compile], what: str) -> None:
    """Compile, keep and load functions; what another process has compiled meanwhile is only loaded."""
    begin, where = time.perf_counter(), ""
    with cache.turn(folders(), f"{key()}.lock", f"adafactor: compiling {what}, once on this machine", PATIENCE) as tell:
        for number, (name, compile) in enumerate(missing.items(), 1):
            code = read(name)
            if code is None:
                tell(f"{number} of {len(missing)} ({name})")
                code = compile()
                folder = write(name, code)
                where = f"kept in {folder}" if folder else "in memory only"
            _load(name, code)
    if where:
        say(f"adafactor: compiled {what} in {time.perf_counter() - begin:.1f} s, {where}")
