"""Tensors whose memory does not hold their values as they are, or that share it: the right step, or a clear refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor
from tests import inside, oracle
from tests.attack import odd_tensors
from tests.attack.helpers import LR, PLAIN, assert_step, assert_unchanged, random, refused, run_python, snapshot

FALLBACK = pytest.mark.filterwarnings("ignore:.*is stepped by eager PyTorch:RuntimeWarning")


def negative(t: Tensor) -> Tensor:
    """The same values, kept with the other sign and a bit that says so."""
    lazy = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert lazy.is_neg() and torch.equal(lazy, t)
    return lazy


def negative_and_dense(t: Tensor) -> Tensor:
    """Likewise, without gaps in memory: nothing but the bit tells it from an ordinary tensor."""
    lazy = torch._neg_view(-t)
    assert lazy.is_neg() and torch.equal(lazy, t)
    return lazy


def imaginary(t: Tensor) -> Tensor:
    """The same values, in every second place of memory."""
    return torch.complex(torch.zeros_like(t), t).imag


def step_or_refuse(optimizer: Adafactor, backend: str) -> bool:
    """Take a step; the compiled backend, asked for by name, may refuse it before anything has changed."""
    before = snapshot(optimizer)
    message = refused(optimizer.step, *([ValueError] if backend in inside.COMPILED else []))
    if message is None:
        return True
    assert "parameter 0" in message
    assert_unchanged(optimizer, before)
    return False


@FALLBACK
@pytest.mark.parametrize("shape", [(), (5,), (64, 48), (300, 200)], ids=str)
@pytest.mark.parametrize("lazy", [negative, negative_and_dense, imaginary])
@pytest.mark.parametrize("which", ["gradient", "parameter", "both"])
def test_a_lazily_negated_or_imaginary_tensor_steps_like_its_values(
    shape: tuple[int, ...], lazy: Callable[[Tensor], Tensor], which: str, any_backend: str
) -> None:
    x = random(shape, 0)
    p = nn.Parameter(x.clone() if which == "gradient" else lazy(x))
    optimizer = Adafactor([p], lr_decay=None, backend=any_backend)
    memory = oracle.Memory()
    for t in range(1, 4):
        g = random(shape, t)
        p.grad = g if which == "parameter" else lazy(g)
        old = p.detach().double().numpy().copy()
        new = oracle.step(PLAIN, old, g.double().numpy(), t, 1.0, memory)
        if not step_or_refuse(optimizer, any_backend):
            return
        assert_step((torch.from_numpy(old), torch.as_tensor(new)), p.detach().resolve_neg())


@FALLBACK
def test_a_gradient_that_comes_out_of_complex_numbers_leads_downhill(any_backend: str) -> None:
    z = torch.tensor([1 + 2j, -0.5 + 0.3j, 0.2 - 1j])
    target = z * (0.36 - 0.9j)
    p = nn.Parameter(torch.tensor(0.5))
    optimizer = Adafactor([p], lr=0.05, relative=False, lr_decay=None, backend=any_backend)
    for _ in range(60):
        optimizer.zero_grad()
        (z * torch.complex(torch.tensor(0.36), p).conj() - target).abs().square().mean().backward()
        assert p.grad is not None and p.grad.is_neg()
        if not step_or_refuse(optimizer, any_backend):
            return
    assert p.item() == pytest.approx(0.9, abs=0.06)


@FALLBACK
def test_a_gradient_may_become_lazily_negated_in_mid_run(any_backend: str) -> None:
    p, q = (nn.Parameter(random((64, 48), 0)) for _ in range(2))
    lazy, plain = (Adafactor([x], backend=any_backend) for x in (p, q))
    for i in range(6):
        g = random((64, 48), i)
        p.grad, q.grad = negative_and_dense(g) if i in (3, 4) else g, g.clone()
        if not step_or_refuse(lazy, any_backend):
            return
        plain.step()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.fixture(scope="module", params=inside.AND_AUTO)
def told(request: pytest.FixtureRequest) -> tuple[str, dict[str, dict[str, Any]]]:
    """What became of a step of each odd kind; a kind that ends the process is left out, and the rest run in another."""
    backend, left = str(request.param), list(odd_tensors.KINDS)
    found: dict[str, dict[str, Any]] = {}
    while left:
        run = run_python("-m", "tests.attack.odd_tensors", backend, *left)
        lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        found.update({line["kind"]: line for line in lines})
        done = len(lines)
        assert run.returncode < 0 or done == len(left), run.stderr
        left = left[done + 1 :]
    return backend, found


@pytest.mark.parametrize("kind", odd_tensors.KINDS)
def test_a_tensor_without_plain_memory_is_stepped_rightly_or_refused_by_name(
    kind: str, told: tuple[str, dict[str, dict[str, Any]]]
) -> None:
    backend, found = told
    assert kind in found, "the process crashed"
    seen = found[kind]
    if "error" in seen:
        allowed = ["TypeError", "ValueError"] if backend in inside.COMPILED else ["TypeError"]
        assert seen["error"] in allowed and "weight" in seen["message"], seen
        assert kind == "fake" or (seen["x"] == odd_tensors.X.tolist() and seen.get("count", 0) == 0)
        return
    if kind == "fake":
        return  # it has no values
    g = torch.zeros(odd_tensors.SHAPE) if "zero" in kind else odd_tensors.G
    x = odd_tensors.X.double().numpy()
    new = oracle.step(PLAIN, x, g.double().numpy(), 1, 1.0, oracle.Memory())
    assert_step((torch.from_numpy(x), torch.from_numpy(new)), torch.tensor(seen["x"]))
    assert seen["count"] == 1


@pytest.mark.parametrize("kind", ["plain", "gradient is of a subclass", "subclasses"])
def test_a_subclass_that_computes_like_a_tensor_is_not_refused(
    kind: str, told: tuple[str, dict[str, dict[str, Any]]]
) -> None:
    backend, found = told
    assert kind in found, "the process crashed"
    assert backend in inside.COMPILED or "error" not in found[kind]


def trained_on_shared_memory(backend: str, threads: int, overlap: str) -> Tensor | None:
    """Two parameters over one memory each, or over halves that overlap; None if they are refused by name."""
    torch.set_num_threads(threads)
    base = [random((180, 180), i) for i in range(16)]
    parts = (slice(0, 180), slice(0, 180)) if overlap == "the same" else (slice(0, 120), slice(60, 180))
    params = [nn.Parameter(t[part]) for t in base for part in parts]
    optimizer = Adafactor(params, lr=LR, backend=backend)
    for step in range(8):
        for i, p in enumerate(params):
            p.grad = random(tuple(p.shape), 1000 * step + i)
        message = refused(optimizer.step, *([ValueError] if backend in inside.COMPILED else []))
        if message is not None:
            assert "parameter" in message
            return None
    return torch.stack(base)


@FALLBACK
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("overlap", ["the same", "halves"])
def test_parameters_over_one_memory_end_alike_every_time_or_are_refused(overlap: str, any_backend: str) -> None:
    expected = trained_on_shared_memory("eager", 1, overlap)
    assert expected is not None
    for threads in (1, 2, 2, 2):
        got = trained_on_shared_memory(any_backend, threads, overlap)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
