"""The Triton kernels compiled ahead of time, on a machine without a GPU: every variant that can be launched."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from adafactor.kernels.triton.between import conclude, factors, fold, totals
from adafactor.kernels.triton.first_pass import first_pass
from adafactor.kernels.triton.kind import Kind
from adafactor.kernels.triton.last_pass import last_pass
from adafactor.kernels.triton.matrix import Memory
from adafactor.kernels.triton.measure import begin_step, measure

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# KB that a multiprocessor has
SHARED = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100, "gfx942": 64}
REGISTERS = 65536  # a multiprocessor has
NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MOMENTA, ROUNDINGS = (None, "update", "gradient", "direction"), ("nearest", "stochastic", "kahan")
INT8 = {torch.int8: "int8"}
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")  # of the compiler; the others are the kernel's own
TYPES = {  # of what `Memory` holds; all else is in double
    "*i64": ("tensors", "matrices", "given"),
    "*i32": ("units", "blocks", "tiles", "shares", "checks", "changes"),
    "*fp32": ("scaling",),
}
STATISTICS = ("vectors", "inverses", "scratch")  # of the statistics' type
WIDTHS = (16, 768, 2304, 4096, 5120, 11008, 28672)  # columns: each is held in another way


@dataclass(frozen=True)
class Variant:
    """A kernel and what it is compiled for."""

    name: str
    kernel: Any
    kind: Kind
    width: int | None = None  # columns, of the first pass; None: unfactored
    raw: bool = False  # of a shard's passes before it writes

    def options(self, target: str) -> dict[str, Any]:
        """What it is launched with."""
        kind = self.kind
        if self.kernel is first_pass:
            return kind.first_pass(kind.tiling(self.width), self.raw, SHARED[target] * 1024)
        if self.kernel is fold:
            return kind.fold(self.raw)
        if self.kernel is last_pass:
            return kind.last_pass(writes=not self.raw)
        return kind.measure() if self.kernel in (begin_step, measure) else kind.between()

    @property
    def stat(self) -> str:
        """The statistics' type."""
        return NAMES[self.kind.stat]


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel occupies."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program
    threads: int  # of a program
    programs: int  # that a multiprocessor holds


def kinds() -> list[Kind]:
    """Every kind of parameter."""
    f64, f32, b16, f16 = NAMES
    pairs = [(f64, g) for g in NAMES] + [(x, g) for x in (f32, b16, f16) for g in (f32, b16, f16)]
    found = [
        Kind(x, g, momentum, rounding, aligned)
        for (x, g), momentum, aligned in product(pairs, MOMENTA, (True, False))
        for rounding in (ROUNDINGS if x.itemsize == 2 else ROUNDINGS[:1])
    ]
    formats = [(dtype, is_random) for dtype in (b16, torch.int8) for is_random in (False, True)]
    rounded = [
        replace(kind, momentum_dtype=dtype, momentum_random=is_random)
        for kind, (dtype, is_random) in product(found, formats)
        if kind.momentum and kind.x == kind.g
    ]
    odd = [replace(kind, lanes=128) for kind in rounded if kind.IN_BLOCKS and not kind.aligned]
    return found + rounded + odd


def variants(of: list[Kind]) -> list[Variant]:
    """Every variant for these kinds, each once."""
    found: dict[tuple[Any, str], Variant] = {}
    for kind in of:
        shape = f"{'aligned' if kind.aligned else 'ragged'}{f'-odd-{kind.lanes}' if kind.lanes else ''}"
        kept = (
            f"-{(NAMES | INT8)[kind.momentum_dtype]}{'-random' * kind.momentum_random}" if kind.momentum_dtype else ""
        )
        last = f"{NAMES[kind.x]}-{NAMES[kind.g]}-{kind.momentum or 'plain'}{kept}-{kind.rounding}-{shape}"
        wide = "fp64" if kind.x == torch.float64 else "fp32"
        first = f"{wide}-{NAMES[kind.g]}-{f'average{kept}' if kind.OF_GRADIENT else 'plain'}-{shape}"
        blocks = "-blocks" * kind.IN_BLOCKS
        for variant in (
            *(Variant(f"first_pass-{width}-{first}", first_pass, kind, width) for width in (None, *WIDTHS)),
            Variant(f"first_pass-raw-4096-{first}", first_pass, kind, 4096, raw=True),
            Variant(f"begin_step-{NAMES[kind.x]}{blocks}-{shape}", begin_step, kind),
            Variant(f"measure-{NAMES[kind.x]}{blocks}-{shape}", measure, kind),
            *(Variant(f"fold{'-raw' * raw}-{wide}-{shape}", fold, kind, raw=raw) for raw in (False, True)),
            *(Variant(f"last_pass{'-raw' * raw}-{last}", last_pass, kind, raw=raw) for raw in (False, True)),
            *(Variant(f"{kernel.__name__}-{wide}", kernel, kind) for kernel in (factors, totals, conclude)),
        ):
            found.setdefault((variant.kernel, repr(variant.options("sm_80"))), variant)
    return list(found.values())


_kept: dict[tuple[Any, str, str], Any] = {}


def compiled(variant: Variant, target: str) -> Any:
    """Compile a variant."""
    return compiled_with(variant.kernel, variant.options(target), target)


def compiled_with(kernel: Any, options: dict[str, Any], target: str) -> Any:
    """Compile a kernel as it is launched with these options; Triton keeps the result in its cache."""
    key = kernel, repr(options), target
    if key not in _kept:
        compiler = {name: options[name] for name in OPTIONS if name in options}
        if TARGETS[target].backend == "hip":
            compiler.pop("maxnreg", None)
        _kept[key] = triton.compile(source(kernel, options), target=TARGETS[target], options=compiler)
    return _kept[key]


def source(kernel: Any, options: dict[str, Any]) -> Any:
    """What Triton compiles, with a hash that is a part of the key of the result."""
    constants = {name: value for name, value in options.items() if name not in OPTIONS}
    memory = Memory(*(_type(name.removesuffix("_ptr"), NAMES[options["KIND"].stat]) for name in Memory._fields))
    signature = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    aligned = {(0, i): [["tt.divisibility", 16]] for i in range(len(memory))}
    return ASTSource(fn=kernel, signature=signature | {"memory": memory}, constexprs=constants, attrs=aligned)


def _type(name: str, stat: str) -> str:
    if name in STATISTICS:
        return f"*{stat}"
    return next((type for type, names in TYPES.items() if name in names), "*fp64")


@cache
def usage(variant: Variant, target: str) -> Usage:
    """What the compilers say that it occupies."""
    kernel = compiled(variant, target)
    shared, threads = kernel.metadata.shared, kernel.metadata.num_warps * TARGETS[target].warp_size
    if target.startswith("gfx"):
        code = kernel.asm["amdgcn"]
        registers, spilled = (int(_found(rf"\.{what}:\s+(\d+)", code)) for what in ("vgpr_count", "vgpr_spill_count"))
        file = 4 * 512 * 64  # 512 vector registers of 64 lanes for each of four units
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file_of:
            Path(file_of.name).write_bytes(kernel.asm["cubin"])
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file_of.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, spilled = int(_found(r"REG:(\d+)", said)), int(_found(r"STACK:(\d+)", said))
        file = REGISTERS
    each = -(-registers // 8) * 8 * threads
    room = SHARED[target] * 1024 // (shared + (0 if target.startswith("gfx") else 1024)) if shared else 99
    return Usage(registers, spilled, shared, threads, min(file // each, room, 2048 // threads))


def loops(variant: Variant, target: str) -> list[list[str]]:
    """The machine instructions of each innermost loop, in the order of the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled(variant, target).asm["cubin"])
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif code_at := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(code_at[1])
    spans = []
    for end, instruction in enumerate(instructions):
        jump = re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", instruction)
        if jump and (first := labels.get(jump[1], end + 1)) < end:
            spans.append((first, end + 1))
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return [instructions[a:b] for a, b in inner]


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"{pattern} is not there"
    return match[1]
