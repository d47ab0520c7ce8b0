"""Batches by token count, bucketed by length, in an order that the seed and the step decide alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lab.clean import Pair
from lab.files import locked, write_atomically
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

    @property
    def targets(self) -> int:
        """Tokens to predict, over which the loss is a mean."""
        return int((self.target_out != PAD).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(self.source.to(device), self.target_in.to(device), self.target_out.to(device))

    def rows(self, which: Tensor) -> Batch:
        """Some of its sentences."""
        return Batch(self.source[which], self.target_in[which], self.target_out[which])


class Sentences:
    """Encoded sentences, each with its end mark, in one array: millions of them must fit into memory."""

    def __init__(self, ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> None:
        """Take the ids of all sentences, one after the other, and how many each has."""
        self.lengths, self._ids, self._ends = lengths, ids, np.cumsum(lengths, dtype=np.int64)

    @classmethod
    def encode(cls, texts: Iterable[str], vocabulary: Vocabulary) -> Sentences:
        """Encode texts, some thousands at a time."""
        parts: list[npt.NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
        lengths: list[npt.NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
        texts = iter(texts)
        while some := list(islice(texts, 10_000)):
            encoded = [[*ids, END] for ids in vocabulary.encode(some)]
            lengths.append(np.array([len(ids) for ids in encoded], dtype=np.int32))
            parts.append(np.fromiter(chain.from_iterable(encoded), dtype=np.int32))
        return cls(np.concatenate(parts), np.concatenate(lengths))

    @classmethod
    def kept(cls, path: Path, texts: Iterable[str], vocabulary: Vocabulary) -> Sentences:
        """The same from a file, which is made at the first call: processes share the memory that it is mapped into."""
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                made = cls.encode(texts, vocabulary)
                both = np.concatenate([made._ids, made.lengths, np.array([len(made.lengths)], dtype=np.int32)])
                write_atomically(path, lambda stream: stream.write(both.data))
        both = np.memmap(path, dtype=np.int32, mode="r")
        count = int(both[-1])
        return cls(both[: -1 - count], both[-1 - count : -1])

    def __getitem__(self, index: int) -> list[int]:
        """The ids of one sentence."""
        end = self._ends[index]
        found: list[int] = self._ids[end - self.lengths[index] : end].tolist()
        return found


class Batches:
    """An endless stream of training batches."""

    def __init__(
        self, pairs: Sequence[Pair], vocabulary: Vocabulary, tokens: int, longest: int = 80, kept: Path | None = None
    ) -> None:
        """Encode the pairs; `tokens` bounds the padded tokens of a batch on either side.

        Pairs with a side longer than `longest` subwords are left out. `kept` begins the names of two files in which the
        encoded pairs are found the next time.
        """
        sides = {"source": (pair.english for pair in pairs), "target": (pair.german for pair in pairs)}
        self._sources, self._targets = (
            Sentences.kept(kept.with_name(f"{kept.name}-{side}.ids"), texts, vocabulary)
            if kept
            else Sentences.encode(texts, vocabulary)
            for side, texts in sides.items()
        )
        longer = np.maximum(self._sources.lengths, self._targets.lengths)
        self._kept = np.flatnonzero(longer <= min(longest, tokens))
        self._longer = longer[self._kept]
        self._tokens = tokens

    def stream(self, seed: int, start: int = 0) -> Iterator[Batch]:
        """Batches from number `start` on, which is how a resumed run continues."""
        epoch = 0
        while True:
            plan = self._plan(np.random.default_rng([seed, epoch]))
            for indices in plan[start:]:
                yield make_batch([(self._sources[i], self._targets[i]) for i in self._kept[indices]])
            start = max(0, start - len(plan))
            epoch += 1

    def _plan(self, draw: np.random.Generator) -> list[npt.NDArray[np.int64]]:
        """One epoch: neighbours in length share a batch, and the batches come in random order."""
        # A little noise on the length makes other neighbours every epoch.
        order = np.argsort(self._longer + draw.uniform(0, 1.5, len(self._longer)))
        starts, widest = [0], 0
        for place, length in enumerate(self._longer[order].tolist()):
            widest = max(widest, length)
            if (place - starts[-1] + 1) * widest > self._tokens:
                starts.append(place)
                widest = length
        plan = np.split(order, starts[1:])
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
