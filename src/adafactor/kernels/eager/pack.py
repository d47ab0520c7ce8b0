"""Small tensors end to end in one, so that an operation on all of them is one launch on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Pack:
    """Where tensors of these sizes lie in one vector, and which of them each element belongs to."""

    def __init__(self, sizes: Sequence[int], device: torch.device):
        """Make the index once; it lasts."""
        self.sizes, self._device = list(sizes), device
        number = torch.arange(len(self.sizes), device=device)
        self.entry = number.repeat_interleave(torch.tensor(self.sizes, device=device), output_size=sum(self.sizes))
        self._constants: dict[tuple[float, ...], Tensor] = {}

    def join(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Put tensors end to end."""
        return torch.cat([t.reshape(-1) for t in tensors]).to(dtype)

    def split(self, joined: Tensor) -> list[Tensor]:
        """Take them apart again, as views."""
        return list(joined.split(self.sizes))

    def store(self, joined: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy each part into its tensor."""
        torch._foreach_copy_([t.view(-1) for t in tensors], self.split(joined))

    def sums(self, joined: Tensor) -> Tensor:
        """The sum of each tensor's elements, none of which is negative."""
        return torch.stack(torch._foreach_norm(self.split(joined), 1))

    def vector(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """A number for each tensor, uploaded once."""
        key = tuple(values)
        if key not in self._constants:
            self._constants[key] = torch.tensor(key, dtype=dtype, device=self._device)
        return self._constants[key]

    def constants(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """A number for each tensor, spread over its elements."""
        return self.vector(values, dtype)[self.entry]
