"""optax as it is installed and T5X as it is written: from their trees into ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import adafactor
from tests.migration.peers import AFTER, BEFORE, Shapes, apart, gradient, notes, parameters, steps
from tests.migration.transcriptions import T5X, Fairseq

SHAPES: Shapes = [(24, 18), (18, 24), (7,), (), (20, 20)]
SEEDED = torch.Generator().manual_seed(0)
STACKED: Shapes = [(12, 20, 14), (20, 20, 20), (5, 5), (24, 18)]


def named(shapes: Shapes, dtype: torch.dtype = torch.float64) -> list[tuple[str, Tensor]]:
    return [(f"layer.{number}", p) for number, p in enumerate(parameters(shapes, dtype=dtype))]


def go_on(
    source: str,
    mine: list[tuple[str, Tensor]],
    tree: Any,
    arguments: dict[str, Any],
    after: int = AFTER,
    lr_after: float | None = None,
) -> list[Tensor]:
    """Load the tree and take the steps that the original takes; `lr_after` is an lr that is set with the move."""
    ours = adafactor.like(source, mine, **arguments)
    ours.load_state_dict(adafactor.migrate(tree, source, params=mine, arguments=arguments))
    for group in ours.param_groups if lr_after is not None else []:
        group["lr"] = lr_after
    params = [p for _, p in mine]
    steps(ours, params, range(BEFORE, BEFORE + after))
    return params


OPTAX: list[dict[str, Any]] = [
    {"min_dim_size_to_factor": 10},
    {"learning_rate": 1e-2, "min_dim_size_to_factor": 16, "momentum": 0.9},
    {"learning_rate": 1e-2, "multiply_by_parameter_scale": False, "momentum": 0.9, "weight_decay_rate": 1e-3},
    {"min_dim_size_to_factor": 10, "weight_decay_rate": 1e-2},
    {"learning_rate": 1e-2, "clipping_threshold": None, "factored": False, "eps": 1e-20},
    {"learning_rate": 1e-2, "decay_offset": 5, "min_dim_size_to_factor": 2},
]


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return pytest.importorskip("jax")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", OPTAX, ids=str)
def test_optax_and_ours_take_the_same_steps(arguments: dict[str, Any], jax: Any) -> None:
    assert apart(*move_from_optax(jax, arguments)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "words", "size"), [("bfloat16", "2 %", 0.02), ("float16", "(0.1 % in float16)", 0.001)]
)
def test_what_a_momentum_in_half_precision_does_there_is_as_large_as_it_is_said_to_be(
    dtype: str, words: str, size: float, jax: Any
) -> None:
    with notes() as told:
        ends = move_from_optax(jax, {**OPTAX[1], "dtype_momentum": dtype}, after=20)
    assert words in told[0]
    assert size / 2 < apart(*([p.double() for p in each] for each in ends)) < 2 * size


def move_from_optax(jax: Any, arguments: dict[str, Any], after: int = AFTER) -> tuple[list[Tensor], ...]:
    """Train with optax, move in, go on with both: where ours ends, where theirs ends, and where both started."""
    optax = pytest.importorskip("optax")
    params = named(SHAPES + STACKED, torch.float32)
    tree = {"layer": {str(i): jax.numpy.asarray(p.detach().numpy()) for i, (_, p) in enumerate(params)}}
    state = None
    for t in range(BEFORE + after):
        # an offset is for going on after a pre-training without one
        late = {} if t >= BEFORE else {"decay_offset": 0}
        optimizer = optax.adafactor(**{**arguments, **late})
        state = optimizer.init(tree) if state is None else state
        if t == BEFORE:
            values = [torch.tensor(np.asarray(value)) for value in tree["layer"].values()]
            mine = [(name, value.clone().requires_grad_()) for (name, _), value in zip(params, values, strict=True)]
            moved = go_on("optax", mine, state, arguments, after)
        grads = {"layer": {str(i): gradient(p, t, i).numpy() for i, (_, p) in enumerate(params)}}
        updates, state = optimizer.update(grads, state, tree)
        tree = optax.apply_updates(tree, updates)
    return moved, [torch.tensor(np.asarray(value)) for value in tree["layer"].values()], values


T5X_ARGUMENTS: list[dict[str, Any]] = [
    {"learning_rate": 1e-2, "min_dim_size_to_factor": 10},
    {"learning_rate": 1e-3, "beta1": 0.9, "weight_decay_rate": 1e-4, "multiply_by_parameter_scale": False},
    {"learning_rate": 1e-2, "clipping_threshold": None, "step_offset": 4, "min_dim_size_to_factor": 2},
    {"learning_rate": 1e-2, "weight_decay_rate_lr_exponent": 1, "factored": False},
    {"learning_rate": 1e-2, "weight_decay_rate": 10.0, "weight_decay_rate_lr_exponent": 2},
]


def train_t5x(params: list[tuple[str, Tensor]], arguments: dict[str, Any], unlike: dict[str, Any]) -> tuple[T5X, Any]:
    """Steps before the move; `unlike` are arguments that change with it."""
    theirs = T5X({name.replace(".", "/"): p.detach().numpy() for name, p in params}, **{**arguments, **unlike})
    t5x_steps(theirs, params, range(BEFORE))
    theirs.hyper |= arguments
    return theirs, theirs.state_dict()


def t5x_steps(theirs: T5X, params: list[tuple[str, Tensor]], span: range) -> None:
    for t in span:
        theirs.step({n.replace(".", "/"): gradient(p, t, i).numpy() for i, (n, p) in enumerate(params)})


@pytest.mark.parametrize("arguments", T5X_ARGUMENTS, ids=str)
def test_t5x_and_ours_take_the_same_steps_also_when_lr_changes(arguments: dict[str, Any]) -> None:
    params = named(SHAPES)
    theirs, tree = train_t5x(params, arguments, {"step_offset": 0})
    start = [torch.tensor(p) for p in theirs.params.values()]
    mine = [(name, x.clone().requires_grad_()) for (name, _), x in zip(params, start, strict=True)]
    moved = go_on("t5x", mine, tree, arguments, lr_after=5e-3)
    theirs.hyper["learning_rate"] = 5e-3
    t5x_steps(theirs, params, range(BEFORE, BEFORE + AFTER))
    assert apart(moved, [torch.tensor(p) for p in theirs.params.values()], start) < 1e-9


def stacks() -> list[tuple[str, Tensor]]:
    """Slices whose RMS differ 10 times: of matrices, and of vectors."""
    scale = torch.tensor([1.0, 0.1]).double()
    matrices, vectors = torch.randn(2, 20, 14, generator=SEEDED), torch.randn(2, 9, generator=SEEDED)
    return [("stack", scale[:, None, None] * matrices), ("norms", scale[:, None] * vectors)]


def test_slices_that_t5x_scales_and_clips_by_themselves_are_sliced_here() -> None:
    rules = {"stack": ("batch", "column", "row"), "norms": ("batch", "none")}
    arguments = {"learning_rate": 1e-2, "beta1": 0.9, "factor_map": rules}
    params = stacks()
    theirs, tree = train_t5x(params, arguments, {})
    start = [torch.tensor(p) for p in theirs.params.values()]
    mine = [(name, x.clone().requires_grad_()) for (name, _), x in zip(params, start, strict=True)]
    moved = go_on("t5x", mine, tree, arguments)
    t5x_steps(theirs, params, range(BEFORE, BEFORE + AFTER))
    assert apart(moved, [torch.tensor(p) for p in theirs.params.values()], start) < 1e-9


def test_slices_along_another_axis_are_not_and_the_difference_is_said() -> None:
    params = [("stack", stacks()[0][1].permute(1, 0, 2).contiguous())]
    arguments = {"learning_rate": 1e-2, "factor_map": {"stack": ("row", "batch", "column")}}
    theirs, tree = train_t5x(params, arguments, {})
    start = [torch.tensor(p) for p in theirs.params.values()]
    with notes() as told:
        moved = go_on("t5x", [("stack", start[0].clone().requires_grad_())], tree, arguments, after=20)
    assert "the slices of stack by themselves" in told[0] and "67 %" in told[0]
    t5x_steps(theirs, params, range(BEFORE, BEFORE + 20))
    assert 0.33 < apart(moved, [torch.tensor(p) for p in theirs.params.values()], start) < 1.34
    first = {"stack": ("stack", (1, 0, 2))}  # with the axis of the slices in front, they are ours
    shapes = {"stack": (2, 20, 14)}
    sliced = adafactor.migrate(tree, "t5x", params=shapes, arguments=arguments, paths=first)
    assert sliced["param_groups"][0]["per_slice"] and sliced["state"][0]["step"].tolist() == [BEFORE, BEFORE]


def test_transposed_matrices_move_in_with_their_paths() -> None:
    arguments = {"learning_rate": 1e-2, "min_dim_size_to_factor": 2}
    kernel = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    theirs = T5X({"dense/kernel": kernel.numpy()}, **arguments)
    grads = [torch.randn(6, 4, generator=torch.Generator().manual_seed(t)).double() for t in range(30)]
    for g in grads[:5]:
        theirs.step({"dense/kernel": g.numpy()})
    weight = torch.tensor(theirs.params["dense/kernel"].T.copy(), requires_grad=True)
    ours = adafactor.like("t5x", [("weight", weight)], **arguments)
    paths = {"weight": ("dense/kernel", (1, 0))}
    moved = adafactor.migrate(theirs.state_dict(), "t5x", params={"weight": weight}, arguments=arguments, paths=paths)
    ours.load_state_dict(moved)
    for g in grads[5:]:
        theirs.step({"dense/kernel": g.numpy()})
        weight.grad = g.T.contiguous()
        ours.step()
    assert np.allclose(weight.detach().numpy().T, theirs.params["dense/kernel"], rtol=1e-12, atol=1e-13)


WRONG_TREES: list[tuple[dict[str, Any], str]] = [
    ({"params": None}, "pass params with names"),
    ({"params": {"layer.0": (24, 18)}}, "the state has 'layer/1', which is none of the parameters"),
    ({"params": {"layer.0": (24, 18), "layer.1": (7,), "more": (2,)}}, "the state has nothing under 'more'"),
    (
        {"params": {"layer.0": (24, 19), "layer.1": (7,)}},
        "of layer/0 are .* not the means of rows and of columns of one tensor of shape",
    ),
    (
        {"params": {"layer.0": (24, 18), "layer.1": (8,)}},
        r"layer/1 has the shape \(8,\), its state is of the shape \(7,\)",
    ),
    ({"paths": {"nobody": "layer/0"}}, "paths has 'nobody'"),
    ({"paths": {"layer.0": ("layer/0", (0, 0))}}, "cannot have its axes in the order"),
    ({"arguments": {}}, "takes no step without a learning_rate"),
    ({"arguments": {"learning_rate": 1e-2, "beta1": 0.9}}, "momentum of shape"),
    ({"arguments": {"lr": 1e-2}}, "has no argument 'lr'"),
    ({"arguments": {"learning_rate": 1e-2, "weight_decay_rate_lr_exponent": 3}}, "exponent=3 must be None, 0, 1 or 2"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_TREES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_tree_that_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments = {"learning_rate": 1e-2, "min_dim_size_to_factor": 10}
    params = named([(24, 18), (7,)])
    _, tree = train_t5x(params, arguments, {})
    fitting: dict[str, Any] = {"params": dict(params), "arguments": arguments}
    if change.get("arguments") is not None:
        change = {"arguments": {**change["arguments"], "min_dim_size_to_factor": 10}}
    with pytest.raises(ValueError, match=message):
        adafactor.migrate(tree, "t5x", **{**fitting, **change})


FAIRSEQ: list[dict[str, Any]] = [
    {},
    {"beta1": 0.9, "scale_parameter": False},
    {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "weight_decay": 0.1},
    {"weight_decay": 0.1},
]


def train_fairseq(arguments: dict[str, Any]) -> tuple[Fairseq, dict[str, Any], list[Tensor]]:
    params = parameters(SHAPES, dtype=torch.float64)
    theirs = Fairseq([p.detach().numpy() for p in params], **arguments)
    for t in range(BEFORE):
        theirs.step([gradient(p, t, i).numpy() for i, p in enumerate(params)])
    state = {
        i: {key: value if key in ("step", "RMS") else torch.tensor(np.asarray(value)) for key, value in entry.items()}
        for i, entry in enumerate(theirs.state)
    }
    groups = [{**theirs.group, "params": list(range(len(SHAPES)))}]
    return theirs, {"state": state, "param_groups": groups}, params


@pytest.mark.parametrize("arguments", FAIRSEQ, ids=str)
def test_fairseq_and_ours_take_the_same_steps(arguments: dict[str, Any]) -> None:
    theirs, saved, params = train_fairseq(arguments)
    start = [torch.tensor(p) for p in theirs.params]
    mine = [x.clone().requires_grad_() for x in start]
    ours = adafactor.like("fairseq", mine, **arguments)
    ours.load_state_dict(adafactor.migrate(saved, "fairseq", params=mine))
    for t in range(BEFORE, BEFORE + AFTER):
        theirs.step([gradient(p, t, i).numpy() for i, p in enumerate(params)])
    steps(ours, mine, range(BEFORE, BEFORE + AFTER))
    assert apart(mine, [torch.tensor(p) for p in theirs.params], start) < 1e-9


def test_an_lr_that_fairseq_overwrote_is_not_taken_for_the_real_one() -> None:
    arguments = {"lr": 1e-2, "relative_step": False}
    _, saved, _ = train_fairseq(arguments)
    assert saved["param_groups"][0]["lr"] < 1e-3
    with pytest.raises(ValueError, match="pass the real one"):
        adafactor.migrate(saved, "fairseq")
    with notes() as told:
        moved = adafactor.migrate(saved, "fairseq", arguments={"lr": 1e-2})
    assert "its steps vanish" in told[0] and moved["param_groups"][0]["lr"] == 1e-2
