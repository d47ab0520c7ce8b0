"""What the compilers make of the Triton kernels, on a machine without a GPU: registers and spills.

Run with TRITON_INTERPRET=0; `make test-all` does.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.kernels import needs

needs.triton()

import triton  # noqa: E402
from triton import knobs  # noqa: E402

if knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: kernels are not compiled", allow_module_level=True)

from tests.kernels.triton_ahead import Call, calls, compiled, usage  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
MOMENTUM: dict[str, Any] = {"beta1": 0.9}
CARDS = ("sm_80", "sm_90", "sm_100")
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
fitted = pytest.mark.skipif(VERSION < (3, 9), reason="registers were counted with Triton 3.9")

# The dtype and keywords of a matrix of 4096 columns, and the most registers of the last pass.
LAST: dict[str, tuple[torch.dtype, dict[str, Any], int]] = {
    "float32": (F32, {}, 64),
    "bfloat16": (BF16, {}, 56),
    "stochastic": (BF16, {"rounding": "stochastic"}, 72),
    "kahan": (BF16, {"rounding": "kahan"}, 64),
    "momentum": (F32, MOMENTUM, 64),
    "bfloat16 momentum": (F32, {**MOMENTUM, "momentum_dtype": "bfloat16"}, 128),
    "int8 momentum": (F32, {**MOMENTUM, "momentum_dtype": "int8"}, 128),
}


@fitted
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", LAST)
def test_both_passes_keep_their_registers(name: str, card: str) -> None:
    dtype, keywords, most = LAST[name]
    used = {call.name: usage(call, card) for call in calls((256, 4096), dtype, keywords)}
    assert used["last_pass"].spilled == used["first_pass"].spilled == 0
    assert used["last_pass"].registers <= most and used["first_pass"].registers <= 128
    assert used["first_pass"].shared <= 99 * 1024  # the least that a card has


def every() -> dict[str, list[Call]]:
    """The launches of tensors of every kind."""
    found = {"stochastic": calls((256, 4096), BF16, {"rounding": "stochastic"})}
    found |= {f"{width} columns": calls((16, width), F32, {}) for width in (16, 768, 4099, 12001, 16384)}
    found |= {f"a vector of {n}": calls((n,), F32, MOMENTUM) for n in (48, 2**20)}
    for estimator, width in (("row", 512), ("column", 130)):
        keywords = {**MOMENTUM, "momentum_dtype": "int8", "factored": estimator}
        found[f"factored={estimator}"] = calls((256, width), F32, keywords)
    return found


@pytest.mark.parametrize("card", ["sm_90", "sm_120", "gfx942"])
@pytest.mark.parametrize("name", every())
def test_nothing_spills_or_depends_on_the_order_of_programs(name: str, card: str) -> None:
    for call in every()[name]:
        most = 160 if VERSION < (3, 9) else 8 if card == "sm_120" else 0  # bytes of a thread
        used, warps = usage(call, card), call.launch.options["num_warps"]
        assert used.spilled <= most, call.name
        if card == "gfx942":
            assert warps * 64 <= 1024, "too many threads of a program"
        else:
            assert warps * 32 * -(-used.registers // 8) * 8 <= 2**16, "too many registers of a program"
        code = compiled(call, card).asm
        assert not re.search(r"\b(atom|red)\.|_atomic", code.get("ptx", "") + code.get("amdgcn", ""))
        if call.name == "last_pass" and name == "stochastic" and card == "sm_90":
            assert re.search(r"ld\.global[.\w:]*\.(v4\.b32|v2\.b64)", code["ptx"])
            assert re.search(r"st\.global[.\w:]*\.(v4\.b32|v2\.b64)", code["ptx"])
