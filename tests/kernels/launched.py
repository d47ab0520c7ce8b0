"""Steps with Triton's own launcher on a stand-in for the driver; run by `test_triton_launches.py` in a process.

The tensors are on the CPU and no kernel runs. Written to stdout as JSON: for each step the kernels with what the
compiler knew and what the launcher was given, and whether Triton had to look for the kernel; or times on the host.

    STUB=folder-with-libcuda.so.1 TRITON_INTERPRET=0 python -m tests.kernels.launched [gpt2 llama lora one]
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

STUB = os.environ["STUB"]
os.environ["TRITON_LIBCUDA_PATH"] = STUB
os.environ["LD_LIBRARY_PATH"] = STUB
LIBRARY = ctypes.CDLL(f"{STUB}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402

from adafactor import Adafactor  # noqa: E402
from adafactor.kernels import triton as backend  # noqa: E402
from adafactor.kernels.triton import plan, proof  # noqa: E402
from adafactor.kernels.triton.launch import Launch  # noqa: E402

seen: list[list[Any]] = []


class Launcher(nvidia.CudaLauncher):  # type: ignore[misc]  # Triton has no types
    """Notes what it is given."""

    def __init__(self, source: Any, metadata: Any):
        """Remember what the kernel was compiled for."""
        super().__init__(source, metadata)
        attributes = sorted(f"{at}: {hints}" for at, hints in source.attrs.items() if hints)
        constants = sorted(f"{at}: {value}" for at, value in source.constants.items() if at)
        self.compiled = [source.fn.__name__, attributes, constants]

    def __call__(self, *arguments: Any) -> None:
        """Note it without the stream and what belongs to the launch alone."""
        grid, own = arguments[:3], arguments[9:]
        scratch = {"first_pass": 2, "columns": 1}.get(self.compiled[0], 0)
        given = [*grid, *(look(value, is_scratch=i < scratch) for i, value in enumerate(own))]
        if self.compiled[0] == "first_pass":
            given.append(look(own[0]))  # G, no scratch
        seen.append([*self.compiled, given])
        super().__call__(*arguments)


def look(value: Any, is_scratch: bool = False) -> Any:
    """What of an argument the driver would see; scratch lies elsewhere in each step."""
    if isinstance(value, Tensor) and is_scratch:
        return f"scratch, {value.data_ptr() % 16 == 0}, {value.dtype}"
    if isinstance(value, Tensor):
        return f"tensor at {value.data_ptr()}, {value.dtype}"
    return list(map(look, value)) if isinstance(value, tuple) else repr(value)


@contextmanager
def on_a_stub(launcher: Any) -> Iterator[None]:
    """Let Triton take tensors on the CPU for those of an H100."""
    active = object.__new__(nvidia.CudaDriver)
    active.utils, active.launcher_cls = nvidia.CudaUtils(), launcher
    active.get_current_device = lambda: 0
    active.get_current_stream = lambda device: 0
    active.get_device_capability = lambda device: (9, 0)
    active.set_current_device = lambda device: None
    triton.runtime.driver.set_active(active)
    with (
        patch.object(nvidia.CudaDriver, "get_current_target", lambda self: GPUTarget("cuda", 90, 32)),
        patch.object(backend, "INTERPRETED", True),
        patch.object(plan, "AT_MOST", {"maxnreg": 128}),
        patch.object(proof, "LARGEST", -1),  # no kernel writes anything here
    ):
        yield


def main() -> None:
    """Step parameters of several kinds, with gradients at the same addresses."""
    result: dict[str, Any] = {}
    with on_a_stub(Launcher):
        params = [torch.ones(shape, requires_grad=True) for shape in ((64, 768), (48,), (40, 30), (3, 16000))]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = Adafactor(params, backend="triton", beta1=0.9, momentum_dtype="int8")
        run = triton.JITFunction.run
        for name in ("compiled", "direct", "by Triton"):
            seen.clear()
            looked: list[str] = []

            def note(self: Any, *args: Any, looked: list[str] = looked, **kwargs: Any) -> Any:
                looked.append(self.__name__)
                return run(self, *args, **kwargs)

            with patch.object(triton.JITFunction, "run", note):
                if name == "by Triton":
                    for one in launches_of(optimizer):
                        one._direct = False
                optimizer.step()
            result[name] = {"seen": list(seen), "looked": looked}
        result["launches"] = ctypes.c_long.in_dll(LIBRARY, "launches").value
    print(json.dumps(result))


def launches_of(optimizer: Adafactor) -> Iterator[Launch]:
    """Every launch that a step has prepared."""
    for executor in optimizer._buckets.of[None].executors:
        for one in executor._plans:  # type: ignore[attr-defined]
            yield from (value for value in vars(one).values() if isinstance(value, Launch))


def time_steps(names: list[str]) -> None:
    """Print the least of 15 times of a step on the host, of this thread's own work."""
    from studies.gpu_counts import MODELS

    with on_a_stub(nvidia.CudaLauncher):
        for name in names:
            shapes = ((4096, 4096),) if name == "one" else MODELS[name].shapes
            params = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
            for p in params:
                p.grad = torch.empty_like(p)
            optimizer = Adafactor(params, backend="triton", rounding="stochastic")
            times = []
            for _ in range(18):
                began = time.thread_time()
                optimizer.step()
                times.append(time.thread_time() - began)
            print(f"{name}: {len(params)} tensors, {1e3 * min(times):.3f} ms, median {1e3 * sorted(times)[9]:.3f} ms")


if __name__ == "__main__":
    time_steps(sys.argv[1:]) if sys.argv[1:] else main()
