"""A bad argument is an error that names it, its value and what is allowed; a good one is taken, however it is given."""

from __future__ import annotations

import copy
import inspect
import math
import re
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from adafactor import Adafactor, step_in_backward
from adafactor.core.settings import FOREIGN
from tests import inside
from tests.cases import normal
from tests.exact import assert_same, refused, snapshot

WRONG = [
    ("lr", -1.0, ValueError, "at least 0"),
    ("lr", math.nan, ValueError, "finite"),
    ("lr", "fast", TypeError, "number"),
    ("lr", None, TypeError, "number"),
    ("lr", True, TypeError, "number"),
    ("lr", torch.tensor([0.1, 0.2]), ValueError, "one element"),
    ("lr", torch.tensor(-0.1), ValueError, "at least 0"),
    ("lr_decay", "cosine", ValueError, "'rsqrt', None"),
    ("relative", 1, ValueError, "True, False"),
    ("factored", True, ValueError, "'outer', 'row', 'column', False"),
    ("beta1", 1.0, ValueError, "below 1"),
    ("momentum_of", 0.9, ValueError, "'update', 'gradient', 'direction'"),
    ("momentum_dtype", torch.bfloat16, ValueError, "'float32', 'bfloat16', 'int8'"),
    ("momentum_dtype", "int8", ValueError, "needs a momentum: set beta1"),
    ("weight_decay_by", "constant", ValueError, "must be one of 'rho', 'alpha', 'lr'"),
    ("beta2", "0,9", TypeError, "number"),
    ("beta2", 1.0, ValueError, "below 1"),
    ("decay_rate", 0.0, ValueError, "above 0"),
    ("clip", 0.0, ValueError, "above 0"),
    ("eps", 1e-30, TypeError, "pair"),
    ("eps", (1e-45, 1e-3), ValueError, "at least 1.17549e-38"),
    ("eps", (1e-30, -1.0), ValueError, "at least 0"),
    ("beta2_max", 1.0, ValueError, "below 1"),
    ("min_factored", 2.5, TypeError, "integer"),
    ("per_slice", 1, ValueError, "must be one of False, True"),
    ("weight_decay", -0.1, ValueError, "at least 0"),
    ("axes", (0.5, 1), TypeError, "integers"),
    ("axes", (0, 5), ValueError, "axes of the tensor"),
    ("axes", (1, -1), ValueError, "two different axes"),
    ("maximize", "yes", ValueError, "False, True"),
    ("on_nonfinite", "warn", ValueError, "'skip', 'raise', 'ignore'"),
    ("rounding", "up", ValueError, "'nearest', 'stochastic', 'kahan'"),
    ("seed", 2**64, ValueError, r"below 2\*\*64"),
    ("backend", "cuda", ValueError, "'auto', 'eager'"),
]


@pytest.mark.parametrize(("name", "value", "error", "allowed"), WRONG, ids=[f"{n}={v}" for n, v, *_ in WRONG])
def test_a_wrong_argument_is_named_with_what_is_allowed(
    name: str, value: Any, error: type[Exception], allowed: str
) -> None:
    """In the call, in a group, in one that is added, and after an edit: before anything changes."""
    p = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(error, match=f"^{name}.*{allowed}"):
        Adafactor([p], **{name: value})
    if name == "backend":
        return
    with pytest.raises(error, match=f"^{name}.*{allowed}"):
        Adafactor([{"params": [p], name: value}])
    optimizer = Adafactor([nn.Parameter(torch.ones(4))])
    with refused(optimizer, error, f"^{name}.*{allowed}"):
        optimizer.add_param_group({"params": [p], name: value})
    if value == "int8":  # an edit of it alone is taken: there is nothing to keep
        return
    optimizer.add_param_group({"params": [p]})
    for q in (p, optimizer.param_groups[0]["params"][0]):
        q.grad = torch.ones_like(q)
    before = snapshot(optimizer)
    usual = optimizer.param_groups[1][name]
    optimizer.param_groups[1][name] = value
    with pytest.raises(error, match=name):
        optimizer.step()
    optimizer.param_groups[1][name] = usual
    assert_same(snapshot(optimizer), before)


AS_GIVEN: list[tuple[str, Any, Any]] = [
    ("lr", "1e-3", 1e-3),
    ("lr_decay", "None", None),
    ("relative", "false", False),
    ("factored", "False", False),
    ("factored", "row", "row"),
    ("eps", "1e-30,1e-3", (1e-30, 1e-3)),
    ("eps", "(1e-30, 1e-3)", (1e-30, 1e-3)),
    ("eps", ["1e-30", "1e-3"], [1e-30, 1e-3]),
    ("axes", "[1, 0]", [1, 0]),
    ("rounding", "'stochastic'", "stochastic"),
    ("seed", "7", 7),
    ("stage", "3", "3"),  # the user's own
]


@pytest.mark.parametrize(("name", "text", "value"), AS_GIVEN, ids=[f"{n}={t}" for n, t, _ in AS_GIVEN])
def test_a_value_given_as_text_is_read_where_schedulers_and_loggers_see_it(name: str, text: Any, value: Any) -> None:
    """As trainers hand them over, from a command line or YAML."""
    optimizers = [Adafactor([{"params": [torch.ones(2, 3)], name: text}])]
    if name != "stage":
        optimizers.append(Adafactor([torch.ones(2, 3)], **{name: text}))
    for optimizer in optimizers:
        group = optimizer.param_groups[0]
        assert group[name] == value and type(group[name]) is type(value)


def test_numbers_of_other_kinds_are_numbers() -> None:
    ends = []
    for keywords in (
        {"lr": 1.0, "eps": (1e-30, 0.0), "clip": 1.5, "beta1": 0.5},
        {"lr": 1, "eps": [1e-30, 0], "clip": np.float32(1.5), "beta1": np.float64(0.5)},
    ):
        p = torch.linspace(0.5, 1.5, 6).view(2, 3).requires_grad_()
        optimizer = Adafactor([p], **keywords)  # type: ignore[arg-type]
        for _ in range(3):
            p.grad = p.detach().flip(0)
            optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends) and bool((ends[0] < 1.5).all())


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    dense, table = nn.Linear(4, 4), nn.Embedding(5, 4, sparse=True)
    optimizer = Adafactor([*dense.parameters(), *table.parameters()])
    dense(table(torch.tensor([1, 2]))).sum().backward()
    with refused(optimizer, TypeError, "parameter 2 is sparse"):
        optimizer.step()


def test_complex_and_integer_parameters_are_refused() -> None:
    for dtype in (torch.complex64, torch.int64):
        with pytest.raises(TypeError, match=f"{dtype}"):
            Adafactor([torch.ones(3, dtype=dtype)])


def test_flat_parameters_of_fsdp1_are_refused_with_the_way_out() -> None:
    p = nn.Parameter(torch.ones(8))
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


@pytest.mark.parametrize("backend", inside.AND_AUTO)
@pytest.mark.parametrize("scheduled", [False, True], ids=["plain", "with a scheduler"])
def test_a_skipped_step_is_warned_about_once_by_name_at_the_line_that_called_step(
    scheduled: bool, backend: str
) -> None:
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.full_like(p, float("nan"))
    optimizer = Adafactor([("weight", p)], backend=backend)
    if scheduled:
        LambdaLR(optimizer, lambda epoch: 1.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step(lambda: 0.0)
    assert [warning.filename for warning in told] == [__file__]
    assert "skipped weight (shape (3, 2))" in str(told[0].message) and optimizer.report()[0].skipped == 2


@pytest.mark.parametrize("backend", inside.AND_AUTO)
@pytest.mark.parametrize("keywords", [{}, {"on_nonfinite": "raise"}, {"beta1": 0.9, "relative": False}], ids=str)
def test_torchs_default_device_does_not_matter_to_parameters_on_another(keywords: dict[str, Any], backend: str) -> None:
    def run(where: str) -> dict[str, Any]:
        values = [normal((30, 20), i) for i in range(4)]
        model = nn.ParameterList([nn.Parameter(values[0]), nn.Parameter(values[0][0].clone())])
        with torch.device(where):
            optimizer = Adafactor(model.parameters(), backend=backend, **keywords)
            for value in values[1:3]:
                model[0].grad, model[1].grad = value.clone(), value[0].clone()
                optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            with step_in_backward(model, optimizer):
                ((model[0] * values[3]).sum() + (model[1] * values[3][1]).sum()).backward()
                optimizer.step()
            optimizer.report()
        return snapshot(optimizer)

    assert_same(run("meta"), run("cpu"))
