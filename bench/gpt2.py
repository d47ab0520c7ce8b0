"""One optimizer step on GPT-2 small's 148 tensors: ours against torch's, alternating in one process.

python bench/gpt2.py [--rounds 15] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.optim import Adafactor as TorchAdafactor
from torch.optim import AdamW, Optimizer

from adafactor import Adafactor

CONTENDERS: dict[str, Callable[[list[torch.nn.Parameter]], Optimizer]] = {
    "adafactor, eager": lambda params: Adafactor(params, backend="eager"),
    "torch.optim.Adafactor, loop": lambda params: TorchAdafactor(params, foreach=False),
    "torch.optim.AdamW, fused": lambda params: AdamW(params, fused=True),
}


def gpt2_small() -> Iterator[tuple[int, ...]]:
    """The shapes of GPT-2 small's parameters, 124 million in all."""
    d = 768
    yield from [(50257, d), (1024, d)]
    for _ in range(12):
        yield from [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    yield from [(d,), (d,)]


def parameters() -> list[torch.nn.Parameter]:
    """Parameters of these shapes, with gradients."""
    params = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in gpt2_small()]
    for p in params:
        p.grad = 1e-3 * torch.randn_like(p)
    return params


def state_bytes(optimizer: Optimizer) -> int:
    """The bytes of every tensor in the optimizer's state."""
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(t.nbytes for t in tensors)


def measure(rounds: int) -> dict[str, tuple[list[float], int]]:
    """Seconds of each step and the bytes of state, per contender; one after the other in every round."""
    params = parameters()
    optimizers = {name: make(params) for name, make in CONTENDERS.items()}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for i in range(rounds + 1):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            if i:  # the first one allocates
                times[name].append(time.perf_counter() - start)
    return {name: (times[name], state_bytes(optimizer)) for name, optimizer in optimizers.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results = measure(args.rounds)
    base = statistics.median(results["torch.optim.Adafactor, loop"][0])
    print(
        f"GPT-2 small, {args.threads} threads, torch {torch.__version__}, medians of {args.rounds} alternating rounds\n"
    )
    print(
        "| optimizer | ms a step | fastest to slowest | × torch.optim.Adafactor | state, bytes |\n|---|---|---|---|---|"
    )
    for name, (seconds, size) in results.items():
        median, low, high = (1e3 * f(seconds) for f in (statistics.median, min, max))
        print(f"| {name} | {median:.0f} | {low:.0f}–{high:.0f} | {median / 1e3 / base:.2f} | {size:,} |")


if __name__ == "__main__":
    main()
