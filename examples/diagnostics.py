"""A small GPT with GPT-2's 148 tensors, trained three times, watched, drawn, and told in words.

    python examples/diagnostics.py               # the defaults, the paper's unstable setting, and that setting cured
    python examples/diagnostics.py --steps 50    # quickly

The text is the source of Python's own library, read byte by byte. The pictures of docs/diagnostics.md are from this.
Needs `pip install matplotlib`.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adafactor import Adafactor
from adafactor.diagnostics import Report, Watch, diagnose, plot

LENGTH, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 12, 8

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    # Table 2's row C without warm-up, at three times its step size: α = 3·0.1·10⁻²
    "unstable": {"lr": 3e-3, "lr_decay": None, "relative": False, "beta2": 0.999, "clip": None},
    # the same with what `diagnose` says to change
    "changed": {"lr": 3e-3, "lr_decay": None, "relative": False},
}


class Attention(nn.Module):
    """Causal self-attention with GPT-2's names."""

    def __init__(self) -> None:
        """Query, key and value are one matrix."""
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        batch, length, _ = x.shape
        parts = self.c_attn(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # (3, B, heads, T, d/heads)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        out: Tensor = self.c_proj(seen.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        """Norms come first, as in GPT-2."""
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return out


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the embedding is the softmax matrix too."""

    def __init__(self) -> None:
        """As GPT-2: normal weights of 0.02, less before a residual connection; biases zero."""
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * LAYERS) ** 0.5 if "c_proj" in name else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) → (B, T, 256)."""
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def text() -> Tensor:
    """The source of sixty modules of Python's library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def train(name: str, steps: int, every: int) -> tuple[list[Report], float]:
    """Train with one of the settings; the reports, and the mean loss of the last tenth."""
    torch.manual_seed(0)
    model, source, losses = GPT(), text(), []
    optimizer = Adafactor(model.named_parameters(), **SETTINGS[name])
    reports: list[Report] = []
    with Watch(optimizer, reports.append, every=every) as watch:
        for _ in range(steps):
            start = torch.randint(len(source) - LENGTH - 1, (BATCH, 1))
            ids = source[start + torch.arange(LENGTH + 1)]  # (B, T + 1)
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            watch.add_loss(losses[-1])
    print(f"{name}:", *diagnose(reports) or ["nothing found in the optimizer's metrics"], sep="\n\n", end="\n\n")
    last = losses[-max(1, steps // 10) :]
    return reports, sum(last) / len(last)


def main() -> None:
    """Train with each setting."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--every", type=int, default=5, help="steps from report to report")
    arguments.add_argument("--output", type=Path, default=Path("runs/diagnostics"), help="folder for the pictures")
    given = arguments.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    ends = {}
    for name in SETTINGS:
        reports, ends[name] = train(name, given.steps, given.every)
        plot(reports, given.output / f"{name}.png")
    for name, loss in ends.items():
        print(f"{name:10} loss {loss:.3f}")
    print(f"pictures: {given.output}")


if __name__ == "__main__":
    main()
