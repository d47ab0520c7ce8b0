"""Train a small GPT in pure bfloat16, each parameter stepping inside backward; compare with --ordinary.

    python examples/step_in_backward.py
    python examples/step_in_backward.py --ordinary      # the same losses, digit by digit, in more memory

It learns to write its own source code, byte by byte. Weights are bfloat16 without a float32 copy, gradients are freed
as they come, and the optimizer's statistics are vectors: what remains is 2 bytes for each parameter, and activations.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adafactor import Adafactor, step_in_backward

WIDTH, HEADS, LAYERS, CONTEXT, BATCH, BYTES = 384, 6, 6, 32, 2, 256


class Product(torch.autograd.Function):
    """x·Wᵀ in float32 from bfloat16: many CPUs multiply bfloat16 a hundred times more slowly. No copy of W is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """(…, n) and (m, n) to (…, m)."""
        ctx.save_for_backward(x, w)
        return (x.float() @ w.float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and W, as short as they are."""
        (x, w), g = ctx.saved_tensors, gradients[0].float()
        return (g @ w.float()).to(x.dtype), (g.flatten(0, -2).t() @ x.float().flatten(0, -2)).to(w.dtype)


class Linear(nn.Linear):
    """Without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """A matrix of outputs × inputs."""
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs)."""
        return multiply(x, self.weight)


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """x·Wᵀ; a GPU does it as it is."""
    product: Tensor = F.linear(x, w) if x.is_cuda else Product.apply(x, w)
    return product


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self) -> None:
        """One matrix for q, k and v together."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.up, self.down = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) to the same."""
        b, t, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts  # (B, heads, T, d/heads)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, -1))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the embedding is the output layer too, and steps once."""

    def __init__(self) -> None:
        """Learned positions and tied weights, as in GPT-2."""
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) bytes to (B, T, 256) logits."""
        x = self.bytes(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return multiply(self.norm(x), self.bytes.weight)


def batch(text: Tensor, step: int) -> Tensor:
    """The step's (B, T + 1) bytes."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts])


class Gauge:
    """The most bytes of gradients that there were at a time."""

    def __init__(self, model: nn.Module) -> None:
        """To be made before `step_in_backward`: hooks are called in the order in which they were registered."""
        self.parameters, self.most = list(model.parameters()), 0
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.look)

    def look(self, _: Tensor) -> None:
        """One more gradient is complete."""
        self.most = max(self.most, sum(p.grad.nbytes for p in self.parameters if p.grad is not None))


def main() -> None:
    """Train, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ordinary", action="store_true", help="keep all gradients, and step after backward")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = GPT().to(device, torch.bfloat16)
    optimizer = Adafactor(model.named_parameters(), rounding="stochastic")
    gauge = Gauge(model)
    if not arguments.ordinary:
        step_in_backward(model, optimizer)

    text = torch.tensor(list(Path(__file__).read_bytes()))
    for step in range(1, arguments.steps + 1):
        ids = batch(text, step).to(device)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()  # parameters step here
        optimizer.step()  # and here, if --ordinary; else this ends the step
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    bill = {
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients at a time": gauge.most,
        "statistics": sum(record.state_bytes for record in optimizer.report()),
    }
    bill["in all"] = sum(bill.values())
    print(", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in bill.items()), flush=True)


if __name__ == "__main__":
    main()
