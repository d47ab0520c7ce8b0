"""Bad and missing gradients, lost reductions, ranks that differ: all decide alike, before anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from adafactor import Adafactor
from tests.cases import is_there, normal
from tests.distributed.rig import (
    Collectives,
    assert_same_everywhere,
    assert_unchanged,
    held,
    line,
    part,
    split,
    square,
    whole,
)
from tests.inside import keep_scalars_on_the_device
from tests.ranks import on_ranks

PLACES: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows": ((6, 5), [Shard(0)]),
    "columns": ((6, 5), [Shard(1)]),
    "vector": ((5,), [Shard(0)]),
    "copies": ((3, 4), [Replicate()]),
}
BOTH = pytest.mark.parametrize("backend", ["eager", "auto"])


def is_last() -> bool:
    """Whether this is the rank where something is otherwise."""
    return dist.get_rank() == dist.get_world_size() - 1


def parameters(mesh: DeviceMesh) -> dict[str, Tensor]:
    """One parameter of each kind, and a plain one; a first dimension of two cuts the first axis of all."""
    first: list[Placement] = [Shard(0)] * (mesh.ndim - 1)
    found: dict[str, Tensor] = {
        name: split(torch.ones(shape), mesh, [*first, *places]) for name, (shape, places) in PLACES.items()
    }
    return {name: p.requires_grad_() for name, p in {**found, "plain": torch.ones(3, 4)}.items()}


def give(params: dict[str, Tensor], value: float = 1.0) -> None:
    """A gradient for each that is trained."""
    for p in params.values():
        p.grad = torch.full_like(p, value).detach() if p.requires_grad else None


def changed(params: dict[str, Tensor], before: dict[str, Tensor]) -> list[str]:
    """Which parameters are other than they were."""
    return [name for name, p in params.items() if not torch.equal(part(p), before[name])]


@BOTH
@pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")
@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_a_nan_on_one_rank_is_skipped_by_all_or_raises_on_all_before_anything_changes(mode: str, backend: str) -> None:
    def check() -> None:
        params = parameters(line())
        optimizer = Adafactor(params.items(), on_nonfinite=mode, backend=backend, beta1=0.9)
        for _ in range(2):
            give(params)
            optimizer.step()
        weights, before = {name: part(p) for name, p in params.items()}, [part(t) for t in held(optimizer)]
        give(params)
        if is_last():
            for name in ("rows", "vector"):
                params[name].grad.to_local().view(-1)[-1:] = float("nan")  # type: ignore[union-attr]
        if mode == "raise":
            with pytest.raises(FloatingPointError, match=r"the gradient of rows \(shape \(6, 5\)\)"):
                optimizer.step()
            assert_unchanged(held(optimizer), before)
        else:
            optimizer.step()
            assert changed(params, weights) == ["columns", "copies", "plain"]
            skipped = {record.name: record.skipped for record in optimizer.report()}
            assert skipped == {"rows": 1, "columns": 0, "vector": 1, "copies": 0, "plain": 0}
        assert_same_everywhere(*held(optimizer))

    on_ranks(2, check)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"beta1": 0.9, "weight_decay": 0.1},
    "momentum of the gradient": {"beta1": 0.9, "momentum_of": "gradient"},
    "unfactored": {"factored": False, "beta1": 0.9, "momentum_of": "gradient"},
    "bfloat16 momentum of the gradient": {"beta1": 0.9, "momentum_of": "gradient", "momentum_dtype": "bfloat16"},
}
TRITON = [pytest.mark.slow, pytest.mark.skipif(not is_there("triton"), reason="no Triton")]
LOST = [pytest.param(kind, "triton", marks=TRITON) for kind in ("plain", "momentum")]
LOST += [pytest.param(kind, backend) for kind in KINDS for backend in ("eager", "auto")]


@pytest.mark.parametrize(("kind", "backend"), LOST)
def test_a_step_that_is_lost_between_its_reductions_changes_nothing_and_can_be_taken_again(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives = Collectives(monkeypatch)

    def check() -> None:
        runs = [parameters(line()) for _ in range(2)]
        for params in runs if backend == "triton" else []:
            del params["columns"], params["plain"]
        optimizers = [Adafactor(params.items(), backend=backend, **KINDS[kind]) for params in runs]
        for step in range(4):
            for params, optimizer in zip(runs, optimizers, strict=True):
                give(params, step + 1.0)
                if step == 2 and optimizer is optimizers[0]:
                    before = [part(t) for t in held(optimizer)]
                    with pytest.raises(RuntimeError, match="lost on the way"):
                        collectives.during(optimizer.step, failing=1)
                    assert_unchanged(held(optimizer), before)
                optimizer.step()
        for ours, theirs in zip(*map(held, optimizers), strict=True):
            assert torch.equal(part(ours), part(theirs))

    on_ranks(2, check)


@pytest.mark.parametrize("case", ["rows at 0", "vector at 2", "copies at 2 partial"])
def test_a_gradient_missing_on_one_rank_is_named_on_all_before_anything_changes(case: str) -> None:
    name, _, when, *partial = case.split()
    said = f"^the gradient of {name} .* is missing on 1 of 2 ranks" if when != "0" else f"gradient of {name} .* None"

    def check() -> None:
        params, mesh = parameters(line()), line()
        optimizer = Adafactor(params.items())

        def gradients() -> None:
            give(params)
            if partial:
                share = torch.ones(PLACES["copies"][0]) / mesh.size()
                params["copies"].grad = DTensor.from_local(share, mesh, [Partial("sum")])

        for _ in range(int(when)):
            gradients()
            optimizer.step()
        before = [part(t) for t in held(optimizer)]
        gradients()
        if is_last():
            params[name].grad = None
        with pytest.raises(RuntimeError, match=said):
            optimizer.step()
        assert_unchanged(held(optimizer), before)
        gradients()
        optimizer.step()  # the mistake corrected, it goes on
        assert_same_everywhere(*held(optimizer))

    on_ranks(2, check)


DIFFERENCES: dict[str, tuple[slice, dict[str, Any], str]] = {  # what the last rank makes its optimizer of
    "order": (slice(None, None, -1), {}, "sharded parameter 0 is rows (shape"),
    "one less": (slice(1, None), {}, "sharded parameter 0 is rows (shape"),
    "factored": (slice(None), {"factored": False}, "factored of rows (shape"),
    "lr": (slice(None), {"lr": 0.02}, "lr of rows (shape"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
@pytest.mark.parametrize(("size", "mesh"), [(2, line), (4, square)], ids=["2", "2 × 2"])
def test_ranks_that_differ_at_their_first_step_all_say_in_what_before_anything_changes(
    case: str, size: int, mesh: Callable[[], DeviceMesh]
) -> None:
    which, keywords, said = DIFFERENCES[case]

    def check() -> str:
        params = parameters(mesh())
        named = list(params.items())
        optimizer = Adafactor(named[which], **keywords) if is_last() else Adafactor(named)
        give(params)
        before = [part(t) for t in held(optimizer)]
        with pytest.raises(RuntimeError, match="all ranks of a mesh need the same parameters") as caught:
            optimizer.step()
        assert_unchanged(held(optimizer), before)
        return str(caught.value)

    for told in on_ranks(size, check):
        assert told.startswith(said) and f" on rank {size - 1}: " in told


def test_states_that_differ_after_a_load_are_named() -> None:
    def check() -> None:
        params = parameters(line())
        optimizer = Adafactor(params.items())
        give(params)
        optimizer.step()
        state = optimizer.state_dict()
        for one in state["state"].values():
            one["step"] = one["step"] + 5 * is_last()
        optimizer.load_state_dict(state)
        give(params)
        with pytest.raises(RuntimeError, match=r"^step of rows .* is 1 on rank 0 but 6 on rank 1"):
            optimizer.step()

    on_ranks(2, check)


def test_a_rank_whose_statistics_lie_elsewhere_goes_on_with_the_others() -> None:
    def check() -> None:
        params = parameters(line())
        optimizer = Adafactor(params.items())
        for t in range(3):
            give(params)
            if t == 2 and is_last():
                optimizer.state[params["rows"]]["row"] = optimizer.state[params["rows"]]["row"].clone()
            optimizer.step()
        assert {float(optimizer.state[p]["step"]) for p in params.values()} == {3.0}
        assert_same_everywhere(*held(optimizer))

    on_ranks(2, check)


@pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")
def test_on_a_device_a_bad_or_missing_gradient_is_skipped_by_all_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_scalars_on_the_device(monkeypatch)

    def check() -> None:
        params = parameters(line())
        optimizer = Adafactor(params.items(), backend="eager", beta1=0.9)
        for t in range(3):
            give(params)
            before = {name: part(p) for name, p in params.items()}
            if t == 1 and is_last():
                params["rows"].grad.to_local()[:1] = float("nan")  # type: ignore[union-attr]
                params["vector"].grad = None
            optimizer.step()
            assert set(params) - set(changed(params, before)) == ({"rows", "vector"} if t == 1 else set())
        assert_same_everywhere(*held(optimizer))

    on_ranks(2, check)


def test_a_parameter_without_a_gradient_anywhere_stays_as_it_was() -> None:
    def check() -> None:
        params = parameters(line())
        optimizer = Adafactor(params.items())
        for without in (["rows"], list(params), []):
            before = {name: part(p) for name, p in params.items()}
            give(params)
            for name in without:
                params[name].grad = None
            optimizer.step()
            assert changed(params, before) == [name for name in params if name not in without]

    on_ranks(2, check)


def test_a_gradient_of_another_kind_than_its_parameter_is_refused() -> None:
    def check() -> None:
        params = parameters(line())
        params["plain"].grad = split(torch.ones(3, 4), line(), [Replicate()])
        with pytest.raises(TypeError, match="plain is a .*, but its gradient a DTensor"):
            Adafactor(params.items()).step()

    on_ranks(2, check)


def test_pipeline_stages_may_have_parameters_and_settings_of_their_own() -> None:
    """Two stages on two ranks each, and one parameter that all four hold."""

    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
        stage = mesh.get_local_rank("stage")
        shapes = [(8, 6), (3, 5), (7,)][: 2 + stage]
        meshes = [init_device_mesh("cpu", (4,)), mesh["data"], mesh["data"]][: 2 + stage]
        plain = [normal(shape, seed=i).double().requires_grad_() for i, shape in enumerate(shapes)]
        cut: list[Tensor] = [split(x, m, [Shard(0)]).requires_grad_() for x, m in zip(plain, meshes, strict=True)]
        groups: list[list[dict[str, Any]]] = [
            [{"params": params[:1]}, {"params": params[1:], "beta1": 0.9 * stage}] for params in (cut, plain)
        ]
        optimizers = [Adafactor(own) for own in groups]
        for t in range(3):
            for p, q, m in zip(cut, plain, meshes, strict=True):
                q.grad = normal(q.shape, seed=t).double()
                p.grad = split(q.grad, m, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
        for p, q in zip(cut, plain, strict=True):
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-12, atol=1e-12)

    on_ranks(4, check)
