"""One step of a bucket, from G to X: the phases of Algorithms 4 and 5 in their order.

    G ─ moments ─▶ row and column means of G² ─(ranks)─▶ V̂ ─ norms ─▶ ΣU², ΣX² ─(ranks)─▶ α ─ apply ─▶ X, R, C, V̂

The mathematics is in `adafactor/algorithm.py`. Here the executors of a bucket are led through it: one by one, each in
one call, where nothing has to happen between the phases; else side by side, so that the sums of sharded parameters can
be completed together, and so that a bad gradient or a lost rank raises before any tensor is modified.
"""

from __future__ import annotations

from collections.abc import Sequence

from adafactor.core.bucket import Bucket
from adafactor.core.contract import Executor, Gradients, Parameter, check_finite
from adafactor.core.settings import Settings
from adafactor.distributed.reductions import Ranks


def step(bucket: Bucket, grads: Gradients, settings: Sequence[Settings]) -> list[Parameter]:
    """Take one step with every parameter that has a gradient; return those that were skipped as non-finite."""
    written = bucket.written_between_steps()

    def begin(executor: Executor) -> None:
        places = bucket.places[executor]
        own = None if written is None else [written[i] for i in places]
        executor.begin([grads[i] for i in places], settings, own)

    try:
        side_by_side = [executor for executor in bucket.executors if executor.in_lockstep]
        for executor in side_by_side:
            begin(executor)
        if side_by_side:
            _run_phases(side_by_side, bucket.ranks)
        for executor in bucket.executors:
            if not executor.in_lockstep:
                begin(executor)
                executor.step()
    finally:
        skipped = [parameter for executor in bucket.executors for parameter in executor.end()]
        bucket.end_step()
    return skipped


def _run_phases(executors: Sequence[Executor], ranks: Ranks | None) -> None:
    """Lead executors from G to X side by side."""
    for executor in executors:
        executor.moments()
    sums = [one for executor in executors for one in executor.sums]
    if ranks is not None:
        ranks.complete_moments(sums)
    check_finite(sums)  # may raise
    if ranks is not None:
        for executor in executors:
            if executor.parameters[0].shard is not None:
                executor.norms()
        ranks.complete_norms(sums)
    # so far nothing has been changed: if a rank was lost, no half of a step is left
    for executor in executors:
        executor.apply_()
