"""A program that needs one small compiled function, which takes as many seconds to compile as it is told.

It waits for others as many seconds as it is told, if it is told.

"answer" is what the function returned, "compiled" whether this process compiled it, "said" what it wrote to stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import sys
import time
import warnings

import numpy as np

from adafactor.kernels.cpu.native import compiling, machine_code
from adafactor.kernels.cpu.native.intrinsics import view


def answer(address: int) -> None:
    """Write 42 to an address."""
    view(address, 0, 1, np.int64)[0] = 42


def main(seconds: float, patience: float = machine_code.PATIENCE) -> dict[str, object]:
    """Compile or load the function, and call it."""
    compiled, machine_code.PATIENCE = [], patience

    def compile() -> bytes:
        compiled.append(True)
        (machine_code.folders()[0] / "it.begun").write_text("") if seconds else None
        time.sleep(seconds)
        return compiling.machine_code(answer, "answer", arguments=1)

    said, result = io.StringIO(), ctypes.c_int64(0)
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(said):
        warnings.simplefilter("always")
        [address] = machine_code.addresses({"answer": compile}, "an answer")
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)(ctypes.addressof(result))
    return {
        "answer": result.value,
        "compiled": bool(compiled),
        "said": said.getvalue(),
        "warnings": [str(warning.message) for warning in caught],
    }


if __name__ == "__main__":
    print(json.dumps(main(*map(float, sys.argv[1:]))))
