"""Train a small GPT in your own loop with Accelerate, gradient accumulation and Adafactor.

    python examples/accelerate_loop.py
    python examples/accelerate_loop.py --mixed-precision bf16 --accumulate 8
    torchrun --standalone --nproc-per-node=2 examples/accelerate_loop.py

It learns to write this very file, byte by byte. The step size is absolute with a cosine schedule, as for AdamW, and
matrices alone have weight decay: what one starts from when a recipe for AdamW is at hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from adafactor import Adafactor

WIDTH, HEADS, LAYERS, CONTEXT, BATCH, BYTES = 64, 4, 2, 64, 8, 256


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        """Torch's own layers, with the norm first."""
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) bytes to (B, T, 256) logits."""
        length = ids.shape[1]
        x = self.bytes(ids) + self.positions(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        logits: Tensor = self.head(self.norm(self.layers(x, mask=mask, is_causal=True)))
        return logits


def groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices; none for norms and biases. The names are for `report()`."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.ndim >= 2], "weight_decay": decay},
        {"params": [(name, p) for name, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def main() -> None:
    """Train for so many optimizer steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of the optimizer")
    parser.add_argument("--accumulate", type=int, default=4, help="batches of a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    arguments = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # several processes find each other on CPUs only when told so
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.accumulate,
    )
    torch.manual_seed(0)
    model = GPT()
    optimizer = Adafactor(groups(model, decay=0.1), lr=arguments.lr, relative=False, lr_decay=None, beta1=0.9)
    scheduler = CosineAnnealingLR(optimizer, T_max=arguments.steps * accelerator.num_processes)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    count = BATCH * arguments.accumulate * arguments.steps * accelerator.num_processes
    starts = torch.randint(len(text) - CONTEXT, (count,))
    pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    model, optimizer, batches, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(pieces), batch_size=BATCH), scheduler
    )

    step = 0
    for (ids,) in batches:
        with accelerator.accumulate(model):  # step() and zero_grad() do nothing until the last batch of a step
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if step % 10 == 0 or step == 1:
                mean = accelerator.reduce(loss.detach(), reduction="mean")
                accelerator.print(f"step {step:4d}  loss {mean.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
