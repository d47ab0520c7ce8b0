"""Fine-tune a causal language model with transformers' Trainer and Adafactor.

    python examples/transformers_finetune.py                                     # a tiny GPT-2, in seconds
    python examples/transformers_finetune.py --model gpt2 --text mybook.txt      # one of the hub, or a folder
    python examples/transformers_finetune.py --trainer-builds                    # the Trainer makes the optimizer

Without --model a tiny GPT-2 of bytes learns to write this very file: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    get_constant_schedule_with_warmup,
)

from adafactor import Adafactor

# Fine-tuning: absolute steps, so pre-trained weights move by as much as you choose.
SETTINGS: dict[str, Any] = {"relative": False, "lr_decay": None}


def model_and_tokens(name: str | None, text: Path) -> tuple[nn.Module, Tensor]:
    """The named model and the text in its tokens; else a tiny GPT-2 and the text's bytes."""
    if name is None:
        config = GPT2Config(
            vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        return GPT2LMHeadModel(config), torch.tensor(list(text.read_bytes()))
    tokens = AutoTokenizer.from_pretrained(name)(text.read_text(), return_tensors="pt")["input_ids"][0]
    return AutoModelForCausalLM.from_pretrained(name), tokens


def examples(tokens: Tensor, length: int) -> list[dict[str, Tensor]]:
    """Overlapping pieces of the text; the model shifts the labels itself."""
    pieces = tokens.unfold(0, min(length, len(tokens)), max(1, length // 4))
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    """Train and say how far the loss fell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or a folder; a tiny GPT-2 by default")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3, help="the change of a typical weight in a step")
    parser.add_argument("--trainer-builds", action="store_true", help="let the Trainer make optimizer and schedule")
    parser.add_argument("--output", default="runs/transformers_finetune", help="folder of the checkpoints")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model, tokens = model_and_tokens(arguments.model, arguments.text)
    warmup = arguments.steps // 10
    how: dict[str, Any]
    if arguments.trainer_builds:
        # two groups, of which norms and biases have no weight decay, and the schedule named below
        how = {"optimizer_cls_and_kwargs": (Adafactor, {"lr": arguments.lr, **SETTINGS})}
    else:
        optimizer = Adafactor(model.named_parameters(), lr=arguments.lr, **SETTINGS)
        how = {"optimizers": (optimizer, get_constant_schedule_with_warmup(optimizer, warmup))}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            learning_rate=arguments.lr,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=warmup,
            max_grad_norm=0.0,  # Adafactor clips updates, which is what counts; clipping gradients as well adds nothing
            logging_steps=max(1, arguments.steps // 10),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=examples(tokens, length=64),
        **how,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"In {arguments.steps} steps the loss went from {float(losses[0]):.2f} to {float(losses[-1]):.2f}.")


if __name__ == "__main__":
    main()
