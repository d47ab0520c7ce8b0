"""Supervised fine-tuning with TRL's SFTTrainer and Adafactor, each weight stepping inside backward.

    python examples/trl_sft.py                      # a tiny GPT-2, in seconds
    python examples/trl_sft.py --model gpt2         # one of the hub, or a folder

Without --model a tiny GPT-2 with random weights learns to add digits from its own words: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from adafactor.trainers import FromModel

SUMS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(10) for b in range(10)]


def model_and_tokenizer(name: str | None) -> tuple[Any, Any]:
    """The named model with its tokenizer; else a tiny GPT-2 whose words are numbers and signs."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    words = {word: number for number, word in enumerate(["[EOS]", "[UNK]", "+", "=", *map(str, range(19))])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", eos_token="[EOS]", pad_token="[EOS]")
    config = GPT2Config(
        vocab_size=len(words), n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), tokenizer


def main() -> None:
    """Train and say how far the loss fell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or a folder; a tiny GPT-2 by default")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3, help="the change of a typical weight in a step")
    parser.add_argument("--output", default="runs/trl_sft", help="folder of the checkpoints")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model, tokenizer = model_and_tokenizer(arguments.model)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(SUMS),
        args=SFTConfig(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            per_device_train_batch_size=20,
            learning_rate=arguments.lr,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # Adafactor clips updates; and with the step in backward no gradients are left to clip
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=max(1, arguments.steps // 10),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        optimizer_cls_and_kwargs=(
            FromModel,
            {
                "lr": arguments.lr,
                "relative": False,
                "lr_decay": None,
                "weight_decay": 0.01,
                "step_in_backward": True,
                "max_norm": math.inf,  # measure the norm, for the log
            },
        ),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"In {arguments.steps} steps the loss went from {float(losses[0]):.2f} to {float(losses[-1]):.2f}.")


if __name__ == "__main__":
    main()
