"""Without DTensors nothing of torch.distributed is needed."""

from __future__ import annotations

import subprocess
import sys

ALONE = """
import sys
import torch
sys.modules["torch.distributed.tensor"] = None  # importing it fails, as where torch is built without it
from adafactor import Adafactor
p = torch.ones(3, 4, requires_grad=True)
p.grad = torch.ones(3, 4)
optimizer = Adafactor([p], backend="eager")
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
"""
LIGHT = """
import sys
import adafactor
assert "torch.distributed.tensor" not in sys.modules
"""


def test_a_plain_step_works_where_torch_has_no_dtensor() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", ALONE], check=True)


def test_importing_adafactor_does_not_import_dtensor() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
