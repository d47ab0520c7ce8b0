"""Is a contender's update the one that its own formula says? Nobody is to be fast by being wrong."""

from __future__ import annotations

import torch

from adafactor.bench.contenders import DTYPES, Contender
from adafactor.bench.results import Checked

# A vector, a tall and a wide matrix, two convolutions, and both matrices again where optax begins to factor.
SHAPES = [(7,), (40, 24), (24, 40), (32, 20, 3, 3), (3, 5, 20, 18), (144, 130), (130, 144)]
# Gradients that grow, so that clipping acts, and that shrink, so that clipping where none is due shows.
SIZES = [1.0, 3.0, 0.1, 2.0, 0.5]
# Largest deviation allowed, relative to the distance travelled: what rounding leaves, far below any mistake.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def check(contender: Contender, dtype: str, device: torch.device | None = None) -> Checked:
    """Take five steps on a few shapes and compare each parameter with the formula in float64."""
    if contender.formula is None:
        return Checked(contender.key, dtype, None, None)
    kind = DTYPES[dtype]
    generator = torch.Generator().manual_seed(0)
    # in bfloat16 from zero: elsewhere the rounding of X alone would hide the update
    start = [torch.randn(s, generator=generator).mul(0.1 if dtype == "float32" else 0.0) for s in SHAPES]
    grads = [[_gradient(shape, size, generator).to(kind) for shape in SHAPES] for size in SIZES]
    params = [torch.nn.Parameter(x.to(device, kind, copy=True)) for x in start]
    runner = None
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.to(device, copy=True)
        runner = runner or contender.make(params)
        runner.read_gradients()
        runner.step()
    assert runner is not None
    error = 0.0
    for i, x in enumerate(runner.values()):
        x0 = start[i].to(kind).double()
        history = [step[i].double().numpy() for step in grads]
        exact = torch.from_numpy(contender.formula(x0.numpy(), history, torch.finfo(kind).eps))
        deviation = (x.double().cpu() - exact).abs().max() / (exact - x0).abs().max()
        error = max(error, float(deviation.nan_to_num(float("inf"))))
    return Checked(contender.key, dtype, error, error <= TOLERANCE[dtype])


def _gradient(shape: tuple[int, ...], size: float, generator: torch.Generator) -> torch.Tensor:
    """Rows of different sizes: a factor that is dropped or taken along the wrong axis shows."""
    rows = torch.arange(1, shape[0] + 1).sqrt().reshape(-1, *[1] * (len(shape) - 1))
    columns = torch.arange(1, shape[-1] + 1).rsqrt()
    return 1e-2 * size * rows * columns * torch.randn(shape, generator=generator)
