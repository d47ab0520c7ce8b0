"""The machine and the checkout a run is made on."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def commit() -> str | None:
    """The commit of this checkout, or None outside of one."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    """The versions a result may depend on."""
    names = ("torch", "numpy", "sentencepiece", "sacrebleu")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks: mapping them anew each step costs a tenth of the time on a CPU."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        library.mallopt(m_mmap_threshold, 2**30)
        library.mallopt(m_trim_threshold, 2**31 - 1)
