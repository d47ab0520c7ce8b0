"""Under FSDP2, steps inside backward end on the bits of steps after it, and gradients are freed module by module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from adafactor import Adafactor, step_in_backward
from tests.backward.loops import Gauge
from tests.distributed.nets import Deep, Net, batch, both, even, fsdp, made, micro_batches, wide
from tests.distributed.rig import Collectives, held, line, square, whole
from tests.ranks import on_ranks

BF16 = torch.bfloat16
LOW: dict[str, Any] = {"rounding": "stochastic", "beta1": 0.9, "lr": 0.1}
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)


def recomputed(use_reentrant: bool) -> Callable[[nn.Module], object]:
    """Activation checkpoints."""

    def prepare(model: nn.Module) -> None:
        for block in model.get_submodule("blocks").children():
            block.reentrant = use_reentrant  # type: ignore[assignment]

    return prepare


def reduce_unused(model: nn.Module) -> None:
    """Where torch has it, gradients of parameters that nobody uses are reduced as zeros."""
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]


def ended(
    build: Callable[[nn.Module], nn.Module],
    inside: bool,
    dtype: torch.dtype = torch.float32,
    keywords: dict[str, Any] | None = None,
    net: Callable[[], nn.Module] = Deep,
    parts: int = 2,
    micro: int = 1,
    sync: bool = False,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **how: Any,
) -> list[Any]:
    """All weights and states, the report and the losses of three steps inside backward, or after it."""
    model = build(made(net, dtype))
    prepare(model)
    optimizer = Adafactor(model.named_parameters(), **(keywords or {}))
    if inside:
        step_in_backward(model, optimizer, **how)
    losses = []
    for step in range(3):
        for loss in micro_batches(model, step, parts, micro, sync):
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        assert all(p.grad is None for p in model.parameters()) or not inside
        optimizer.zero_grad()
    assert 3.0 in torch.cat([whole(state["step"]).flatten() for state in optimizer.state.values()])
    return [*map(whole, held(optimizer)), str(optimizer.report()), losses]


def assert_same_inside(build: Callable[[], Any], **how: Any) -> None:
    """To the bit."""
    inside = ended(build(), inside=True, **how)
    how.pop("accumulate", None)
    for ours, theirs in zip(inside, ended(build(), inside=False, **how), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "float32": (lambda: fsdp(line()), {}),
    "bfloat16, stochastic rounding": (lambda: fsdp(line()), {"dtype": BF16, "keywords": LOW}),
    "mixed precision": (lambda: fsdp(line(), mp_policy=MIXED), {}),
    "mixed precision of bfloat16": (lambda: fsdp(line(), mp_policy=MIXED), {"dtype": BF16, "keywords": LOW}),
    "CPU offload": (lambda: fsdp(line(), offload_policy=CPUOffloadPolicy(pin_memory=False)), {}),
    "micro-batches, reduced once": (lambda: fsdp(line()), {"micro": 2}),
    "micro-batches, reduced each": (lambda: fsdp(line()), {"micro": 2, "sync": True, "accumulate": 2}),
    "micro-batches, counted in vain": (lambda: fsdp(line()), {"micro": 2, "accumulate": 2}),
    "checkpoint": (lambda: fsdp(line()), {"prepare": recomputed(False)}),
    "reentrant checkpoint": (lambda: fsdp(line()), {"prepare": recomputed(True)}),
    "uneven": (lambda: fsdp(line()), {"net": Net}),
    "kept after forward": (lambda: fsdp(line(), reshard_after_forward=False), {}),
    "unused, reduced": (lambda: fsdp(line()), {"prepare": reduce_unused}),
    "eager": (lambda: fsdp(line()), {"keywords": {"backend": "eager"}}),
    "slices": (lambda: fsdp(line()), {"net": Net, "keywords": {"beta1": 0.9, "per_slice": True}}),
    "int8 momentum": (lambda: fsdp(line()), {"net": wide, "keywords": {"beta1": 0.9, "momentum_dtype": "int8"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_steps_inside_backward_to_the_bits_of_steps_after_it(case: str) -> None:
    build, how = CASES[case]
    on_ranks(2, lambda: assert_same_inside(build, **how))


FOUR: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "FSDP2": (lambda: fsdp(line()), {"parts": 4}),
    "HSDP": (lambda: fsdp(square()), {"parts": 4}),
    "FSDP2 × TP": (lambda: both(square()), {"parts": 1, "net": even}),
}


@pytest.mark.parametrize("case", FOUR)
def test_on_four_ranks_the_steps_are_those_after_backward_but_for_the_last_bit_of_a_sum(case: str) -> None:
    build, how = FOUR[case]

    def check() -> None:
        ours, theirs = (ended(build(), inside, torch.float64, **how)[:-2] for inside in (True, False))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)

    on_ranks(4, check)


def test_each_module_has_two_collectives_inside_backward_and_its_gradients_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collectives = Collectives(monkeypatch)

    def peak(inside: bool) -> int:
        deep = made(Deep)
        for block in deep.get_submodule("blocks").children():
            block.get_parameter("unused").requires_grad_(False)
        model = fsdp(line())(deep)
        gauge, optimizer = Gauge(model), Adafactor(model.named_parameters())
        handle = step_in_backward(model, optimizer) if inside else None
        for step in range(2):
            loss = loss_of(model, step)
            sent = [len(collectives.during(act)) for act in (loss.backward, optimizer.step)]
            assert sent == ([8, 0] if inside else [0, 2])
            optimizer.zero_grad()
            assert gauge.living() == 0
        assert handle is None or handle.norm is None
        return gauge.most

    def check() -> None:
        assert 3 * peak(inside=True) <= peak(inside=False)  # one of three blocks, and a root

    on_ranks(2, check)


def started() -> tuple[nn.Module, Adafactor]:
    """A model that steps inside backward."""
    model = fsdp(line())(made(Deep))
    optimizer = Adafactor(model.named_parameters())
    step_in_backward(model, optimizer)
    return model, optimizer


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    """Of this rank's data."""
    loss: Tensor = model(batch(step, dist.get_rank())).mean()
    return loss


def test_weights_that_stay_gathered_after_backward_are_refused() -> None:
    def check() -> None:
        model, _ = started()
        assert isinstance(model, FSDPModule)
        model.set_reshard_after_backward(False)
        with pytest.raises(RuntimeError, match="is still gathered after backward"):
            loss_of(model).backward()

    on_ranks(2, check)


def fail(*_: Any) -> None:
    """In the middle of backward, on all ranks."""
    raise MemoryError("half-way")


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="before torch 2.13 FSDP2 cannot go on")
def test_after_a_failure_half_way_another_batch_is_no_second_gradient() -> None:
    """What FSDP2 itself has left of the failed batch is another matter: see docs/backward.md."""

    def check() -> None:
        model, optimizer = started()
        hook = model.get_submodule("blocks.0").register_full_backward_pre_hook(fail)
        with pytest.raises(MemoryError, match="half-way"):
            loss_of(model).backward()
        hook.remove()
        optimizer.zero_grad()
        model.reset_iter_state()  # type: ignore[operator]
        loss_of(model, 1).backward()
        optimizer.step()
        steps = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters() if p in optimizer.state}
        assert steps["blocks.2.layers.up.weight"] == 2 and steps["blocks.0.layers.up.weight"] == steps["gain"] == 1

    on_ranks(2, check)


@pytest.mark.parametrize(("size", "mesh"), [(2, line), (4, square)], ids=["2", "2 × 2"])
def test_the_norm_of_sharded_gradients_is_that_of_the_whole(size: int, mesh: Callable[[], DeviceMesh]) -> None:
    """Copies count once."""

    def check() -> None:
        model, ordinary = (fsdp(mesh())(made(Deep)) for _ in range(2))
        optimizer = Adafactor(model.named_parameters())
        handle = step_in_backward(model, optimizer, max_norm=float("inf"))
        for m in (model, ordinary):
            loss_of(m).backward()
        optimizer.step()
        grads = [p.grad for p in ordinary.parameters() if p.grad is not None]
        expected = float(whole(nn.utils.get_total_norm(grads)))
        assert handle.norm is not None and handle.norm.item() == pytest.approx(expected, rel=1e-6)

    on_ranks(size, check)
