"""The Triton kernels compiled without a GPU, for the arguments that they are launched with.

Needs TRITON_INTERPRET=0: the interpreter takes the place of the compiler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from adafactor import Adafactor
from adafactor.kernels.triton import plan
from adafactor.kernels.triton.launch import Launch
from studies.gpu_counts import note_launches

TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
}


@dataclass(frozen=True)
class Call:
    """A launch, and all that its kernel is given."""

    launch: Launch
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self.launch.kernel.__name__)

    @property
    def constants(self) -> dict[str, Any]:
        """What it is compiled for by name."""
        named = dict(zip(self.launch.kernel.arg_names, self.arguments, strict=True))
        return {name: value for name, value in named.items() if name.isupper()}


def calls(shape: tuple[int, ...], dtype: torch.dtype, keywords: dict[str, Any]) -> list[Call]:
    """The launches of a second step of one parameter; none is run."""
    p = torch.ones(shape, dtype=dtype, requires_grad=True)
    p.grad = torch.ones_like(p)
    # as where torch is built for NVIDIA's cards
    with note_launches() as noted, patch.object(plan, "AT_MOST", {"maxnreg": 128}):
        optimizer = Adafactor([p], backend="triton", **keywords)
        optimizer.step()
        noted.clear()
        optimizer.step()
    return [Call(launch, (*given, *launch._rest)) for launch, given in noted]


_compiled: dict[tuple[Any, ...], Any] = {}


def compiled(call: Call, target: str) -> Any:
    """Compile a kernel as Triton would when it is launched; each variant once."""
    kernel, options = call.launch.kernel, dict(call.launch.options)
    if TARGETS[target].backend == "hip":
        options.pop("maxnreg", None)
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}

    def look(at: tuple[int, ...], value: Any, specialised: bool) -> Any:
        """Return an argument's type; note what the compiler is told about it."""
        if isinstance(value, tuple):
            return type(value)(*(look((*at, i), part, specialised) for i, part in enumerate(value)))
        if value is None or (specialised and not isinstance(value, (Tensor, float)) and value == 1):
            constants[at] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        number = value.data_ptr() if isinstance(value, Tensor) else value
        if number % 16 == 0 and (specialised or isinstance(value, Tensor)):
            hints[at] = [["tt.divisibility", 16]]
        if isinstance(value, Tensor):
            return f"*{TYPES[value.dtype]}"
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    for i, (name, value) in enumerate(zip(kernel.arg_names, call.arguments, strict=True)):
        if name.isupper():
            signature[name], constants[(i,)] = "constexpr", value
        else:
            signature[name] = look((i,), value, name not in (kernel.do_not_specialize or ()))
    key = call.name, target, str(signature), str(constants), str(hints), str(options)
    if key not in _compiled:
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
        _compiled[key] = triton.compile(source, target=TARGETS[target], options=options)
    return _compiled[key]


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel occupies."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program


def usage(call: Call, target: str) -> Usage:
    """What the compilers say that it occupies."""
    kernel = compiled(call, target)
    if target.startswith("gfx"):
        found = re.search(r"\.vgpr_count:\s+(\d+)\s+\.vgpr_spill_count: (\d+)", kernel.asm["amdgcn"])
        assert found is not None
        return Usage(int(found[1]), int(found[2]), kernel.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None
    return Usage(int(found[1]), int(found[2]), kernel.metadata.shared)
