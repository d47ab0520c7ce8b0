"""Small tables that the host sends to a device."""

from __future__ import annotations

import torch
from torch import Tensor

SPARE = 4  # pinned tables for graphs that are captured one after the other, without a step in between


class Upload:
    """A small table on the device, uploaded when it has changed, without a wait.

    Each upload comes from pinned memory of its own, which torch does not use again before the copy is done. A graph
    that is being captured repeats its copy with every replay, so it has a table and memory of its own that last.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device):
        """Nothing is there yet."""
        self._there = torch.zeros(shape, dtype=dtype, device=device)
        self._here: list[tuple[float, ...]] = []
        self._captured: list[Tensor] = []
        self._spare = [self._pinned() for _ in range(SPARE)]  # while a graph is captured, none should be taken
        self.there = self._there  # what the kernels of this step read
        self.uploads = 0

    def set(self, rows: list[tuple[float, ...]]) -> None:
        """Upload these rows if they are not there."""
        self.there = self._there
        capturing = is_capturing(self._there.device)
        if not capturing:
            self._spare += [self._pinned() for _ in range(SPARE - len(self._spare))]
            if rows == self._here:
                return
        new = self._spare.pop() if self._spare else self._pinned()
        if capturing:
            self.there = torch.empty_like(self._there)
            self._captured += [new, self.there]
        else:
            self._here = rows
        self.there.copy_(new.copy_(torch.tensor(rows, dtype=new.dtype, device="cpu")), non_blocking=True)
        self.uploads += 1

    def _pinned(self) -> Tensor:
        there = self._there
        return torch.empty(there.shape, dtype=there.dtype, device="cpu", pin_memory=there.is_cuda)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
