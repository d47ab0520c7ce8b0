"""What the compilers make of the Triton kernels, on a machine without a GPU: every variant that can be launched."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from tests.kernels import needs

needs.triton()

import triton  # noqa: E402
from triton import knobs  # noqa: E402

if knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: kernels are not compiled", allow_module_level=True)

from adafactor.kernels.triton import kind as kind_module  # noqa: E402
from adafactor.kernels.triton.first_pass import first_pass  # noqa: E402
from adafactor.kernels.triton.kind import Kind  # noqa: E402
from adafactor.kernels.triton.last_pass import last_pass  # noqa: E402
from tests.kernels.triton_ahead import ROUNDINGS, Variant, compiled, kinds, loops, source, usage, variants  # noqa: E402

FLOAT32 = Kind(torch.float32, torch.float32, None, "nearest", True)
BFLOAT16, STOCHASTIC, KAHAN = (Kind(torch.bfloat16, torch.bfloat16, None, how, True) for how in ROUNDINGS)
MOMENTUM_BF16, MOMENTUM_INT8 = (
    Kind(torch.float32, torch.float32, "direction", "nearest", True, dtype, True)
    for dtype in (torch.bfloat16, torch.int8)
)
BFLOAT16_INT8 = Kind(torch.bfloat16, torch.bfloat16, "update", "stochastic", True, torch.int8, True)
ODD_BLOCKS = replace(BFLOAT16_INT8, aligned=False, lanes=128)
SOME = [FLOAT32, STOCHASTIC, MOMENTUM_BF16, MOMENTUM_INT8, ODD_BLOCKS]
TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Bytes of a thread: the kernels were fitted to Triton 3.9; older versions keep more at once in registers.
SPILLED = 0 if VERSION >= (3, 9) else 160


def cases() -> list[ParameterSet]:
    """Return some for `make test`, the same on other cards for `make test-all`, the rest are slow, too."""
    some = {variant.name for variant in variants(SOME)}
    found = []
    for target in TARGETS:
        for variant in variants(kinds()):
            marks = [pytest.mark.slow] if target != "sm_90" else []
            if variant.name not in some:
                marks = [pytest.mark.slow]
            found.append(pytest.param(variant, target, id=f"{target}-{variant.name}", marks=marks))
    return found


@pytest.mark.parametrize(("variant", "target"), cases())
def test_a_variant_fits_its_registers_and_keeps_its_arithmetic(variant: Variant, target: str) -> None:
    used = usage(variant, target)
    assert used.spilled <= SPILLED
    assert used.programs * used.threads >= 512  # a multiprocessor has at least 16 warps to choose from
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
    # rounds an int8 momentum down, and differs for a negative subnormal alone: 0, not −1, is the nearest integer there
    found -= {"cvt.rmi.ftz.f32.f32"}
    assert not {op for op in found if "approx" in op or ".ftz" in op or op.startswith("div.full")}
    if variant.kind.aligned and variant.kernel is last_pass:
        assert re.search(r"ld\.global[.\w:]*\.(v4\.b32|v2\.b64)", ptx)
        assert variant.raw or re.search(r"st\.global[.\w:]*\.(v4\.b32|v2\.b64)", ptx)
    if variant.kind.aligned and variant.kernel is first_pass and variant.stat == "fp32":  # else there are few elements
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
        assert any(int(size, 0) >= 8 for size in copies) or re.search(r"ld\.global[.\w:]*\.v[24]\.b", ptx)


def check_amdgcn(variant: Variant, code: str) -> None:
    """The same, in AMD's instructions."""
    assert not re.search(r"\b(global|flat|buffer)_atomic", code)
    if variant.kind.aligned and variant.kernel is last_pass:
        # a float64 parameter with 16-bit gradients: a thread has too few elements for 16 bytes
        least = "x[24]" if variant.kind.x == torch.float64 and variant.kind.g.itemsize == 2 else "x4"
        assert re.search(rf"\b(global|buffer)_load_dword{least}", code)
        assert variant.raw or re.search(r"\b(global|buffer)_store_dwordx4", code)


def test_compiled_code_on_disk_is_not_used_with_other_tables(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(Path(kind_module.__file__).parent, tmp_path / "triton"))
    assert kind_module.source_of(folder) == kind_module.SOURCE
    fields = folder / "fields.py"
    fields.write_text(fields.read_text().replace("G_ADDRESS, MUST_MEASURE", "MUST_MEASURE, G_ADDRESS"))
    other = kind_module.source_of(folder)
    assert other != kind_module.SOURCE
    launched = {variant.kernel: variant.options("sm_90") for variant in variants(SOME)}
    assert len(launched) == 8
    for kernel, options in launched.items():
        changed = options | {"KIND": replace(options["KIND"], source=other)}
        assert source(kernel, options).hash() != source(kernel, changed).hash(), kernel.__name__


CARDS = ["sm_90", *(pytest.param(card, marks=pytest.mark.slow) for card in ("sm_80", "sm_100"))]
needs_fitted = pytest.mark.skipif(VERSION < (3, 9), reason="instructions were counted with Triton 3.9")


@needs_fitted
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    ("kind", "most"), [(FLOAT32, 14), (BFLOAT16, 17), (STOCHASTIC, 36), (KAHAN, 28)], ids=["f32", "bf16", "sr", "kahan"]
)
def test_the_last_pass_takes_few_instructions_an_element_and_no_barrier(kind: Kind, most: float, card: str) -> None:
    """The loop of wide matrices: 4 lines of 512 elements by 256 threads, four 16-byte accesses of G and X in flight."""
    variant = Variant("last_pass", last_pass, kind)
    inner = loops(variant, card)[-1]
    assert len(inner) / 8 <= most
    assert not any("BAR.SYNC" in instruction for instruction in inner)
    used = usage(variant, card)
    assert used.programs * used.threads >= (32 if kind == BFLOAT16 else 24) * 32 and used.spilled == 0


@needs_fitted
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    ("kind", "most"), [(MOMENTUM_BF16, 39), (MOMENTUM_INT8, 56), (BFLOAT16_INT8, 61)], ids=["bf16", "int8", "bf16-int8"]
)
def test_a_rounded_momentum_takes_few_instructions_more(kind: Kind, most: float, card: str) -> None:
    """A random word is 17 of them. The largest number of a block is found within a warp, in one instruction of it."""
    variant = Variant("last_pass", last_pass, kind)
    inner = loops(variant, card)[-1]
    assert len(inner) / 8 <= most
    assert any("REDUX.MAX" in line for line in inner) == kind.IN_BLOCKS and not any("SHFL" in line for line in inner)
    used = usage(variant, card)
    assert used.programs * used.threads >= 16 * 32 and used.spilled == 0


@needs_fitted
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("kind", [FLOAT32, BFLOAT16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("width", "most"), [(16, 15), (768, 11), (2304, 13), (4096, 11), (5120, 12), (8192, 11), (11008, 13)]
)
def test_the_first_pass_takes_few_instructions_an_element(kind: Kind, width: int, most: float, card: str) -> None:
    """Instructions of a thread's loop for each element that is there: those beyond the end of a row count."""
    variant = Variant("first_pass", first_pass, kind, width)
    used, rows = usage(variant, card), variant.options(card)["TILING"].rows
    assert max(map(len, loops(variant, card))) * used.threads / (rows * width) <= most
    assert used.programs * used.threads >= 512 and used.spilled == 0
