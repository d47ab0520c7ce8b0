"""Batches by token count, bucketed by length, in an order that the seed and the step decide alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.clean import Pair
from lab.vocabulary import BEGIN, END, PAD, Vocabulary


@dataclass(frozen=True)
class Batch:
    """Padded ids: the decoder reads the target with its begin mark and predicts it with its end mark."""

    source: Tensor  # (B, S)
    target_in: Tensor  # (B, T)
    target_out: Tensor  # (B, T)

    @property
    def tokens(self) -> int:
        """Source and target tokens, without padding."""
        return int((self.source != PAD).sum() + (self.target_out != PAD).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(self.source.to(device), self.target_in.to(device), self.target_out.to(device))


class Batches:
    """An endless stream of training batches."""

    def __init__(self, pairs: list[Pair], vocabulary: Vocabulary, tokens: int, longest: int = 80) -> None:
        """Encode the pairs; `tokens` bounds the padded tokens of a batch on either side.

        Pairs with a side longer than `longest` subwords are left out.
        """
        sources = vocabulary.encode([pair.english for pair in pairs])
        targets = vocabulary.encode([pair.german for pair in pairs])
        both = [(s + [END], t + [END]) for s, t in zip(sources, targets, strict=True)]
        self._pairs = [(s, t) for s, t in both if max(len(s), len(t)) <= min(longest, tokens)]
        self._lengths = np.array([(len(s), len(t)) for s, t in self._pairs])
        self._tokens = tokens

    def stream(self, seed: int, start: int = 0) -> Iterator[Batch]:
        """Batches from number `start` on, which is how a resumed run continues."""
        epoch = 0
        while True:
            plan = self._plan(np.random.default_rng([seed, epoch]))
            for indices in plan[start:]:
                yield make_batch([self._pairs[i] for i in indices])
            start = max(0, start - len(plan))
            epoch += 1

    def _plan(self, draw: np.random.Generator) -> list[list[int]]:
        """One epoch: neighbours in length share a batch, and the batches come in random order."""
        # A little noise on the length makes other neighbours every epoch.
        noisy = self._lengths.max(axis=1) + draw.uniform(0, 1.5, len(self._lengths))
        plan: list[list[int]] = [[]]
        widest = 0
        for index in np.argsort(noisy):
            widest = max(widest, int(self._lengths[index].max()))
            if (len(plan[-1]) + 1) * widest > self._tokens:
                plan.append([])
                widest = int(self._lengths[index].max())
            plan[-1].append(int(index))
        return [plan[i] for i in draw.permutation(len(plan))]


def make_batch(pairs: list[tuple[list[int], list[int]]]) -> Batch:
    """Pad encoded pairs, each side with its end mark, into one batch."""
    return Batch(
        source=pad([source for source, _ in pairs]),
        target_in=pad([[BEGIN, *target[:-1]] for _, target in pairs]),
        target_out=pad([target for _, target in pairs]),
    )


def pad(rows: list[list[int]]) -> Tensor:
    """Rows of ids as one matrix, filled up with the padding id."""
    filled = np.full((len(rows), max(map(len, rows))), PAD, dtype=np.int64)
    for index, row in enumerate(rows):
        filled[index, : len(row)] = row
    return torch.from_numpy(filled)
