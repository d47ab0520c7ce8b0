"""`report()` counts every step and every skip, whichever parameters have gradients and whichever way they step."""

from __future__ import annotations

import math
import random as dice

import pytest
from torch import nn

from adafactor import Adafactor
from tests.attack.helpers import random

Count = tuple[int, int]  # steps taken, steps skipped
SHAPES = [(8, 6), (8, 6), (7,), (40, 30)]
SKIPPED = pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")


def run(backend: str, pattern: list[str], every: int) -> tuple[list[Count], list[Count], list[float]]:
    """One letter for each parameter of each step: a gradient (g), none (-) or a NaN (n).

    Returns steps and skips as counted here and as reported every so many steps, and RMS(U) of the last steps.
    """
    params = [nn.Parameter(random(shape, i)) for i, shape in enumerate(SHAPES)]
    optimizer = Adafactor(params, backend=backend)
    counted, told = [[0, 0] for _ in params], [[0, 0] for _ in params]
    last = [math.nan] * len(params)
    for t, letters in enumerate(pattern):
        for i, (p, letter) in enumerate(zip(params, letters, strict=True)):
            p.grad = None if letter == "-" else random(tuple(p.shape), 10 * t + i)
            if letter == "n":
                assert p.grad is not None
                p.grad.view(-1)[3] = math.nan
            counted[i][0] += letter == "g"
            counted[i][1] += letter == "n"
        optimizer.step()
        if (t + 1) % every == 0 or t + 1 == len(pattern):
            for i, record in enumerate(optimizer.report()):
                told[i] = [record.steps, record.skipped]
                last[i] = record.rms_update
    return [(a, b) for a, b in counted], [(a, b) for a, b in told], last


def patterns() -> list[list[str]]:
    """One parameter that comes and goes, and what dice give: mostly gradients, then as often none or NaN."""
    rolled = dice.Random(0)
    comes_and_goes = [f"{a}ggg" for a in "ggg-g-gg-ggg--gg"]
    goes_bad = [f"g{a}gg" for a in "gggngg-gngg"]
    many = [["".join(rolled.choices("g-n", weights, k=4)) for _ in range(24)] for weights in ((8, 1, 1), (1, 1, 1))]
    return [comes_and_goes, goes_bad, *many]


@SKIPPED
@pytest.mark.parametrize("pattern", patterns(), ids=["comes and goes", "goes bad", "mostly", "as often"])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_every_step_and_every_skip_is_counted(pattern: list[str], every: int, backend: str) -> None:
    counted, told, last = run(backend, pattern, every)
    assert told == counted
    _, _, expected = run("eager", pattern, every)
    assert last == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_settings_that_change_from_step_to_step_lose_no_count(backend: str) -> None:
    params = [nn.Parameter(random(shape, i)) for i, shape in enumerate(SHAPES)]
    optimizer = Adafactor(params, backend=backend)
    changes: list[dict[str, object]] = [{}, {"on_nonfinite": "raise"}, {"clip": 0.5}, {"on_nonfinite": "skip"}, {}]
    changes += [{"beta1": 0.9}, {}, {"lr": 0.1}, {}]
    for t, change in enumerate(changes):
        optimizer.param_groups[0].update(change)
        for i, p in enumerate(params):
            p.grad = random(tuple(p.shape), 10 * t + i)
        optimizer.step()
    assert [record.steps for record in optimizer.report()] == [len(changes)] * len(params)
