"""Train a small GPT with FSDP2 and Adafactor; with --tp, tensor parallel inside.

    torchrun --standalone --nproc-per-node=2 examples/fsdp2.py
    torchrun --standalone --nproc-per-node=4 examples/fsdp2.py --tp 2 --steps 400    # continues on four ranks
    torchrun --standalone --nproc-per-node=2 examples/fsdp2.py --lean --steps 600    # fine-tunes it in little memory

It learns to write its own source code, byte by byte. Checkpoints are torch.distributed.checkpoint's: every rank writes
its part, and the next run may have another number of ranks or another --tp. The optimizer needs no word about it.

With --lean the weights are bfloat16, rounded stochastically, and each block steps inside backward as soon as FSDP2 has
reduced its gradients: there is no float32 copy of the weights, and there are gradients of one block at a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from adafactor import Adafactor, step_in_backward

WIDTH, HEADS, LAYERS, CONTEXT, BATCH, BYTES = 64, 4, 2, 64, 16, 256


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self) -> None:
        """Separate q, k and v, so that tensor parallel can cut each by heads."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) to the same."""
        b, t, _ = x.shape
        y = self.norm1(x)
        # (B, heads of this rank, T, d/heads)
        q, k, v = (f(y).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, -1))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        """Learned positions, as in GPT-2."""
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) bytes to (B, T, 256) logits."""
        x = self.bytes(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallel over the mesh's second dimension, where it has one, then FSDP2 over its first."""
    for block in model.blocks:
        if mesh["model"].size() > 1:
            plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
            plan |= {name: RowwiseParallel() for name in ("out", "down")}
            parallelize_module(block, mesh["model"], plan)
        fully_shard(block, mesh=mesh["data"])
    # what is left to the model itself is reduced at the very end of backward: so that is nothing
    for rest in (model.bytes, model.positions, [model.norm, model.head]):
        fully_shard(rest, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


def batch(text: Tensor, step: int, mesh: DeviceMesh) -> Tensor:
    """This rank's share of the step's (B, T + 1) bytes; ranks that hold one model together take the same."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return rows.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint: the file of metadata is written last."""
    done = [path for path in folder.glob("step-*") if (path / ".metadata").exists()]
    return max(done, key=lambda path: int(path.name.split("-")[1]), default=None)


def main() -> None:
    """Train from the latest checkpoint to the last step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="train up to this step")
    parser.add_argument("--tp", type=int, default=1, help="ranks that hold one model together")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--lean", action="store_true", help="bfloat16 weights that step inside backward")
    parser.add_argument("--folder", type=Path, default=Path("runs/fsdp2"), help="of the checkpoints")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    size = dist.get_world_size()
    mesh = init_device_mesh(device, (size // arguments.tp, arguments.tp), mesh_dim_names=("data", "model"))
    if device == "cuda":
        torch.cuda.set_device(mesh.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    model = GPT().to(device, torch.bfloat16 if arguments.lean else torch.float32)
    shard(model, mesh)
    optimizer = Adafactor(model.named_parameters(), rounding="stochastic" if arguments.lean else "nearest")
    if arguments.lean:
        step_in_backward(model, optimizer)

    first = 0
    if found := latest(arguments.folder):
        weights, state = get_state_dict(model, optimizer)
        load_checkpoint({"model": weights, "optimizer": state}, checkpoint_id=str(found))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        first = int(found.name.split("-")[1])
        if dist.get_rank() == 0:
            print(f"continues at step {first} of {arguments.steps}", flush=True)

    text = torch.tensor(list(Path(__file__).read_bytes()))
    for step in range(first + 1, arguments.steps + 1):
        ids = batch(text, step, mesh).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == arguments.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # over all ranks; those of one model have the same loss
            if dist.get_rank() == 0:
                print(f"step {step:4d}  loss {mean.item() / size:.4f}", flush=True)
        if step % arguments.every == 0 or step == arguments.steps:
            weights, state = get_state_dict(model, optimizer)
            save_checkpoint(
                {"model": weights, "optimizer": state}, checkpoint_id=str(arguments.folder / f"step-{step}")
            )
    dist.barrier()  # nobody leaves while others are still writing
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
