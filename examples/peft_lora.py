"""Train LoRA adapters (peft) with Adafactor in your own loop.

    python examples/peft_lora.py                                      # a tiny GPT-2, in seconds
    python examples/peft_lora.py --model gpt2 --text mybook.txt       # one of the hub, or a folder

Without --model a tiny GPT-2 of bytes, with random weights, learns to write this very file: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from adafactor import Adafactor


def model_and_tokens(name: str | None, text: Path) -> tuple[PreTrainedModel, Tensor]:
    """The named model and the text in its tokens; else a tiny GPT-2 and the text's bytes."""
    if name is None:
        config = GPT2Config(
            vocab_size=256,
            n_positions=128,
            n_embd=64,
            n_layer=2,
            n_head=4,
            initializer_range=0.1,
            bos_token_id=0,
            eos_token_id=0,
        )
        return GPT2LMHeadModel(config), torch.tensor(list(text.read_bytes()))
    tokens = AutoTokenizer.from_pretrained(name)(text.read_text(), return_tensors="pt")["input_ids"][0]
    return AutoModelForCausalLM.from_pretrained(name), tokens


def main() -> None:
    """Train the adapters and say how far the loss fell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or a folder; a tiny GPT-2 by default")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--lr", type=float, default=1e-2, help="the change of a typical weight in a step")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    base, tokens = model_and_tokens(arguments.model, arguments.text)
    config = LoraConfig(task_type="CAUSAL_LM", r=arguments.rank, target_modules="all-linear", fan_in_fan_out=True)
    model = get_peft_model(base, config)

    # Absolute steps. B starts at zero, so steps relative to its size would be tiny for a long time.
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = Adafactor(trainable, lr=arguments.lr, relative=False, lr_decay=None)
    print(f"{len(trainable)} adapter matrices of {sum(p.numel() for _, p in trainable):,} weights")

    model.train()
    for step in range(arguments.steps + 1):
        starts = torch.randint(len(tokens) - 64, (8,)).tolist()
        batch = torch.stack([tokens[start : start + 64] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss  # the model shifts the labels itself
        if step % 20 == 0:
            print(f"step {step:4}: loss {loss.item():.3f}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
