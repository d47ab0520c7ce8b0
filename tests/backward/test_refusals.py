"""What cannot work with step inside backward says so, and failures half-way leave a model that can go on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from adafactor import Adafactor, step_in_backward
from tests.backward.loops import Fails, Run, loss_of, plain
from tests.exact import copy_of


def test_a_second_backward_in_a_step_is_refused() -> None:
    inside = Run().attached()
    loss_of(inside.model, 0).backward()
    with pytest.raises(RuntimeError, match=r"second gradient came for \S+, .* optimizer\.step\(\) .* accumulate="):
        loss_of(inside.model, 1).backward()


def test_a_graph_that_is_kept_for_a_second_backward_is_refused() -> None:
    model, optimizer = plain()
    step_in_backward(model, optimizer)
    loss = model(torch.ones(6)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second gradient|modified by an inplace operation"):  # ours or torch's
        loss.backward()


def test_raising_inside_backward_leaves_the_bad_one_and_says_that_others_have_stepped(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    optimizer = Adafactor(model.named_parameters(), on_nonfinite="raise")
    step_in_backward(model, optimizer)
    before = copy_of(model)
    x = torch.ones(6)
    x[2] = math.inf
    with pytest.raises(FloatingPointError, match=r"gradient of 0\.weight .* nothing was updated of it, but this is"):
        model(x).sum().backward()
    same = {name for name, value in copy_of(model).items() if torch.equal(value, before[name])}
    assert same - {"0.bias"} == {"0.weight"}  # the bias beside it may come before or after
    with pytest.raises(FloatingPointError, match="0.weight"):
        optimizer.step()  # as in the ordinary loop, until the gradient is dropped
    optimizer.zero_grad()
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_after_a_failure_half_way_the_next_batch_goes_on() -> None:
    model, optimizer = plain()
    step_in_backward(model, optimizer)
    with pytest.raises(MemoryError, match="half-way"):
        model[2](Fails.apply(model[:2](torch.ones(6)))).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [1, 1, 2, 2]


def test_bad_arguments_are_named_and_attach_nothing() -> None:
    model, optimizer = plain()
    unnamed = Adafactor(model.parameters())
    for wrong, error, message in (
        ((model.parameters(), optimizer), TypeError, "model must be a torch.nn.Module, not generator"),
        ((model, torch.optim.SGD(model.parameters())), TypeError, "optimizer must be an adafactor.Adafactor, not SGD"),
        ((model[0], optimizer), ValueError, "2.weight, 2.bias: held by the optimizer, but not in the model"),
        ((nn.Linear(2, 2), unnamed), ValueError, "^parameter 0, parameter 1, parameter 2 and 1 more: held by"),
        ((nn.ModuleList([model, nn.Linear(2, 2)]), optimizer), ValueError, "1.weight, 1.bias: trainable, but not in"),
    ):
        with pytest.raises(error, match=message):
            step_in_backward(*wrong)
    for keywords, error, message in (
        ({"accumulate": 0}, ValueError, "accumulate=0 must be at least 1"),
        ({"accumulate": True}, TypeError, "accumulate=True must be an integer"),
        ({"max_norm": math.nan}, ValueError, "max_norm=nan must be None or a number above 0"),
    ):
        with pytest.raises(error, match=message):
            step_in_backward(model, optimizer, **keywords)
    model(torch.ones(6)).sum().backward()
    assert clip_grad_norm_(model.parameters(), 1.0) > 0


def test_attaching_twice_is_an_error() -> None:
    model, optimizer = plain()
    handle = step_in_backward(model, optimizer)
    for other in (optimizer, Adafactor(model.parameters())):
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias, 2\.weight and 1 more: attached already"):
            step_in_backward(model, other)
    handle.remove()
    step_in_backward(model, optimizer)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("as_views", [False, True])
def test_data_parallel_is_refused_and_noticed_in_the_first_step_where_the_wrapper_is_not_seen(as_views: bool) -> None:
    model, optimizer = plain()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_views)
    with pytest.raises(ValueError, match="DistributedDataParallel, which adds up gradients after"):
        step_in_backward(wrapped, optimizer)
    step_in_backward(model, optimizer)
    wrapped(torch.ones(6)).sum().backward()
    with pytest.raises(RuntimeError, match="second gradient came for .* DistributedDataParallel"):
        optimizer.step()


@pytest.mark.usefixtures("alone")
def test_tensors_that_are_sharded_by_something_else_than_fsdp2_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model, _ = plain()
    first, mesh = model.get_submodule("0"), init_device_mesh("cpu", (1,))
    first.weight = nn.Parameter(distribute_tensor(first.get_parameter("weight").detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"^0\.weight: sharded \(DTensor\), but not by FSDP2"):
        step_in_backward(model, Adafactor(model.parameters()))
