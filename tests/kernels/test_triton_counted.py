"""What a step on a GPU launches, moves and uploads, counted without one; and the page that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from adafactor import Adafactor
from tests.kernels import needs

needs.triton()
from adafactor.check.timing import note_launches  # noqa: E402
from adafactor.kernels.triton import executor as works  # noqa: E402
from benchmarks.gpu import moved  # noqa: E402
from studies import gpu_counts  # noqa: E402
from studies.gpu_counts import FLOOR, MODELS, Model, count, on_a_cpu  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "gpu-verified.md"
ALL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@ALL
def test_a_step_takes_three_launches_a_kind_one_a_chunk_and_one_for_each_way_to_hold_rows(model: Model) -> None:
    found = count(model)
    assert found.first_step == found.step == 3 * found.kinds + found.chunks + found.first_passes
    assert found.first_passes <= 9 * found.kinds + found.chunks


def test_the_number_of_launches_does_not_depend_on_the_number_of_tensors() -> None:
    few, many = (Model("many", ((64, 48), (48,)) * number, torch.float32) for number in (2, 200))
    assert count(few).step == count(many).step == 6


def test_other_rows_take_one_launch_more_and_a_small_scratch_two_for_each_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Model("both", ((64, 512), (32, 16384)), torch.float32)
    assert (count(both).step, count(both).chunks) == (6, 1)
    monkeypatch.setattr(works, "LEAST_SCRATCH", 1)
    tight = Model("both, in no memory", both.shapes * 2, torch.float32)
    assert count(tight).chunks == 4 and count(tight).step == 5 + 2 * 3  # each matrix is a chunk of its own


@ALL
def test_nothing_is_uploaded_while_the_gradients_stay_and_one_table_a_kind_when_they_move(model: Model) -> None:
    assert count(model).idle_uploads == 0 and count(model).uploads == count(model).kinds


@ALL
def test_the_bytes_stay_near_the_floor(model: Model) -> None:
    each = count(model).bytes / model.parameters
    most = {torch.float32: 17.5, torch.bfloat16: 9.0}[model.dtype]
    # most tensors of these are small: all of X is checked, and R and C weigh as much as a part of it
    most += {"ResNet-50, channels last": 0.3, "LoRA of rank 16 on Llama 7B": 2.7}.get(model.title, 0.0)
    assert FLOOR[model.dtype] < each <= most


@pytest.mark.parametrize("name", ["gpt2", "gpt2-bfloat16"])  # a momentum of Llama's would fill the memory
@pytest.mark.parametrize(("dtype", "most"), [("float32", 8.0), ("bfloat16", 4.0), ("int8", 2 * 1.0325)])
def test_a_momentum_is_read_and_written_once(name: str, dtype: str, most: float) -> None:
    """Of int8, a scale is 4 bytes of 128 elements, and vectors keep a float32."""
    model = MODELS[name]
    without, found = count(model), count(model, beta1=0.9, momentum_dtype=dtype)
    each = (found.bytes - without.bytes) / model.parameters
    assert 0.97 * most < each <= most + 8 * sum(p.numel() for p in model.make() if p.dim() < 2) / model.parameters
    assert found.kinds == without.kinds + (dtype == "int8") and found.idle_uploads == 0
    assert found.step == 3 * found.kinds + found.chunks + found.first_passes


def test_bytes_are_those_of_the_units_that_the_tables_hold() -> None:
    model = Model("some", ((100, 48), (24, 20000), (3, 40, 64), (300,)), torch.float32)
    with on_a_cpu(), note_launches():
        optimizer = Adafactor(model.make(), backend="triton")
        optimizer.step()
    found = optimizer._buckets.of[None].executors
    sizes = moved(found)  # type: ignore[arg-type]
    matrices = sum(p.numel() for p in model.make() if p.dim() > 1)
    units = 0
    for work in found:
        for row in work.table.units.tolist():  # type: ignore[attr-defined]
            parameter = work.parameters[int(work.table.matrices[row[0], 0])]  # type: ignore[attr-defined]
            if parameter.x.dim() > 1 and row[3] == 0:  # another program has the rest of the columns
                units += 2 * 4 * parameter.x.shape[-1]
    factors = 3 * 4 * (100 + 24 + 3 * 40)
    assert sizes["first pass"] == 4 * matrices + units + factors + 2 * 4 * 300
    assert sizes["fold"] == units + 3 * 4 * (48 + 20000 + 3 * 64)
    assert sizes["measure"] == 4 * (matrices + 300)
    whole, tiles = (100 * 48 + 3 * 40 * 64 + 300) * 4, 40  # of 24 × 20000: every tenth and the heaviest
    assert sizes["begin step"] == whole + 4 * 24 * 20000 * 5 // tiles


def test_fused_adamw_is_cut_as_atens_header_says() -> None:
    def launches(*shapes: tuple[int, ...]) -> int:
        return gpu_counts.fused_adamw(Model("x", shapes, torch.float32))

    assert launches((10,)) == 1 + 1
    assert launches(*[(10,)] * 36) == 1 + 1 and launches(*[(10,)] * 37) == 2 + 1
    assert launches((65536 * 320,)) == 1 + 1 and launches((65536 * 320 + 1,)) == 2 + 1
    assert launches(*[(10,)] * 111) == 4 + 2


# "launches" takes a minute: eager PyTorch's operations on Llama 7B
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "launches")) for name in gpu_counts.TABLES]
)
def test_the_page_has_the_table_as_it_is_counted(name: str) -> None:
    shown = re.search(rf"<!-- {name} -->\n\n((?:\|.*\n)+)", PAGE.read_text())
    assert shown and shown[1].strip() == gpu_counts.TABLES[name]()
