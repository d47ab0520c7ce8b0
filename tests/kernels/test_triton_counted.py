"""What a step on a GPU launches, counted without one; and the page that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.kernels import needs

needs.triton()
from studies import gpu_counts  # noqa: E402
from studies.gpu_counts import Model, count  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


@pytest.mark.parametrize("keywords", [{}, {"beta1": 0.9, "momentum_dtype": "int8"}], ids=str)
def test_a_matrix_takes_four_launches_and_a_vector_one(keywords: dict[str, object]) -> None:
    assert count(Model("both", ((640, 512), (48,), (40, 30)), torch.float32), **keywords) == 4 + 1 + 4
    assert count(Model("a long vector", ((2**20,),), torch.float32), **keywords) == 3


# a minute: eager PyTorch's operations on Llama 7B
@pytest.mark.slow
@pytest.mark.parametrize("name", gpu_counts.TABLES)
def test_the_page_has_the_table_as_it_is_counted(name: str) -> None:
    shown = re.search(rf"<!-- {name} -->\n\n((?:\|.*\n)+)", PAGE.read_text())
    assert shown and shown[1].strip() == gpu_counts.TABLES[name]()
