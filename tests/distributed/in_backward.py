"""Step inside backward on several ranks: under FSDP2, tensor parallel and data parallel, against steps after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from adafactor import Adafactor, step_in_backward
from adafactor.backward.modules import find_wrapped
from tests.distributed.models import Block as Layers
from tests.distributed.models import Build, Net, fsdp, tensor_parallel
from tests.distributed.placements import everywhere, fingerprint, whole

FAST = "FAST" in os.environ
STEPS, WORDS, WIDTH = 3, 10, 12


class Block(nn.Module):
    """A residual block with a parameter that nobody uses and one that is frozen, recomputed in backward if asked."""

    def __init__(self) -> None:
        """Sizes that ranks cut unevenly."""
        super().__init__()
        self.layers, self.unused = Layers(WIDTH, 7), nn.Parameter(torch.ones(3, 5))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.again: bool | None = None  # `use_reentrant` of the checkpoint

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        y = self.layers(x) if self.again is None else checkpoint(self.layers, x, use_reentrant=self.again)
        assert isinstance(y, Tensor)
        return x + y * self.frozen


class Deep(nn.Module):
    """Three blocks between an embedding and a head that shares its weight."""

    def __init__(self) -> None:
        """One tied parameter, in the root; a scalar, which only one rank has a part of."""
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to a loss per sentence."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.gain * nn.functional.linear(x, self.embed.weight)
        return logits.logsumexp(-1).sub(logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)).mean(1)


def batch(step: int, seed: int) -> Tensor:
    """Ids of one step and one rank's data."""
    return torch.randint(WORDS, (4, 4), generator=torch.Generator().manual_seed(100 * step + seed))


def wrap(mesh: Any, **how: Any) -> Build:
    """`fully_shard` over every block, then over the rest."""

    def build(model: nn.Module) -> nn.Module:
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, **how)
        fully_shard(model, mesh=mesh, **how)
        return model

    return build


def in_units(model: nn.Module, optimizer: Adafactor) -> None:
    """The ordinary step of the parameters that step together inside backward: the same sums in the same buckets."""
    units = [unit.params for unit in find_wrapped(model)]
    optimizer._buckets.step_apart(p for unit in units for p in unit)
    with torch.no_grad():
        for unit in units:
            optimizer._step(unit)
            for p in unit:
                p.grad = None


def train(
    build: Build,
    way: str,
    dtype: torch.dtype = torch.float32,
    keywords: dict[str, Any] | None = None,
    net: Callable[[], nn.Module] = Deep,
    data: int | None = None,
    micro: int = 1,
    sync: bool = False,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **how: Any,
) -> tuple[str, list[float]]:
    """A fingerprint of weights and state after some steps, and the losses.

    Args:
        build: shards the model.
        way: to step: "inside" backward, in "units" after it, or "together" after it.
        dtype: of the weights.
        keywords: of the optimizer.
        net: makes the model.
        data: whose data this rank takes; by default its own.
        micro: backward passes to a step.
        sync: whether FSDP2 reduces gradients in each of them.
        prepare: changes the model when it is sharded.
        how: given to `step_in_backward`.
    """
    torch.manual_seed(0)
    model = build(net().to(dtype))
    prepare(model)
    optimizer = Adafactor(model.named_parameters(), **(keywords or {}))
    if way == "inside":
        step_in_backward(model, optimizer, **how)
    losses = []
    for step in range(STEPS):
        for number in range(micro):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(sync or number == micro - 1)
            loss = model(batch(step * micro + number, dist.get_rank() if data is None else data)).mean() / micro
            loss.backward()
            losses.append(loss.item())
        if way == "units":
            in_units(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert {float(state["step"]) for state in optimizer.state.values()} >= {STEPS}
    kept = [v for state in optimizer.state.values() for v in state.values()]
    return fingerprint([*(p.detach() for p in model.parameters()), *kept]) + str(optimizer.report()), losses


def equal(build: Build, **how: Any) -> dict[str, bool]:
    """Whether steps inside backward end on the bits of steps after it, in the same units and all together."""
    inside = train(build, "inside", **how)
    how.pop("accumulate", None)
    ways = ["together"] if FAST else ["together", "units"]  # two ranks have the same sums whatever the unit
    return {way: inside == train(build, way, **how) for way in ways}


def recompute(use_reentrant: bool) -> Callable[[nn.Module], object]:
    """Activation checkpoints."""

    def prepare(model: nn.Module) -> None:
        for block in model.get_submodule("blocks").children():
            block.again = use_reentrant  # type: ignore[assignment]

    return prepare


def compile_blocks(model: nn.Module) -> None:
    """`torch.compile` block by block."""
    for block in model.get_submodule("blocks").children():
        block.compile(backend="aot_eager")


def in_memory(inside: bool) -> dict[str, Any]:
    """How often units step and are reduced in one backward, and the most bytes of sharded gradients at a time."""
    torch.manual_seed(0)
    deep = Deep()
    for block in deep.blocks:
        block.get_parameter("unused").requires_grad_(False)
    model = wrap(init_device_mesh("cpu", (dist.get_world_size(),)))(deep)
    alive: dict[Any, tuple[StorageWeakRef, int]] = {}
    peak = 0

    def note(p: Tensor) -> None:
        nonlocal peak
        storage = p.grad.to_local().untyped_storage()  # type: ignore[union-attr]
        alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        peak = max(peak, sum(size for reference, size in alive.values() if not reference.expired()))

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(note)
    optimizer = Adafactor(model.named_parameters())
    if inside:
        step_in_backward(model, optimizer)
    sent = {"backward": 0, "step": 0}
    phase, original = "backward", dist.all_reduce

    def counted(*args: Any, **keywords: Any) -> Any:
        sent[phase] += 1
        return original(*args, **keywords)

    for step in range(2):
        peak, sent = 0, {"backward": 0, "step": 0}  # in the first one ranks also agree
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", counted)
            phase = "backward"
            loss(model, step).backward()
            phase = "step"
            optimizer.step()
        optimizer.zero_grad()
    return {"peak": peak, "sent": sent, "alive": sum(not reference.expired() for reference, _ in alive.values())}


def refusal(act: Callable[[nn.Module, Adafactor], object], **how: Any) -> str:
    """What a model under FSDP2 that steps inside backward raises."""
    model = wrap(init_device_mesh("cpu", (dist.get_world_size(),)))(Deep())
    optimizer = Adafactor(model.named_parameters())
    step_in_backward(model, optimizer, **how)
    try:
        act(model, optimizer)
    except (RuntimeError, FloatingPointError) as error:
        return str(error)
    return ""


def loss(model: nn.Module, step: int = 0) -> Tensor:
    """Of this rank's data."""
    found: Tensor = model(batch(step, dist.get_rank())).mean()
    return found


def keep_gathered(model: nn.Module, optimizer: Adafactor) -> None:
    """The copies that the next forward would use are those of before the step."""
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)
    loss(model).backward()


def twice(model: nn.Module, optimizer: Adafactor) -> None:
    """A second backward before `optimizer.step()`."""
    loss(model).backward()
    loss(model).backward()


def clip(model: nn.Module, optimizer: Adafactor) -> None:
    """Somebody asks for all gradients."""
    loss(model).backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)


def go_on(model: nn.Module, optimizer: Adafactor) -> None:
    """After a failure half-way, gradients are dropped and the next batch is taken."""
    block = model.get_submodule("blocks.0")
    hook = block.register_full_backward_pre_hook(fail)
    with pytest.raises(MemoryError, match="half-way"):
        loss(model).backward()
    hook.remove()
    optimizer.zero_grad()
    model.reset_iter_state()  # type: ignore[operator]  # else FSDP2 does not call a block's hooks the next time
    loss(model, 1).backward()
    optimizer.step()
    steps = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters() if p in optimizer.state}
    assert steps["blocks.2.layers.up.weight"] == 2 and steps["blocks.0.layers.up.weight"] == steps["gain"] == 1


def fail(*_: Any) -> None:
    """In the middle of backward, on all ranks."""
    raise MemoryError("half-way")


def load_anew(model: nn.Module, optimizer: Adafactor) -> None:
    """A state that is loaded in between on the last rank only is noticed by all, in the first unit that comes."""
    loss(model).backward()
    optimizer.step()
    if dist.get_rank() == dist.get_world_size() - 1:
        optimizer.load_state_dict(optimizer.state_dict())
    loss(model).backward()


def limited() -> dict[str, Any]:
    """The norm of all gradients as measured inside backward, as torch has it, and as `clip_grad_norm_` is told."""
    norms = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = wrap(init_device_mesh("cpu", (dist.get_world_size(),)))(Deep())
        optimizer = Adafactor(model.named_parameters())
        handle = step_in_backward(model, optimizer, max_norm=float("inf")) if inside else None
        loss(model).backward()
        total = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], float("inf"))
        norms.append(float(whole(total)))
        optimizer.step()
        if handle is not None and handle.norm is not None:
            norms.append(handle.norm.item())
    return {"norms": norms}


def under_fsdp(size: int) -> Iterator[tuple[str, Any]]:
    """Every option of FSDP2 that changes when gradients come, or in which form."""
    line = init_device_mesh("cpu", (size,))
    bf16 = torch.bfloat16
    low = {"rounding": "stochastic", "beta1": 0.9, "lr": 0.1}
    mixed = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=False)
    yield "float32", equal(wrap(line))
    yield "bfloat16, stochastic rounding", equal(wrap(line), dtype=bf16, keywords=low)
    yield "mixed precision", equal(wrap(line, mp_policy=mixed))
    yield "CPU offload", equal(wrap(line, offload_policy=offload))
    yield "micro-batches, synchronised once", equal(wrap(line), micro=2)
    yield "micro-batches, synchronised each", equal(wrap(line), micro=2, sync=True, accumulate=2)
    yield "checkpoint", equal(wrap(line), prepare=recompute(False))
    yield "uneven", equal(fsdp(line), net=Net)
    for momentum in ("bfloat16", "int8"):
        keywords = {"beta1": 0.9, "momentum_dtype": momentum, "backend": "eager"}
        yield f"{momentum} momentum", equal(fsdp(line), net=lambda: Net(True, width=256, inner=512), keywords=keywords)
    if not FAST:
        yield "float64, momentum", equal(wrap(line), dtype=torch.float64, keywords={"beta1": 0.9})
        yield "eager", equal(wrap(line), keywords={"backend": "eager"})
        yield "mixed precision of bfloat16", equal(wrap(line, mp_policy=mixed), dtype=bf16, keywords=low)
        yield "kept after forward", equal(wrap(line, reshard_after_forward=False))
        yield "micro-batches, counted in vain", equal(wrap(line), micro=2, accumulate=2)
        yield "reentrant checkpoint", equal(wrap(line), prepare=recompute(True))
        yield "compiled blocks", equal(wrap(line), prepare=compile_blocks)
        yield "unused, reduced", equal(wrap(line), prepare=reduce_unused)
    if size == 2:
        yield "tensor parallel", equal(tensor_parallel(line), net=lambda: Net(even=True), data=0)
        sequence = tensor_parallel(line, sequence=True)
        yield "tensor parallel, sequence", equal(sequence, net=lambda: Net(even=True), data=0)
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        yield "HSDP 2×2", equal(wrap(mesh))
        both = lambda model: fsdp(mesh["data"])(tensor_parallel(mesh["model"])(model))  # noqa: E731
        yield "FSDP2 × TP 2×2", equal(both, net=lambda: Net(even=True), data=mesh["data"].get_local_rank())


def reduce_unused(model: nn.Module) -> None:
    """Where torch has it, gradients of parameters that nobody uses are reduced as zeros."""
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]


def checks() -> Iterator[tuple[str, Any]]:
    """What every rank saw."""
    size = dist.get_world_size()
    for name, result in under_fsdp(size):
        yield f"equal | {name}", everywhere(result)
    yield "memory", everywhere({"inside": in_memory(True), "after": in_memory(False)})
    acts = [keep_gathered, twice, clip, load_anew]
    acts += [go_on] if hasattr(FSDPModule, "reset_iter_state") else []
    for act in acts:
        yield f"refusal | {act.__name__}", everywhere(refusal(act))
    yield "limited", everywhere(limited())
