"""Every recipe under `examples/` runs as a user would run it, and its loss falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch import torchrun

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")}


def output(name: str, *words: str) -> str:
    """What the example printed."""
    run = subprocess.run(
        [sys.executable, f"examples/{name}", *words],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    return run.stdout


def losses(name: str, *words: str) -> list[float]:
    """In order; its Trainer's as well as its own."""
    return numbers(output(name, *words))


def numbers(said: str) -> list[float]:
    return [float(number) for number in re.findall(r"\bloss'?:? '?(\d+\.\d+)", said)]


def need(*modules: str) -> None:
    """Skip where the extra `integrations` is not installed."""
    if missing := [module for module in modules if find_spec(module) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")


def test_every_example_is_listed_and_run_here_or_beside_its_subject() -> None:
    listed = set(re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "docs" / "recipes.md").read_text(), flags=re.M))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert listed == EXAMPLES
    assert all(f'"{name}"' in tests or f"examples/{name}" in tests for name in EXAMPLES)


def test_a_model_learns_inside_backward_with_a_fraction_of_the_gradients() -> None:
    said = output("step_in_backward.py", "--steps", "10")
    ((weights, gradients),) = re.findall(r"weights ([\d.]+) MiB, gradients at a time ([\d.]+) MiB", said)
    first, last = numbers(said)
    assert last < first - 1 and 0 < float(gradients) < float(weights) / 10


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--trainer-builds"]], ids=["optimizers", "optimizer_cls_and_kwargs"])
def test_the_trainer_fine_tunes_with_an_optimizer_given_in_either_way(words: list[str], tmp_path: Path) -> None:
    need("transformers", "accelerate")
    fell = losses("transformers_finetune.py", "--output", str(tmp_path), *words)
    assert len(fell) == 10 and fell[-1] < 3.2 < 4.5 < fell[0]


@pytest.mark.slow
def test_the_diagnostics_of_a_run_that_goes_wrong_say_so(tmp_path: Path) -> None:
    assert output("diagnostics.py", "--steps", "50", "--output", str(tmp_path)).count("loss") >= 3
    assert {path.name for path in tmp_path.glob("*.png")} >= {"default.png", "unstable.png"}


def save_a_model(folder: Path) -> list[str]:
    """Save a tiny model with its tokenizer and a text that it can learn; the words that name them."""
    import tokenizers
    import transformers

    words = {word: number for number, word in enumerate(["[UNK]", *"abcdefgh"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(folder / "model")
    config = transformers.GPT2Config(
        vocab_size=len(words), n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
    (folder / "text").write_text("a b c d e f g h " * 100)
    return ["--model", str(folder / "model"), "--text", str(folder / "text")]


@pytest.mark.slow
def test_the_trainer_fine_tunes_a_model_and_tokenizer_from_a_folder(tmp_path: Path) -> None:
    need("transformers", "accelerate")
    where = [*save_a_model(tmp_path), "--output", str(tmp_path / "output")]
    fell = losses("transformers_finetune.py", *where, "--steps", "40", "--lr", "0.01")
    assert fell[0] > 1.5 and fell[-1] < 0.5


@pytest.mark.slow
def test_a_whole_model_trains_under_a_limit_that_adamw_does_not_survive() -> None:
    need("transformers")
    words = ["--limit-mib", "1200", "--steps", "8"]
    fell = losses("one_card.py", *words)
    assert len(fell) == 8 and fell[-1] < 5.5 < 9.0 < fell[0]
    with pytest.raises(AssertionError, match="can't allocate memory"):
        losses("one_card.py", *words, "--optimizer", "adamw")


@pytest.mark.slow
def test_a_model_from_a_folder_trains_on_one_card(tmp_path: Path) -> None:
    need("transformers")
    fell = losses("one_card.py", *save_a_model(tmp_path), "--tokens", "32", "--lr", "0.01")
    assert fell[0] > 1.5 and fell[-1] < 0.5


@pytest.mark.slow
def test_lora_adapters_learn() -> None:
    need("peft", "transformers")
    fell = losses("peft_lora.py")
    assert len(fell) == 6 and fell[-1] < 4.6 < 5.2 < fell[0]


@pytest.mark.slow
def test_the_sft_trainer_learns_inside_backward(tmp_path: Path) -> None:
    need("trl", "transformers", "accelerate")
    fell = losses("trl_sft.py", "--output", str(tmp_path))
    assert len(fell) == 10 and fell[-1] < 1.4 < 2.2 < fell[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_lightning_module_learns_from_scratch(precision: str) -> None:
    need("lightning")
    fell = losses("lightning_module.py", "--precision", precision)
    assert len(fell) == 8 and fell[0] > 0.9 and fell[-1] < 0.4


@pytest.mark.slow
def test_the_accelerate_loop_takes_a_step_for_so_many_batches() -> None:
    need("accelerate")
    fell = losses("accelerate_loop.py", "--accumulate", "3")
    assert len(fell) == 7 and fell[-1] < 3.2 < 5.0 < fell[0]


@pytest.mark.slow
def test_two_processes_of_the_accelerate_loop_train_one_model() -> None:
    need("accelerate")
    status, said = torchrun(["examples/accelerate_loop.py", "--steps", "20"], ranks=2)
    assert status == 0, said[-6000:]
    fell = numbers(said)
    assert len(fell) == 3, said  # printed by one of them
    assert fell[-1] < 4.5 < 5.0 < fell[0]
