"""Fine-tune all weights of a language model in little more memory than the weights themselves.

    python examples/one_card.py                                      # a small Llama with random weights, on any machine
    python examples/one_card.py --model folder --text mybook.txt     # yours: an 8B model on a card of 24 GB
    python examples/one_card.py --limit-mib 1200                     # Linux: under a limit that AdamW does not survive
    python examples/one_card.py --limit-mib 1200 --optimizer adamw

bfloat16 weights without a copy in float32, stochastic rounding, each weight stepping inside backward, activations that
are computed again, and one sequence to a step: without accumulation there are no gradients to keep.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from adafactor import Adafactor, step_in_backward

SMALL = LlamaConfig(
    vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12
)


def model_and_tokens(folder: str | None, text: Path, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """The model in the folder and the text in its tokens; else a small Llama and the text's bytes."""
    if folder is None:
        with torch.device("cpu"):
            return LlamaForCausalLM(SMALL).to(dtype), torch.tensor(list(text.read_bytes()))
    tokens = AutoTokenizer.from_pretrained(folder)(text.read_text(), return_tensors="pt")["input_ids"][0]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), tokens


def make_optimizer(name: str, model: nn.Module, lr: float, tokens: int, half_life: float) -> torch.optim.Optimizer:
    """AdamW with float32 weights, for comparison, or ours, attached to the model."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    beta2 = 0.5 ** (tokens / half_life)  # so many tokens halve the weight of a gradient, whatever the batch
    optimizer = Adafactor(
        model.named_parameters(), lr=lr, relative=False, lr_decay=None, beta2=beta2, rounding="stochastic"
    )
    step_in_backward(model, optimizer)
    return optimizer


def main() -> None:
    """Train, one sequence at a time, and say how far the loss fell and what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder of transformers; a small Llama by default")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn")
    parser.add_argument("--optimizer", choices=("adafactor", "adamw"), default="adafactor")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128, help="of the sequence of each step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--half-life", type=float, default=1e5, help="of the second moment, in tokens")
    parser.add_argument("--limit-mib", type=int, help="the memory that this process may allocate, on Linux")
    arguments = parser.parse_args()
    if arguments.limit_mib:
        resource.setrlimit(resource.RLIMIT_DATA, (arguments.limit_mib << 20, arguments.limit_mib << 20))

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if arguments.optimizer == "adamw" else torch.bfloat16
    model, tokens = model_and_tokens(arguments.model, arguments.text, dtype)
    model.to(device).train()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    model.config.use_cache = False  # type: ignore[union-attr]
    optimizer = make_optimizer(arguments.optimizer, model, arguments.lr, arguments.tokens, arguments.half_life)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:,.0f} M parameters, {dtype}, {arguments.optimizer}, on {device}", flush=True)

    draw = torch.Generator().manual_seed(0)
    window = min(arguments.tokens, len(tokens) - 1)
    for number in range(1, arguments.steps + 1):
        start = int(torch.randint(len(tokens) - window, (), generator=draw))
        piece = tokens[start : start + window].unsqueeze(0).to(device)
        loss = model(input_ids=piece, labels=piece).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 or number % max(1, arguments.steps // 8) == 0:
            print(f"step {number}: loss {loss.item():.3f}", flush=True)
    peak = (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    print(f"{peak / 2**20:,.0f} MiB at most, of which {count * dtype.itemsize / 2**20:,.0f} MiB are the weights")


if __name__ == "__main__":
    main()
