"""A bad argument is an error that names it, its value and what is allowed."""

from __future__ import annotations

import copy
import inspect
import math
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from adafactor import Adafactor
from adafactor.core.settings import FOREIGN

WRONG = [
    ("lr", -1.0, ValueError, "at least 0"),
    ("lr", math.nan, ValueError, "finite"),
    ("lr", math.inf, ValueError, "finite"),
    ("lr", "fast", TypeError, "number"),
    ("lr", None, TypeError, "number"),
    ("lr", True, TypeError, "number"),
    ("lr", torch.tensor([0.1, 0.2]), ValueError, "one element"),
    ("lr", torch.tensor(-0.1), ValueError, "at least 0"),
    ("lr_decay", "cosine", ValueError, "'rsqrt', None"),
    ("relative", 1, ValueError, "True, False"),
    ("factored", True, ValueError, "'outer', 'row', 'column', False"),
    ("factored", "both", ValueError, "'outer'"),
    ("beta1", 1.0, ValueError, "below 1"),
    ("beta1", -0.1, ValueError, "at least 0"),
    ("momentum_of", 0.9, ValueError, "'update', 'gradient', 'direction'"),
    ("momentum_dtype", "int4", ValueError, "'float32', 'bfloat16', 'int8'"),
    ("momentum_dtype", torch.bfloat16, ValueError, "'float32', 'bfloat16', 'int8'"),
    ("weight_decay_by", "constant", ValueError, "must be one of 'rho', 'alpha', 'lr'"),
    ("beta2", 1.0, ValueError, "below 1"),
    ("beta2", "0,9", TypeError, "number"),
    ("decay_rate", 0.0, ValueError, "above 0"),
    ("decay_rate", -0.8, ValueError, "above 0"),
    ("clip", 0.0, ValueError, "above 0"),
    ("clip", math.nan, ValueError, "finite"),
    ("eps", 1e-30, TypeError, "pair"),
    ("eps", (1e-30,), TypeError, "pair"),
    ("eps", (0.0, 1e-3), ValueError, "at least 1.17549e-38"),
    ("eps", (1e-45, 1e-3), ValueError, "at least 1.17549e-38"),
    ("eps", (1e-30, -1.0), ValueError, "at least 0"),
    ("eps", (None, 1e-3), TypeError, "number"),
    ("beta2_max", 1.0, ValueError, "below 1"),
    ("min_factored", -1, ValueError, "at least 0"),
    ("min_factored", 2.5, TypeError, "integer"),
    ("per_slice", 1, ValueError, "must be one of False, True"),
    ("weight_decay", -0.1, ValueError, "at least 0"),
    ("axes", 3, TypeError, "pair"),
    ("axes", (0.5, 1), TypeError, "integers"),
    ("axes", (0, 5), ValueError, "axes of the tensor"),
    ("axes", (1, 1), ValueError, "two different axes"),
    ("axes", (1, -1), ValueError, "two different axes"),
    ("maximize", "yes", ValueError, "False, True"),
    ("on_nonfinite", "warn", ValueError, "'skip', 'raise', 'ignore'"),
    ("rounding", "up", ValueError, "'nearest', 'stochastic', 'kahan'"),
    ("seed", -1, ValueError, "at least 0"),
    ("seed", 2**64, ValueError, r"below 2\*\*64"),
    ("seed", 0.5, TypeError, "integer"),
    ("seed", True, TypeError, "integer"),
    ("backend", "cuda", ValueError, "'auto', 'eager'"),
]


@pytest.mark.parametrize(("name", "value", "error", "allowed"), WRONG, ids=[f"{n}={v}" for n, v, *_ in WRONG])
def test_a_wrong_argument_is_named_with_what_is_allowed(
    name: str, value: Any, error: type[Exception], allowed: str
) -> None:
    with pytest.raises(error, match=f"^{name}.*{allowed}"):
        Adafactor([torch.ones(2, 3)], **{name: value})
    if name != "backend":
        with pytest.raises(error, match=f"^{name}.*{allowed}"):
            Adafactor([{"params": [torch.ones(2, 3)], name: value}])


@pytest.mark.parametrize("name", ["lr", "clip", "momentum_of"])
def test_a_group_edited_wrongly_is_refused_before_anything_changes(name: str) -> None:
    params = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    optimizer = Adafactor([{"params": [p]} for p in params])
    for p in params:
        p.grad = torch.ones(2, 3)
    optimizer.param_groups[1][name] = -1
    with pytest.raises(ValueError, match=f"{name}=-1"):
        optimizer.step()
    assert all(torch.equal(p, torch.ones(2, 3)) for p in params)


def test_numbers_of_other_kinds_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    ends = []
    for keywords in (
        {"lr": 1.0, "eps": (1e-30, 0.0), "clip": 1.5, "beta1": 0.5},
        {"lr": 1, "eps": [1e-30, 0], "clip": numpy.float32(1.5), "beta1": numpy.float64(0.5)},
    ):
        p = torch.linspace(0.5, 1.5, 6).view(2, 3).requires_grad_()
        optimizer = Adafactor([p], **keywords)
        for _ in range(3):
            p.grad = p.detach().flip(0)
            optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends) and bool((ends[0] < 1.5).all())


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    dense, table = torch.nn.Linear(4, 4), torch.nn.Embedding(5, 4, sparse=True)
    optimizer = Adafactor([*dense.parameters(), *table.parameters()])
    dense(table(torch.tensor([1, 2]))).sum().backward()
    before = dense.weight.detach().clone()
    with pytest.raises(TypeError, match="parameter 2 is sparse"):
        optimizer.step()
    assert torch.equal(before, dense.weight)


def test_complex_and_integer_parameters_are_refused() -> None:
    for dtype in (torch.complex64, torch.int64):
        with pytest.raises(TypeError, match=f"{dtype}"):
            Adafactor([torch.ones(3, dtype=dtype)])


def test_flat_parameters_of_fsdp1_are_refused_with_the_way_out() -> None:
    p = torch.nn.Parameter(torch.ones(8))
    p._fsdp_flattened = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="FSDP2"):
        Adafactor([p])


def test_importing_the_package_imports_torch_and_nothing_else() -> None:
    code = (
        "import torch, sys; before = set(sys.modules); import adafactor; adafactor.diagnostics.Watch; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['adafactor']"


@pytest.mark.parametrize("name", FOREIGN)
def test_a_keyword_of_another_optimizer_is_refused_with_ours_and_the_way_in(name: str) -> None:
    given: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=f"'{name}'.*{re.escape(FOREIGN[name])}.*adafactor.like"):
        Adafactor([torch.ones(2, 3)], **given)


def test_every_keyword_of_other_adafactors_is_ours_or_has_a_hint() -> None:
    ours = set(inspect.signature(Adafactor).parameters)
    assert "relative" in ours and not ours & set(FOREIGN)
    for other in (torch.optim.Adafactor, torch.optim.AdamW):
        assert set(inspect.signature(other).parameters) <= ours | set(FOREIGN)


SMALL: dict[str, tuple[list[float | torch.Tensor], dict[str, Any], bool]] = {
    "AdamW's": ([3e-4], {}, True),
    "AdamW's, in all groups": ([3e-4, 1e-5], {}, True),
    "the default": ([1e-2], {}, False),
    "of T5": ([1e-3], {}, False),
    "zero, for a schedule": ([0.0], {}, False),
    "less in lower layers": ([1e-2, 1e-4], {}, False),
    "a tensor": ([torch.tensor(3e-4)], {}, False),
    "meant": ([3e-4], {"relative": True}, False),
    "absolute": ([3e-4], {"relative": False}, False),
}


@pytest.mark.parametrize("case", SMALL)
def test_a_learning_rate_of_adamw_is_told_of_once_with_the_line_to_write(case: str) -> None:
    lrs, keywords, told = SMALL[case]
    groups = [{"params": [torch.ones(2, 3)], "lr": lr} for lr in lrs]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer = Adafactor(groups, **keywords)
        copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())
        Adafactor(optimizer.param_groups)  # as they are by now, with every keyword in them
    assert [(w.category, w.filename) for w in found] == [(UserWarning, __file__)] * told
    if told:
        assert "Adafactor(params, lr=0.0003, relative=False, lr_decay=None)" in str(found[0].message)
