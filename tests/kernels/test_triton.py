"""The Triton backend beside the others: who takes a tensor, and who may not."""

from __future__ import annotations

from adafactor import kernels
from tests.kernels import needs
from tests.launch import python

needs.triton()


def test_auto_takes_eager_on_every_gpu_until_a_card_has_passed() -> None:
    assert kernels.AUTO == {"cpu": "cpu"}


def test_without_the_interpreter_a_tensor_on_a_cpu_is_refused_by_name() -> None:
    code = "import torch, adafactor; p = torch.ones(4, 3, requires_grad=True); p.grad = torch.ones(4, 3)\n"
    code += "adafactor.Adafactor([('weight', p)], backend='triton').step()"
    said = python("-c", code, environment={"TRITON_INTERPRET": "0"}).stderr
    assert "cannot step weight" in said and "it is on cpu" in said
