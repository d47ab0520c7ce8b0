"""The Triton backend, in its interpreter and without."""

from __future__ import annotations

import pytest

from tests.attack.helpers import run_python
from tests.distributed.launch import found
from tests.kernels import needs

needs.triton()


@pytest.mark.parametrize("fast", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_sharded_in_the_interpreter(fast: str) -> None:
    """On two ranks, beside the same steps on one process."""
    table = found(["interpreted"], ranks=2, TRITON_INTERPRET="1", FAST=fast)["interpreted"]
    lost = [table.pop(name) for name in list(table) if name.startswith("lost ")]
    assert len(lost) == (2 if fast == "1" else 5)
    assert all(rank["changed"] == [] and rank["continues"] for ranks in lost for rank in ranks)
    sizes = [len(row) for row in table.values()]
    assert sizes == ([6, 6, 5] if fast == "1" else [6] * 6 + [5, 6, 5])
    # sums in another order may round a number near the border the other way: of int8, that moves X by a 400th
    most = {name: {"int8": 5e-3, "bfloat16": 1e-4}.get(name.split()[0], 1e-5) for name in table}
    assert not {f"{name} {case}": e for name, row in table.items() for case, e in row.items() if not e < most[name]}


def test_without_the_interpreter_a_tensor_on_a_cpu_is_refused_by_name() -> None:
    code = "import torch, adafactor; p = torch.ones(4, 3, requires_grad=True); p.grad = torch.ones(4, 3)\n"
    code += "adafactor.Adafactor([('weight', p)], backend='triton').step()"
    assert (
        "cannot step weight" in (said := run_python("-c", code, TRITON_INTERPRET="0").stderr) and "it is on cpu" in said
    )
