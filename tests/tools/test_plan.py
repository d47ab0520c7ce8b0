"""`adafactor plan`: what the shapes say, checked against optimizers that were made and memory that was measured."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor, plan
from adafactor.core.sums import CHUNK_DEVICE
from adafactor.planning import SETTINGS, Bytes, Plan
from adafactor.planning.models import Weight, llama
from tests.tools.training import NOT_HERE, OURS, Decoder, Live, Training, activation_bytes, peak_bytes

ROOT = Path(__file__).parents[2]
HERE = [key for key in SETTINGS if key not in NOT_HERE]
MODELS = {
    "vectors, matrices, a scalar": [(7,), (12, 5), (), (1, 9), (9, 1), (5000,)],
    "convolutions": [(16, 3, 3, 3), (16,), (32, 16, 1, 1), (8, 4, 5)],
    "a Llama": list(llama(2, 16, 40, 8, 300, tied=False)),
    "large and odd ones": [(40, 200), (30, 17, 3, 3), (3, 20, 130), (8000, 4), (1, 5000), (5000, 1)],
}


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


def of(result: Plan, key: str) -> Bytes:
    size = result.line(key).bytes
    assert size is not None
    return size


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
    size = of(plan(nn.ParameterList(torch.empty(w.shape, device="meta") for w in weights)), key)
    assert size.optimizer == training.state_bytes() + sum(p.nbytes for p in training.masters)
    assert size.weights == sum(p.nbytes for p in training.params)


def test_tied_weights_count_once_and_frozen_ones_have_no_gradient() -> None:
    with torch.device("meta"):
        result = plan(Odd())
    assert (result.parameters, result.trained, result.tensors) == (92, 66, 4)
    size = of(result, "adafactor-bfloat16")
    assert size.weights == 2 * (60 + 20 + 6) + 2 * 6 + 24  # integers are left as they are; the buffer
    assert size.gradients == 2 * (60 + 6)
    assert size.optimizer == 4 * (10 + 6 + 6) + 2 * 4
    mixed = of(result, "adamw-mixed")
    assert (mixed.gradients, mixed.optimizer) == (2 * 66, 3 * 4 * 66 + 2 * 4)


@pytest.mark.parametrize("key", ["adafactor-backward", "adamw-backward"])
def test_inside_backward_only_the_largest_gradient_counts_and_a_tied_one_three_times(key: str) -> None:
    untied = plan(nn.Sequential(nn.Linear(30, 7, bias=False), nn.Linear(7, 20, bias=False)))
    assert of(untied, key).gradients == 2 * 30 * 7
    tied = plan(Odd())  # two parts and their sum
    assert of(tied, key).gradients == 2 * 3 * 60
    assert of(tied, "adamw-float32").temporary == 4 * 2 * 60


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
from tests.tools.test_plan import cut_model
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
    size = of(plan(cut_model(), shards=4), key)
    assert (size.weights, size.gradients, size.optimizer) == (weights, weights, state)


def cut_model() -> nn.Module:
    small = nn.Linear(10, 7), nn.Conv2d(6, 5, 3), nn.LayerNorm(3), nn.Embedding(33, 8)
    return nn.Sequential(*small, nn.Linear(200, 30))


def test_a_device_has_its_share_and_what_cannot_be_sharded_says_so() -> None:
    result = plan("llama-7b", shards=8, budget="24GiB", everything=True)
    whole = of(plan("llama-7b"), "adamw-float32").total
    assert of(result, "adamw-float32").total == pytest.approx(whole / 8, rel=1e-3)
    assert result.line("torch-float32").bytes is None and result.line("torch-float32") not in result.fitting
    assert "cannot be sharded" in str(result)


def test_inside_backward_a_shard_holds_the_gradients_of_one_wrapped_module() -> None:
    layer, outside = 4 * 4096**2 + 3 * 4096 * 11008, 2 * 32000 * 4096 + 65 * 4096
    assert of(plan("llama-7b", shards=8), "adafactor-backward").gradients == 2 * max(layer, outside) // 8


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_of_activations_is_within_ten_per_cent(dtype: torch.dtype, checkpointing: bool) -> None:
    model = Decoder(4, 64, 300).to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    key = {torch.float32: "adafactor-float32", torch.bfloat16: "adafactor-bfloat16"}[dtype]
    result = plan(model, batch=2, tokens=64, checkpointing=checkpointing)
    assert activation_bytes(model, 2, 64, 300) == pytest.approx(of(result, key).activations, rel=0.1)


def test_a_preset_and_a_module_of_the_same_shapes_have_the_same_activations() -> None:
    with torch.device("meta"):
        own = Decoder(12, 768, 50257)
    sizes = [of(plan(model, batch=2, tokens=64), "adamw-float32") for model in (own, "gpt2")]
    assert sizes[0].activations == sizes[1].activations


def test_activations_of_convolutions_are_not_guessed() -> None:
    with pytest.raises(ValueError, match="activations are estimated for matrices only"):
        plan(nn.Sequential(nn.Conv2d(3, 4, 3)), batch=1, tokens=8)
    with pytest.raises(ValueError, match="no list of layers"):
        plan(nn.Linear(3, 4), batch=1, tokens=8, checkpointing=True)


@pytest.mark.slow
def test_lora_is_that_of_peft() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    planned = plan(model, lora=4)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == planned.trained
    assert sum(p.numel() for p in adapted.parameters()) == planned.parameters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": 0}, "shards=0 must be an integer of at least 1"),
        ({"device": "tpu9"}, "device='tpu9' must be a device"),
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
    with pytest.raises(ValueError, match=r"0\.weight has no shape before a first forward pass"):
        plan(nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, a name or a path, not list"):
        plan([(3, 2)])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("key", HERE)
def test_the_peak_of_a_step_is_within_five_per_cent_of_the_plan(key: str) -> None:
    if key.startswith("transformers"):
        pytest.importorskip("transformers")
    if key == "torch-bfloat16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU multiplies bfloat16 matrices in float32, so that torch's outer product takes 3·t, not t")
    assert peak_bytes(key) == pytest.approx(of(plan("gpt2", device="cpu"), key).total, rel=0.05)


@pytest.mark.parametrize("key", [key for key in OURS if key != "adafactor-backward"])
def test_a_step_on_a_device_holds_no_more_than_the_plan_says(key: str) -> None:
    """On the meta device: no numbers, but the tensors of a step as a GPU would have them, each of several blocks."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192, bias=False), nn.Linear(8192, 8192, bias=False))
        model.to(SETTINGS[key].dtype)
        for p in model.parameters():
            assert p.numel() > CHUNK_DEVICE
            p.grad = torch.ones_like(p)
        optimizer = Adafactor(model.parameters(), backend="eager", weight_decay=0.01, **OURS[key])
        optimizer.step()
        with Live() as live:
            optimizer.step()
    assert live.peak <= of(plan(model, device="cuda"), key).temporary
