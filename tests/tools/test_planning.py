"""`adafactor plan`: what the shapes say, checked against optimizers that were made and memory that was measured."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor, plan, step_in_backward
from adafactor.core.sums import CHUNK_CPU, CHUNK_DEVICE
from adafactor.kernels import memory_order as memory_order
from adafactor.planning import SETTINGS, plan_shards
from adafactor.planning.communication import Link, fully_sharded
from adafactor.planning.memory import compiled_vectors
from adafactor.planning.models import Weight, llama
from studies.plan import NOT_HERE, OURS, Decoder, Live, Training, activation_bytes, peak_bytes
from tests import inside

pytestmark = pytest.mark.filterwarnings("ignore:.*stepped by eager PyTorch:RuntimeWarning")
ROOT = Path(__file__).parents[2]
HERE = [key for key in SETTINGS if key not in NOT_HERE]
MODELS = {
    "vectors, matrices, a scalar": [(7,), (12, 5), (), (1, 9), (9, 1), (5000,)],
    "convolutions": [(16, 3, 3, 3), (16,), (32, 16, 1, 1), (8, 4, 5)],
    "a Llama": list(llama(2, 16, 40, 8, 300, tied=False)),
    "large and odd ones": [(40, 200), (30, 17, 3, 3), (3, 20, 130), (8000, 4), (1, 5000), (5000, 1)],
}
ROUNDED = [f"adafactor-{weights}-momentum-{format}" for weights in ("float32", "stochastic") for format in
           ("bfloat16", "int8")]  # fmt: skip


class Odd(nn.Module):
    """A tied weight, a frozen one, one of integers, and a buffer."""

    def __init__(self) -> None:
        """With 60 + 20 + 6 + 6 numbers."""
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.output = nn.Linear(6, 10, bias=False)
        self.output.weight = self.embedding.weight
        self.frozen = nn.Linear(5, 4, bias=False).requires_grad_(False)
        self.table = nn.Parameter(torch.zeros(6, dtype=torch.int16), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("mask", torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("key", SETTINGS)
def test_the_state_is_that_of_the_optimizer_to_the_byte(key: str, shapes: list[tuple[int, ...]]) -> None:
    whose = key.removesuffix("-bfloat16").removesuffix("-float32")
    package = {"adamw-8bit": "bitsandbytes", "transformers": "transformers"}.get(whose, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    weights = tuple(map(Weight, shapes))
    training = Training(key, weights)
    training.step()
    line = plan(of_shapes(weights), settings=[key]).lines[0].whole
    assert line.statistics + line.momentum + line.rounding == training.state_bytes()
    assert line.weights == sum(p.nbytes for p in training.params)
    assert line.master == sum(p.nbytes for p in training.masters)


def of_shapes(weights: tuple[Weight, ...]) -> nn.Module:
    return nn.ParameterList(torch.empty(w.shape, device="meta") for w in weights)


def test_tied_weights_count_once_and_frozen_ones_have_no_gradient() -> None:
    with torch.device("meta"):
        result = plan(Odd())
    assert (result.parameters, result.trained, result.tensors) == (92, 66, 4)
    line = result.line("adafactor-bfloat16").whole
    assert line.weights == 2 * (60 + 20 + 6) + 2 * 6  # integers are left as they are
    assert line.gradients == 2 * (60 + 6)
    assert line.statistics == 4 * (10 + 6 + 6) + 2 * 4
    assert line.buffers == 24
    mixed = result.line("adamw-mixed").whole
    assert (mixed.weights, mixed.master, mixed.gradients) == (184, 4 * 66, 2 * 66)


def test_inside_backward_only_the_largest_gradient_counts_and_a_tied_one_three_times() -> None:
    untied = plan(nn.Sequential(nn.Linear(30, 7, bias=False), nn.Linear(7, 20, bias=False))).line("adafactor-backward")
    assert untied.whole.gradients == 2 * 30 * 7
    tied = plan(Odd())  # two parts and their sum
    assert tied.line("adafactor-backward").whole.gradients == 2 * 3 * 60
    assert tied.line("adamw-float32").whole.temporary == 4 * 2 * 60


def test_a_step_lets_go_of_the_gradients() -> None:
    training = Training("adafactor-float32", (Weight((40, 30)), Weight((30,))))
    gc.collect()
    gc.disable()  # what only the collector would free is held too long
    try:
        training.model().backward()
        gradients = [weak(p) for p in training.params]
        training.optimizers[0].step()
        training.optimizers[0].zero_grad()
        assert [gradient() for gradient in gradients] == [None, None]
    finally:
        gc.enable()


def weak(p: torch.Tensor) -> Any:
    import weakref

    return weakref.ref(p.grad)


@pytest.mark.parametrize("shape", [(7, 9), (768, 3072), (3072, 768), (9,), (10**6,), (16, 3, 3, 3), (5, 6, 7)], ids=str)
def test_the_compiled_step_lays_out_as_many_vectors_as_the_plan_says(shape: tuple[int, ...]) -> None:
    pytest.importorskip("adafactor.kernels.cpu.native")
    p = torch.ones(shape, requires_grad=True)
    p.grad = torch.ones(shape)
    optimizer = Adafactor([p], backend="cpu")
    optimizer.step()
    job = inside.job_of(optimizer, p)
    end = int(job["results"]) + 8 * memory_order.RESULTS * int(job["B"] * job["chunks"])
    assert end == job["scratch_bytes"] == compiled_vectors(Weight(shape))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8"])
def test_each_device_has_what_fsdp2_gives_the_first_rank(format: str) -> None:
    """Under a process group that only pretends to have other ranks; uneven shards, and more ranks than rows."""
    script = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from adafactor import Adafactor
from tests.tools.test_planning import cut_model
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
model = fully_shard(cut_model(), mesh=init_device_mesh("cpu", (4,)))
optimizer = Adafactor(model.parameters(), beta1=0.9, momentum_dtype=FORMAT)
local = lambda t: getattr(t, "to_local", lambda: t)().nbytes
print(sum(local(p) for p in model.parameters()), sum(local(v) for s in optimizer.state.values() for v in s.values()))
"""
    words = [sys.executable, "-W", "ignore", "-c", script.replace("FORMAT", repr(format))]
    child = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    weights, state = map(int, child.stdout.split())
    key = "adafactor-float32-momentum" + ("" if format == "float32" else f"-{format}")
    line = plan(cut_model(), shards=4).line(key).device
    assert line is not None
    assert (line.weights, line.gradients) == (weights, weights)
    assert line.statistics + line.momentum == state


def cut_model() -> nn.Module:
    small = nn.Linear(10, 7), nn.Conv2d(6, 5, 3), nn.LayerNorm(3), nn.Embedding(33, 8)
    return nn.Sequential(*small, nn.Linear(200, 30))


def test_a_device_has_its_share_and_what_cannot_be_sharded_says_so() -> None:
    result = plan("llama-7b", shards=8, budget="24GiB")
    adamw = result.line("adamw-float32")
    assert adamw.device is not None
    assert adamw.device.total == pytest.approx(adamw.whole.total / 8, rel=1e-3)
    assert result.line("torch-float32").device is None and result.line("torch-float32") not in result.fitting
    assert "Cannot be sharded: torch-float32" in str(result)


def test_inside_backward_a_shard_holds_the_gradients_of_one_wrapped_module() -> None:
    device = plan("llama-7b", shards=8).line("adafactor-backward").device
    layer, outside = 4 * 4096**2 + 3 * 4096 * 11008, 2 * 32000 * 4096 + 65 * 4096
    assert device is not None and device.gradients == 2 * max(layer, outside) // 8


@pytest.mark.parametrize("key", OURS)
def test_the_lines_to_write_run_and_are_what_the_plan_counted(key: str) -> None:
    model = Decoder(2, 16, 50)
    result = plan(model, settings=[key])
    names: dict[str, Any] = {"model": model, "Adafactor": Adafactor, "step_in_backward": step_in_backward}
    exec("\n".join(result.as_dict()["settings"][0]["write"]), names)
    ids = torch.zeros(1, 3, dtype=torch.long)
    model(ids, ids).loss.backward()
    names["optimizer"].step()
    state = [v for state in names["optimizer"].state.values() for v in state.values()]
    line = result.lines[0].whole
    assert sum(v.nbytes for v in state) == line.statistics + line.momentum + line.rounding
    assert sum(p.nbytes for p in model.parameters()) == line.weights


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_of_activations_is_within_ten_per_cent(dtype: torch.dtype, checkpointing: bool) -> None:
    model = Decoder(4, 64, 300).to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    key = {torch.float32: "adafactor-float32", torch.bfloat16: "adafactor-bfloat16"}[dtype]
    result = plan(model, settings=[key], batch=2, tokens=64, checkpointing=checkpointing)
    assert "an estimate from the matrices' shapes" in " ".join(str(result).split())
    assert activation_bytes(model, 2, 64, 300) == pytest.approx(result.lines[0].whole.activations, rel=0.1)


def test_a_preset_and_a_module_of_the_same_shapes_have_the_same_activations() -> None:
    with torch.device("meta"):
        own = Decoder(12, 768, 50257)
    plans = [plan(model, batch=2, tokens=64).line("adamw-float32").whole for model in (own, "gpt2")]
    assert plans[0].activations == plans[1].activations


def test_activations_of_convolutions_are_not_guessed() -> None:
    with pytest.raises(ValueError, match="activations are estimated for matrices only"):
        plan(nn.Sequential(nn.Conv2d(3, 4, 3)), batch=1, tokens=8)
    with pytest.raises(ValueError, match="no list of layers"):
        plan(nn.Linear(3, 4), batch=1, tokens=8, checkpointing=True)


def test_lora_trains_two_small_matrices_beside_each_of_the_layers() -> None:
    model = Decoder(3, 16, 50)
    result = plan(model, lora=4)
    shapes = [(48, 16), (16, 16), (64, 16), (16, 64)]  # of a layer: attention in and out, and the two of its MLP
    assert result.trained == 3 * sum(4 * (rows + columns) for rows, columns in shapes)
    assert result.parameters == result.trained + sum(p.numel() for p in model.parameters())
    line = result.line("adamw-float32").whole
    assert line.gradients == 4 * result.trained and line.weights == 4 * result.parameters
    assert 'LoraConfig(r=4, target_modules="all-linear")' in result.advice


@pytest.mark.slow
def test_lora_is_that_of_peft() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    planned = plan(model, lora=4).trained
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == planned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": 0}, "shards=0 must be an integer of at least 1"),
        ({"adamw": "apex"}, "adamw='apex' must be one of"),
        ({"device": "tpu9"}, "device='tpu9' must be a device"),
        ({"settings": ["sgd"]}, "unknown setting 'sgd'; there are adamw-float32"),
        ({"budget": "24X"}, "'24X' must be a size"),
        ({"batch": 2}, "batch=2, tokens=None: activations need both"),
        ({"lora": True}, "lora=True must be an integer of at least 1"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan("gpt2", **arguments)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no parameters to train"):
        plan(nn.Linear(3, 2).requires_grad_(False))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, a name or a path, not list"):
        plan([(3, 2)])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("key", HERE)
def test_the_peak_of_a_step_is_within_five_per_cent_of_the_plan(key: str) -> None:
    if key.startswith("transformers"):
        pytest.importorskip("transformers")
    if key == "torch-bfloat16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU multiplies bfloat16 matrices in float32, so that torch's outer product takes 3·t, not t")
    planned = plan("gpt2", device="cpu", settings=[key]).lines[0].whole.total
    assert peak_bytes(key) == pytest.approx(planned, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("adamw", ["foreach", "loop"])
def test_so_is_that_of_the_other_adamws(adamw: str) -> None:
    planned = plan("gpt2", device="cpu", settings=["adamw-float32"], adamw=adamw).lines[0].whole.total
    assert peak_bytes("adamw-float32", adamw=adamw) == pytest.approx(planned, rel=0.05)


KEYS = ["adafactor-float32", "adafactor-bfloat16", "adafactor-stochastic", "adafactor-kahan"]


@pytest.mark.parametrize("key", [*KEYS, "adafactor-float32-momentum", "adafactor-stochastic-momentum", *ROUNDED])
def test_a_step_on_a_device_holds_as_much_as_the_plan_says(key: str) -> None:
    """On the meta device: no numbers, but the tensors of a step as a GPU would have them, each of several blocks."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192, bias=False), nn.Linear(8192, 8192, bias=False))
        model.to(SETTINGS[key].dtype)
        for p in model.parameters():
            assert p.numel() > CHUNK_DEVICE
            p.grad = torch.ones_like(p)
        # without weight decay, bfloat16 with the nearest rounding takes half as much
        optimizer = Adafactor(model.parameters(), backend="eager", weight_decay=0.01, **OURS[key])
        optimizer.step()
        with Live() as live:
            optimizer.step()
    planned = plan(model, device="cuda", settings=[key]).lines[0].whole.temporary
    assert live.peak == pytest.approx(planned, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_on_a_cpu_plain_torch_holds_as_much_for_each_element_of_a_block(key: str) -> None:
    line = plan("studies.plan:square", settings=[key]).lines[0].whole
    held = peak_bytes(key, "studies.plan:square", backend="eager") - (line.total - line.temporary)
    dtype, rounding = SETTINGS[key].dtype, OURS[key].get("rounding", "nearest")
    # a CPU makes a float32 copy of what rounding took away, and of bfloat16 weights that it steps in place
    converted = 4 if rounding == "kahan" or (rounding == "nearest" and dtype == torch.bfloat16) else 0
    assert held / CHUNK_CPU == pytest.approx(SETTINGS[key].block_bytes + converted, abs=1)


def test_the_state_in_the_traffic_is_that_of_an_optimizer_that_was_made() -> None:
    shapes = list(llama(2, 16, 40, 8, 50, tied=False))
    optimizer = Adafactor([torch.zeros(shape, requires_grad=True) for shape in shapes])
    held = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert plan_shards("small", shapes, 4).state_bytes == held


def test_a_ring_sends_an_all_reduce_twice_and_a_reduce_scatter_once() -> None:
    shapes = [(8, 6), (5,)]
    line = plan_shards("two", shapes, 4)
    assert line.optimizer_sent == 2 * fully_sharded(shapes, 4).bytes * 3 // 4
    assert line.gradients_sent == 2 * 53 * 3 // 4
    assert plan_shards("two", shapes, 1).share == 0


def test_a_scalar_has_no_axis_to_cut_and_is_copied() -> None:
    flags = 8 * 2  # is the gradient there, is it finite?
    assert fully_sharded([(8, 6), ()], 4).bytes == fully_sharded([(8, 6)], 4).bytes + flags


def test_an_all_reduce_is_a_ring_where_bytes_count_and_a_tree_where_messages_do() -> None:
    assert Link(1e9, 0.0).all_reduce(1, 8000, 8) == pytest.approx(2 * 7 / 8 * 8000 / 1e9)
    assert Link(1e9, 1e-3).all_reduce(3, 8000, 8) == pytest.approx(3 * 2 * 3 * 1e-3 + 2 * 8000 / 1e9)
    assert Link(1e9, 1e-3).reduce_scatter(3, 8000, 8) == pytest.approx(7 * 3e-3 + 7 / 8 * 8000 / 1e9)
    assert Link(1e9, 1e-3).all_reduce(0, 0, 1) == Link(1e9, 1e-3).reduce_scatter(1, 8000, 1) == 0
