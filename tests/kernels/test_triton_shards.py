"""What the compilers make of the kernels of a sharded step."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs  # noqa: E402

if knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: kernels are not compiled", allow_module_level=True)

from adafactor.kernels.triton import shards  # noqa: E402
from adafactor.kernels.triton.work import Kind  # noqa: E402
from tests.kernels.triton_ahead import compiled_with, kinds  # noqa: E402

SOME = Kind(torch.bfloat16, torch.float32, 2, 0, True)
OTHERS = [pytest.param(target, marks=pytest.mark.slow) for target in ("sm_80", "sm_100", "gfx942")]


@pytest.mark.parametrize("target", ["sm_90", *OTHERS])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "ragged"])
def test_kernels_between_the_walks_compile_without_atomics(target: str, aligned: bool) -> None:
    kind = Kind(torch.float32, torch.float32, 0, 0, aligned)
    few = {"num_warps": 4, "enable_fp_fusion": False}
    for kernel, options in (
        (shards.means, {key: value for key, value in kind.fold().items() if key != "ST"}),
        (shards.factors, {"ST": kind.fold()["ST"], **few}),
        (shards.totals, few),
        (shards.conclude, few),
    ):
        code = compiled_with(kernel, options, target).asm
        assert not re.search(r"\b(atom|red)\.|_atomic", code.get("ptx", "") + code.get("amdgcn", ""))


def cases() -> list[object]:
    """One for `make test`, all for `make test-all`."""
    some = pytest.param(SOME, "sm_90", id="some")
    return [some, *(pytest.param(kind, "sm_90", id=str(kind), marks=pytest.mark.slow) for kind in kinds())]


@pytest.mark.parametrize(("kind", "target"), cases())
def test_the_walk_for_energies_compiles_for_any_kind(kind: Kind, target: str) -> None:
    ptx = compiled_with(shards.energy_walk, kind.last_walk(), target).asm["ptx"]
    assert "atom." not in ptx and "fma.rn.f32" not in ptx
    assert "ld.global.v4.b32" in ptx or "cp.async" in ptx or not kind.aligned
