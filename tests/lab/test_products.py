"""The lab's products are torch's, up to the last digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lab.products import Linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("narrow", "wide"), [(12, 40), (40, 12)])
def test_layer_and_gradients_are_torchs(narrow: int, wide: int, bias: bool) -> None:
    ours, theirs = Linear(narrow, wide, bias=bias), nn.Linear(narrow, wide, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 7, narrow)

    def gradients(layer: nn.Linear) -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        out.square().sum().backward()
        return [out.detach(), *(p.grad for p in (inputs, *layer.parameters()) if p.grad is not None)]

    for a, b in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    layer = Linear(5, 3).to(dtype)
    x = torch.randn(2, 5, dtype=dtype)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
