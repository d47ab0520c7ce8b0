"""A bad gradient never reaches the parameter or the state."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from tests import inside
from tests.compare import gradients, start

pytestmark = pytest.mark.usefixtures("backend")

KEYWORDS = [
    {},
    {"factored": False},
    {"factored": "row", "beta1": 0.9},
    {"factored": "column", "beta1": 0.9, "momentum_of": "gradient", "weight_decay": 0.1},
]


@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@pytest.mark.parametrize("shape", [(6, 5), (5,)], ids=str)
@pytest.mark.parametrize("when", [0, 2])
def test_the_mask_of_other_devices_does_what_the_branch_of_the_cpu_does(
    keywords: dict[str, object], shape: tuple[int, ...], when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where reading a scalar would make the host wait, it stays a tensor; here the same is done to CPU tensors."""

    def run(as_tensors: bool) -> tuple[Tensor, dict[str, Tensor], int]:
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            if as_tensors:
                inside.keep_scalars_on_the_device(patch)
            p = torch.tensor(start(shape), dtype=torch.float32, requires_grad=True)
            optimizer = Adafactor([p], **keywords)  # type: ignore[arg-type]
            for i, g in enumerate(gradients(shape, 5)):
                p.grad = torch.tensor(g, dtype=torch.float32)
                if i == when:
                    p.grad.view(-1)[0] = float("nan")
                optimizer.step()
            return p.detach(), dict(optimizer.state[p]), optimizer.report()[0].skipped

    (p, state, skipped), (q, masked_state, masked) = run(as_tensors=False), run(as_tensors=True)
    # float64 scalars and Python's may differ in the last digit of a power, and so may the float32 that follows
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)
    assert state["step"] == masked_state["step"] == 4 and skipped == masked == 1
    for key in state:
        # of the momentum terms cancel, and `lerp` by a number and by a tensor of one number takes other sides
        atol = 6e-7 if key.startswith("momentum") else 1e-10
        torch.testing.assert_close(state[key], masked_state[key], rtol=1e-6, atol=atol)


def test_a_skipped_step_is_warned_about_once_and_named() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = Adafactor(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    with pytest.warns(RuntimeWarning, match=r"skipped weight \(shape \(2, 3\)\)"):
        optimizer.step()
        optimizer.report()  # on a device nobody waits for what the step has found: there it comes with the report
    optimizer.step()  # warnings are errors here: a second one would raise
    assert [record.skipped for record in optimizer.report()] == [2, 2]


def test_ignore_lets_it_through() -> None:
    p = torch.ones(4, 3, requires_grad=True)
    p.grad = torch.ones(4, 3)
    p.grad[-1, -1] = float("nan")
    Adafactor([p], on_nonfinite="ignore").step()
    assert bool(p.isnan().any())
