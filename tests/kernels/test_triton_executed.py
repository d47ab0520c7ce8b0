"""The machine-level code of whole steps, executed: no race, nothing out of bounds, the same bits in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import needs

needs.triton()

from triton import knobs  # noqa: E402

from tests.kernels import triton_emulated, triton_traffic  # noqa: E402

if knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: kernels are not compiled", allow_module_level=True)
if not triton_emulated.find():
    pytest.skip("the emulator is not there: see triton_emulated.py", allow_module_level=True)

ALIGNED = [(20, 768), (6, 2304), (2, 5120), (2, 11008), (2, 16400), (70, 16), (48,), (2, 8, 32)]
RAGGED = [(20, 767), (5, 2305), (2, 5121), (70, 3), (31,), (4, 3, 5, 7)]
FEW = [(20, 768), (6, 2304), (2, 11008), (48,)]
ORDERS = ("linear", "reverse", "random")
SWEEP = [pytest.mark.slow, pytest.mark.sweep]  # minutes each


@dataclass
class Case:
    """A step to take."""

    name: str
    dtype: torch.dtype = torch.float32
    shapes: list[tuple[int, ...]] = field(default_factory=lambda: ALIGNED)
    settings: dict[str, Any] = field(default_factory=dict)
    target: str = "sm_80"
    spoil: bool = False  # a gradient is not finite
    behind: bool = False  # X is written to behind torch's back
    quick: bool = False


AVERAGE = {"beta1": 0.9, "momentum_of": "gradient"}
CASES = [
    Case("float32-few", shapes=FEW, quick=True),
    Case("float32"),
    Case("float32-sm_90", target="sm_90"),
    # not its long rows: there, half of a pair of registers is never set nor used, which the emulator takes for a fault
    Case("float32-sm_100", shapes=[(20, 768), (6, 2304), (70, 16), (48,)], target="sm_100"),
    Case("float32-ragged", shapes=RAGGED),
    Case("bfloat16", torch.bfloat16),
    Case("bfloat16-sm_90", torch.bfloat16, target="sm_90"),
    Case("bfloat16-ragged", torch.bfloat16, RAGGED),
    Case("stochastic", torch.bfloat16, settings={"rounding": "stochastic"}),
    Case("stochastic-ragged", torch.bfloat16, RAGGED, {"rounding": "stochastic"}),
    Case("kahan", torch.bfloat16, settings={"rounding": "kahan", "beta1": 0.9}),
    Case("float16-stochastic", torch.float16, FEW, {"rounding": "stochastic"}),
    Case("float64", torch.float64, FEW),
    Case("momentum-of-updates", settings={"beta1": 0.9, "weight_decay": 0.1}),
    Case("momentum-of-gradients", settings=AVERAGE),
    Case("momentum-of-gradients-ragged", shapes=RAGGED, settings=AVERAGE),
    Case("rows-alone", settings={"factored": "row"}),
    Case("columns-alone", shapes=FEW, settings={"factored": "column"}),
    Case("kept-whole", shapes=[(37, 48), (31,)], settings={"factored": False}),
    Case("not-finite", shapes=FEW, settings={"on_nonfinite": "skip"}, spoil=True),
    Case("written-behind", shapes=FEW, behind=True),
    Case("written-behind-kahan", torch.bfloat16, FEW, {"rounding": "kahan", "beta1": 0.9}, behind=True),
]


def material(case: Case) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Parameters, and the gradients of two steps."""
    torch.manual_seed(0)
    tensors = [(torch.randn(shape) * 0.05).to(case.dtype) for shape in case.shapes]
    steps = [[(torch.randn(s) * (torch.rand(s) + 0.1)).to(case.dtype) for s in case.shapes] for _ in range(2)]
    if case.spoil:
        steps[1][1].view(-1)[5] = float("nan")
    return tensors, steps


@pytest.mark.filterwarnings("ignore:skipped parameter")  # by `eager`, where a gradient is not finite
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=[] if c.quick else SWEEP) for c in CASES])
def test_two_steps_are_clean_and_have_the_same_bits_in_any_order_of_programs(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, steps = material(case)
    between = (lambda x: x.mul_(1.25)) if case.behind else None
    found = []
    for order in ORDERS[: 2 if case.quick else 3]:
        emulator = triton_emulated.Emulator(case.target, order)
        x, optimizer = triton_emulated.take(emulator, monkeypatch, tensors, steps, between, **case.settings)
        states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        found.append([*x, *states])
        assert {*emulator.launched} == {"begin_step", "measure", "first_pass", "fold", "last_pass"}
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    expected, _ = triton_emulated.take(None, monkeypatch, tensors, steps, between, **case.settings)
    for a, b in zip(found[0], expected, strict=False):
        agree(a, b, case)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("settings", [{}, {"rounding": "stochastic"}], ids=str)
def test_an_a100_and_an_h100_take_the_same_step_to_the_bit(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than is promised, which is the same kind of card: sm_100 adds up a thread's numbers in another order."""
    case = Case("cards", torch.bfloat16 if settings else torch.float32, FEW, settings)
    found = []
    for target in ("sm_80", "sm_90"):
        x, optimizer = triton_emulated.take(
            triton_emulated.Emulator(target), monkeypatch, *material(case), **case.settings
        )
        found.append([*x, *(t for state in optimizer.state.values() for t in state.values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def agree(a: Tensor, b: Tensor, case: Case) -> None:
    """As `eager` has it: to a few units in the last place, and most of the 16-bit ones exactly."""
    if case.dtype.itemsize >= 4:
        torch.testing.assert_close(a, b, rtol=1e-6, atol=5e-8)
    else:
        torch.testing.assert_close(a, b, rtol=2.0**-7, atol=1e-6)
        assert (a != b).sum() <= (0.1 if case.behind else 0.002) * a.numel() + 1


@pytest.mark.parametrize("card", triton_traffic.CARDS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 17.5), (torch.bfloat16, 9.0)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 11008), (11008, 4096), (50257, 768)], ids=str)
@pytest.mark.slow
@pytest.mark.sweep
def test_a_step_moves_little_more_than_it_must(
    shape: tuple[int, int], dtype: torch.dtype, most: float, card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed = triton_traffic.weigh(shape, dtype, card, 16, monkeypatch)
    assert weighed.usual <= weighed.cold + 0.01 <= most + 0.01  # the least is 16 and 8; fused AdamW moves 28 and 14
