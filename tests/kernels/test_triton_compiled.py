"""What the compilers make of the Triton kernels, on a machine without a GPU: every variant that can be launched."""

from __future__ import annotations

import re

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from tests.kernels import needs

needs.triton()

import triton  # noqa: E402
from triton import knobs  # noqa: E402

if knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: kernels are not compiled", allow_module_level=True)

from adafactor.kernels.triton.executor import Kind  # noqa: E402
from adafactor.kernels.triton.first_walk import first_walk  # noqa: E402
from tests.kernels.triton_ahead import Variant, compiled, kinds, usage, variants  # noqa: E402

SOME = [
    Kind(torch.float32, torch.float32, 0, 0, True),
    Kind(torch.bfloat16, torch.bfloat16, 0, 1, True),
]
TIGHT = ("first_walk-fp32-fp32-plain-aligned", "first_walk-long-fp32-fp32-plain-aligned")
TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Bytes of a thread: the kernels were fitted to Triton 3.9; older versions keep more at once in registers.
SPILLED = 0 if VERSION >= (3, 9) else 160
ON_SM_120 = 8  # of the first walk of float32 there


def cases() -> list[ParameterSet]:
    """Some for `make test`, all for `make test-all`."""
    some = {variant.name for variant in variants(SOME)}
    found = []
    for target in TARGETS:
        for variant in variants(kinds()):
            quick = variant.name in some if target == "sm_90" else target == "sm_100" and variant.name in TIGHT
            marks = [] if quick else [pytest.mark.slow]
            found.append(pytest.param(variant, target, id=f"{target}-{variant.name}", marks=marks))
    return found


@pytest.mark.parametrize(("variant", "target"), cases())
def test_a_variant_fits_its_registers_and_keeps_its_arithmetic(variant: Variant, target: str) -> None:
    used = usage(variant, target)
    assert used.spilled <= max(SPILLED, ON_SM_120 if target == "sm_120" and variant.kernel is first_walk else 0)
    wide = variant.long or not variant.kind.aligned  # 16 warps: one program has as many threads as two have elsewhere
    assert used.programs >= (1 if wide else 2)
    if target.startswith("sm_"):
        check_ptx(variant, compiled(variant, target).asm["ptx"])
    else:
        check_amdgcn(variant, compiled(variant, target).asm["amdgcn"])


def check_ptx(variant: Variant, ptx: str) -> None:
    """Nothing that depends on the order of programs or on the card; 16 bytes at a time where they are aligned."""
    found = set(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)+)", ptx, re.MULTILINE))
    assert not {op for op in found if op.startswith(("atom.", "red."))}
    # the library's logarithm and exponential of t, in double, begin with these
    found -= {"rcp.approx.ftz.f64", "abs.ftz.f32"}
    assert not {op for op in found if "approx" in op or ".ftz" in op or op.startswith(("div.full", "fma.rn.f32"))}
    if variant.kind.aligned and variant.name.startswith(("first", "last")):
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
        wide = [size for size in copies if int(size, 0) == 16]
        assert wide or re.search(r"ld\.global[.\w:]*\.(v4\.b32|v2\.b64)", ptx)
        assert re.search(r"st\.global[.\w:]*\.(v4\.b32|v2\.b64)", ptx)


def check_amdgcn(variant: Variant, code: str) -> None:
    """The same, in AMD's instructions."""
    assert not re.search(r"\b(global|flat|buffer)_atomic", code)
    if variant.kind.aligned and variant.name.startswith(("first", "last")):
        # a float64 parameter with 16-bit gradients: a thread has too few elements for 16 bytes
        least = "x[24]" if variant.kind.x == torch.float64 and variant.kind.g.itemsize == 2 else "x4"
        assert re.search(rf"\b(global|buffer)_load_dword{least}", code)
        assert re.search(r"\b(global|buffer)_store_dwordx4", code)
