"""The paper's account of why rows fail without warm-up (§5): updates that are larger than desired."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lab.evaluate import unpack_figures
from lab.results import FAILS, HOLDS, UNDECIDED, Record, by_pair, mean

LARGE = 3.0  # RMS(U) above it counts as larger than desired
SHARE = 0.01  # of the figures, from which on large updates count as there
SAME_START, APART = 0.05, 0.2  # of the training losses of two rows: before, and at the end
START, MIDDLE, END = (1, 40), (41, 240), (351, 400)  # steps


def of_attention(record: Record) -> NDArray[np.float64]:
    """RMS(U) of each matrix of the decoder's attention after each step: (steps, matrices)."""
    names = record["updates"]["parameters"]
    figures = unpack_figures(record["updates"]["values"], len(names))
    wanted = [i for i, name in enumerate(names) if name.startswith("decoder.") and _is_attention(name)]
    return figures[:, wanted]


def _is_attention(name: str) -> bool:
    return name.split(".")[2] in ("attention", "other")


def share_large(record: Record, steps: tuple[int, int] = MIDDLE) -> float:
    """Which share of these figures is larger than desired."""
    return float((of_attention(record)[steps[0] - 1 : steps[1]] > LARGE).mean())


def training_loss(record: Record, steps: tuple[int, int]) -> float:
    """The mean training loss over these steps."""
    return mean(loss for step, loss in record["curve"] if steps[0] <= step <= steps[1])


def judge(unclipped: Sequence[Record], clipped: Sequence[Record]) -> tuple[str, str, int]:
    """The verdict, what was measured, and of how many seeds: large updates come first, and clipping them is enough."""
    ours, theirs = by_pair(unclipped), by_pair(clipped)
    pairs = [(ours[key], theirs[key]) for key in sorted(ours) if key in theirs]
    if not pairs:
        return UNDECIDED, "no runs", 0
    starts = [abs(training_loss(a, START) - training_loss(h, START)) for a, h in pairs]
    shares = [share_large(a) for a, _ in pairs]
    gains = [training_loss(a, END) - training_loss(h, END) for a, h in pairs]
    is_large, is_apart = [s >= SHARE for s in shares], [g > APART for g in gains]
    if all(is_large) and all(is_apart) and max(starts) < SAME_START:
        verdict = HOLDS
    else:
        verdict = FAILS if not any(is_large) or not any(is_apart) else UNDECIDED
    text = (
        f"steps {START[0]}–{START[1]}: losses within {max(starts):.2f}; steps {MIDDLE[0]}–{MIDDLE[1]}: RMS(U) above "
        f"{LARGE:g} in {_percents(shares)} of A's figures; steps {END[0]}–{END[1]}: H ahead by "
        + ", ".join(f"{gain:.2f}" for gain in gains)
    )
    return (verdict if len(pairs) >= 3 else UNDECIDED), text, len(pairs)


def _percents(shares: list[float]) -> str:
    return ", ".join(f"{100 * share:.1f} %" for share in shares)
