"""What ours, torch's and transformers' Adafactor do with the same gradients; a table of docs/paper.md.

python -m tests.peers
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from adafactor import Adafactor, __version__
from tests import oracle

Make = Callable[[list[Tensor]], Optimizer]


def contenders() -> dict[str, Make]:
    """Each as its users get it with relative steps and no other argument."""
    from transformers.optimization import Adafactor as TransformersAdafactor

    return {
        f"adafactor {__version__}": Adafactor,
        f"torch.optim {torch.__version__.split('+')[0]}": torch.optim.Adafactor,
        f"transformers {version('transformers')}": TransformersAdafactor,
    }


def gradient(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, rms: float = 1.0) -> Tensor:
    """A random gradient of that size."""
    return (rms * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def stepped(make: Make, start: Tensor, grads: list[Tensor]) -> Tensor:
    """The parameter after these gradients."""
    p = start.clone().requires_grad_()
    optimizer = make([p])
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


def error_to_the_paper(make: Make, rms: float) -> str:
    """After 50 float64 steps of Algorithm 4: deviation relative to the distance travelled."""
    grads = [gradient((24, 16), seed, torch.float64, rms) for seed in range(50)]
    start = gradient((24, 16), 99, torch.float64)
    exact = oracle.algorithm_4(start.numpy(), [g.numpy() for g in grads], **oracle.algorithm_6())
    ours = stepped(make, start, grads).numpy()
    return f"{np.abs(ours - exact).max() / np.abs(exact - start.numpy()).max():.0%}"


def first_step(make: Make, rms: float) -> str:
    """The first bfloat16 step from zero, as a share of α₁ = 10⁻³·10⁻²: RMS(Û₁) is 1 in the paper."""
    p = stepped(make, torch.zeros(64, 32, dtype=torch.bfloat16), [gradient((64, 32), 0, torch.bfloat16, rms)])
    return f"{float(p.double().square().mean().sqrt()) / 1e-5:.0%}"


def resumes(make: Make) -> str:
    """Ten bfloat16 steps, straight through or by way of a checkpoint after five."""
    p = gradient((64, 32), 99, torch.bfloat16).requires_grad_()
    optimizer = make([p])
    for seed in range(10):
        if seed == 5:
            q = p.detach().clone().requires_grad_()
            other = make([q])
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        p.grad = gradient((64, 32), seed, torch.bfloat16)
        optimizer.step()
        if seed >= 5:
            q.grad = p.grad.clone()
            other.step()
    states = [[v for v in o.state[x].values() if isinstance(v, Tensor)] for o, x in ((optimizer, p), (other, q))]
    same = torch.equal(p, q) and all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    return "bit for bit" if same else "differs"


def after_a_nan(make: Make) -> str:
    """One NaN in one gradient: what is left of the parameter?"""
    bad = gradient((64, 32), 0)
    bad[3, 5] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = stepped(make, torch.ones(64, 32), [gradient((64, 32), 1), bad, gradient((64, 32), 2)])
    return f"{float(p.isnan().double().mean()):.0%} NaN"


QUESTIONS: dict[str, Callable[[Make], str]] = {
    "distance from Algorithm 4 after 50 float64 steps, gradients of 10⁻³": lambda make: error_to_the_paper(make, 1e-3),
    "the same, gradients of 10⁻⁸": lambda make: error_to_the_paper(make, 1e-8),
    "first bfloat16 step, gradients of 10⁻³": lambda make: first_step(make, 1e-3),
    "first bfloat16 step, gradients of 10⁻⁴": lambda make: first_step(make, 1e-4),
    "bfloat16 run through a checkpoint": resumes,
    "parameter after one NaN in one gradient": after_a_nan,
}


def main() -> None:
    """Print the table."""
    makes = contenders()
    print("| | " + " | ".join(makes) + " |\n|---|" + "---|" * len(makes))
    for question, answer in QUESTIONS.items():
        print(f"| {question} | " + " | ".join(answer(make) for make in makes.values()) + " |")


if __name__ == "__main__":
    main()
