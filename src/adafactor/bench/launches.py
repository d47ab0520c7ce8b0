"""The launches of a step in Triton: counted without being run, or timed apart by the device's events."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adafactor.bench.place import Card

if TYPE_CHECKING:
    from adafactor.kernels.triton.executor import Executor


class Launches:
    """Stands in for the launcher of the Triton backend while it is on, and notes every launch."""

    def __init__(self, card: Card | None = None):
        """Time launches on this card; None: run none of them."""
        self.card = card
        self.names: list[str] = []
        self._events: list[tuple[Any, Any]] = []

    def __enter__(self) -> Launches:
        """Take the launcher's place."""
        from adafactor.kernels.triton import executor as work

        self._real, work.launch = work.launch, self._launch
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        from adafactor.kernels.triton import executor as work

        work.launch = self._real

    def _launch(self, kernel: Any, programs: int, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        if not programs:
            return
        self.names.append(str(kernel.__name__).replace("_", " "))
        if self.card is not None:
            first, last = (self.card.module.Event(enable_timing=True) for _ in range(2))
            first.record()
            self._real(kernel, programs, arguments, options)
            last.record()
            self._events.append((first, last))

    @property
    def counts(self) -> Counter[str]:
        """How often each was launched."""
        return Counter(self.names)

    def seconds(self) -> dict[str, float]:
        """How long the launches of each took together; waits for them."""
        assert self.card is not None
        self.card.module.synchronize(self.card.device)
        found: dict[str, float] = defaultdict(float)
        for name, (first, last) in zip(self.names, self._events, strict=True):
            found[name] += float(first.elapsed_time(last)) / 1e3
        return dict(found)


def moved(works: Sequence[Executor]) -> dict[str, int]:
    """Bytes that each launch reads and writes in a step, whatever the cache holds, from how tensors are cut.

    Tables and scalars are left out: they are a few bytes for thousands of elements.
    """
    from adafactor.kernels.triton import fields as f
    from adafactor.kernels.triton.sizes import checked
    from adafactor.kernels.triton.table import units_of

    found: dict[str, int] = defaultdict(int)
    for work in works:
        kind, stat = work.kind, work.stat.itemsize
        tiles = work.table.tensors[:, f.TILES.value].tolist()
        for parameter, own in zip(work.parameters, tiles, strict=True):
            x, g, count = kind.x.itemsize, kind.g.itemsize, parameter.x.numel()
            how = work.table.tilings[parameter]
            first = g + (stat if kind.momentum == 2 else 0)  # an element
            last = g + 2 * x + (2 * stat if kind.momentum else 0) + (2 * x if kind.rounding == 2 else 0)
            found["measure"] += x * count
            if parameter.settings.relative:
                found["begin step"] += x * count * min(len(checked(own)) + 1, own) // own
            if how is None:
                found["first pass"] += (first + stat) * count
                found["last pass"] += (last + 2 * stat) * count
                continue
            rows, columns, stack = _matrices(work, parameter)
            units = -(-rows // units_of(parameter, how))
            partial = 2 * units * columns * stack * stat  # column sums of G² and of G²/R
            reads = 1 if kind.first_pass(how)["CHUNKS"] else 2
            found["first pass"] += reads * first * count + partial + 3 * rows * stack * stat
            found["fold"] += partial + 3 * columns * stack * stat
            found["last pass"] += last * count + 3 * (rows + columns) * stack * stat
    return dict(found)


def _matrices(work: Executor, parameter: Any) -> tuple[int, int, int]:
    """Rows, columns, and the number of matrices of a stack."""
    from adafactor.kernels.triton.table import factored_axes

    p, q = factored_axes(parameter)
    rows, columns = parameter.x.shape[p], parameter.x.shape[q]
    return rows, columns, parameter.x.numel() // (rows * columns)
