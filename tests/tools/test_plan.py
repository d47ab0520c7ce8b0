"""`adafactor plan`: what the shapes say, checked against optimizers that were made and memory that was measured."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from adafactor import Adafactor, cli, plan, step_in_backward
from adafactor.core.dtensor import local
from adafactor.core.sums import CHUNK_DEVICE
from adafactor.planning import PRESETS, SETTINGS, Bytes, Plan
from adafactor.planning.models import Weight, find, llama
from adafactor.planning.show import format_size, parse_size
from tests.ranks import on_ranks
from tests.tools.training import NOT_HERE, OURS, Decoder, Live, Training, activation_bytes, peak_bytes

ROOT = Path(__file__).parents[2]
HERE = [key for key in SETTINGS if key not in NOT_HERE]
MODELS = {
    "shapes of all kinds": [(7,), (12, 5), (), (1, 9), (9, 1), (16, 3, 3, 3), (32, 16, 1, 1), (3, 20, 130), (1, 5000)],
    "a Llama": list(llama(2, 16, 40, 8, 300, tied=False)),
}
COUNTS = {
    "gpt2": 124439808,
    "gpt2-medium": 354823168,
    "gpt2-large": 774030080,
    "gpt2-xl": 1557611200,
    "llama-1b": 1235814400,
    "llama-3b": 3212749824,
    "llama-7b": 6738415616,
    "llama-8b": 8030261248,
    "llama-13b": 13015864320,
    "llama-70b": 70553706496,
    "llama-405b": 405853388800,
    "mistral-7b": 7241732096,
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


def test_the_presets_have_their_models_size() -> None:
    assert {name: sum(map(prod, build())) for name, build in PRESETS.items()} == COUNTS


def test_a_config_is_built_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 3, "n_embd": 24, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if importlib.util.find_spec("transformers"):
        result = plan(tmp_path / "config.json")
        assert result.parameters == 50257 * 24 + 1024 * 24 + 3 * (12 * 24 * 24 + 13 * 24) + 2 * 24
        assert find(str(tmp_path)).weights[0].uses == 2
        (tmp_path / "config.json").write_text(json.dumps({**config, "n_embd": -24}))
        with pytest.raises(ValueError, match="config.json: transformers cannot build it: "):
            plan(tmp_path / "config.json")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"config\.json needs transformers"):
        plan(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        plan(tmp_path / "config.json")


@pytest.mark.parametrize("format", ["float32", "int8"])
def test_each_device_has_what_fsdp2_gives_the_first_rank(format: str) -> None:
    """Uneven shards, and more ranks than rows."""

    def kept() -> tuple[int, int]:
        model = cut_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        optimizer = Adafactor(model.parameters(), beta1=0.9, momentum_dtype=format)
        values = [value for state in optimizer.state.values() for value in state.values()]
        return sum(local(p).nbytes for p in model.parameters()), sum(local(value).nbytes for value in values)

    first, *_ = on_ranks(4, kept)
    size = of(plan(cut_model(), shards=4), f"adafactor-float32-momentum{'' if format == 'float32' else '-int8'}")
    assert ((size.weights, size.optimizer), size.gradients) == (first, first[0])


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
        ({"batch": 2}, "batch=2, tokens=None: activations need both"),
        *(({"budget": size}, "must be a size above 0 such as 24GiB") for size in ("24X", "24", "-1GiB", "1e9", 0)),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan("gpt2", **arguments)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no parameters to train"):
        plan(nn.Linear(3, 2).requires_grad_(False))
    with pytest.raises(ValueError, match=r"0\.weight has no shape before a first forward pass"):
        plan(nn.Sequential(nn.LazyLinear(4)))


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


# ---- as it is read


def test_a_budget_says_which_settings_fit_and_what_is_left() -> None:
    result = plan("gpt2-xl", budget="16GiB", device="cpu")
    fitting = {line.key for line in result.fitting}
    assert "adamw-float32" not in fitting and {"adamw-bfloat16", "adafactor-float32"} <= fitting
    assert result.advice.startswith("Take adafactor, float32 (")
    assert [parse_size(text) for text in ("24GiB", "24 GB", "1.5mib", "8G")] == [24 << 30, 24 * 10**9, 3 << 19, 8 << 30]
    assert [format_size(size) for size in (0, 999, 1 << 20, -(10**9))] == ["0 B", "999 B", "1.00 MiB", "-954 MiB"]


@pytest.mark.parametrize("key", OURS)
def test_the_lines_to_write_run_and_are_what_the_plan_counted(key: str) -> None:
    model = Decoder(2, 16, 50)
    line = plan(model).line(key)
    names: dict[str, Any] = {"model": model, "Adafactor": Adafactor, "step_in_backward": step_in_backward}
    exec("\n".join(line.write), names)
    ids = torch.zeros(1, 3, dtype=torch.long)
    model(ids, ids).loss.backward()
    names["optimizer"].step()
    assert names["optimizer"].param_groups[0]["relative"] is False  # the second way, for pretrained weights
    state = [v for state in names["optimizer"].state.values() for v in state.values()]
    assert line.bytes is not None and sum(v.nbytes for v in state) == line.bytes.optimizer
    assert sum(p.nbytes for p in model.parameters()) == line.bytes.weights


@pytest.mark.parametrize("budget", ["24GiB", "80GiB"])  # in bfloat16 with stochastic rounding, and in float32
def test_with_lora_the_lines_to_write_take_absolute_steps_since_b_starts_at_zero(budget: str) -> None:
    advice = plan("llama-8b", budget=budget, lora=4).advice
    (code,) = re.findall(r"^    (optimizer = .*)$", advice, flags=re.M)
    assert "relative=False, lr=1e-3, lr_decay=None" in code and ("stochastic" in code) == (budget == "24GiB")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"budget": "3GiB"}, "too large for 3.00 GiB. Try --lora 16, or --shards 2."),
        ({"budget": "1MiB", "shards": 2, "lora": 8}, "Try --shards 4."),
        ({"budget": "5GiB", "batch": 8, "tokens": 1024}, "Try --checkpointing, or a smaller --batch, or --lora 16, or"),
    ],
)
def test_where_nothing_fits_the_advice_says_what_is_missing_and_what_would_help(
    arguments: dict[str, Any], said: str
) -> None:
    assert said in plan("gpt2-xl", device="cpu", **arguments).advice


def test_the_documents_show_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    document = (ROOT / "docs" / "plan.md").read_text()
    shown = re.findall(r"`adafactor (plan [^`]*)`\s+prints[^\n]*\n\n```text\n(.*?)```", document, flags=re.S)
    assert shown
    for words, text in shown:
        cli.main(words.split())
        assert capsys.readouterr().out.rstrip() == text.rstrip()
