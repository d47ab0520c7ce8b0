"""Divide pairs into train, dev and test by whole documents, and drop held-out sentences that leak."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from lab.clean import Pair, words

HELD_OUT = 0.07  # of the documents; a third of them for dev, the rest for test
GRAM = 4


def place(pair: Pair) -> str:
    """Which part a pair's document belongs to: a hash of its name, so the same on every machine."""
    digest = hashlib.sha256(f"{pair.domain}:{pair.document}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share >= HELD_OUT:
        return "train"
    return "dev" if share < HELD_OUT / 3 else "test"


def full_sentence(pair: Pair) -> bool:
    """Held-out pairs are sentences: at least four words a side, with a final stop."""
    return all(len(text.split()) >= 4 and text[-1] in ".!?" for text in (pair.english, pair.german))


def split(pairs: list[Pair], sizes: dict[str, int]) -> dict[str, list[Pair]]:
    """Train, dev and test; dev and test are drawn down to `sizes` in hash order."""
    parts: dict[str, list[Pair]] = {"train": [], "dev": [], "test": []}
    for pair in pairs:
        parts[place(pair)].append(pair)
    for name in ("dev", "test"):
        held = [pair for pair in parts[name] if full_sentence(pair)]
        for side in (_english, _german):
            leaking = leaks([side(pair) for pair in held], (side(pair) for pair in parts["train"]))
            held = [pair for index, pair in enumerate(held) if index not in leaking]
        parts[name] = sorted(held, key=_hash)[: sizes[name]]
    return parts


def leaks(held_out: list[str], training: Iterable[str]) -> set[int]:
    """Indices of held-out sentences half or more of whose word 4-grams stand in one training sentence."""
    owners: dict[tuple[str, ...], list[int]] = defaultdict(list)
    sizes = []
    for index, text in enumerate(held_out):
        grams = _grams(text)
        sizes.append(len(grams))
        for gram in grams:
            owners[gram].append(index)
    found: set[int] = set()
    for text in training:
        shared: Counter[int] = Counter()
        for gram in _grams(text):
            shared.update(owners.get(gram, ()))
        found.update(index for index, count in shared.items() if 2 * count >= sizes[index])
    return found


def _grams(text: str) -> set[tuple[str, ...]]:
    """The word 4-grams; a shorter sentence is one gram by itself."""
    found = words(text)
    return {tuple(found[i : i + GRAM]) for i in range(max(1, len(found) - GRAM + 1))}


def _hash(pair: Pair) -> bytes:
    return hashlib.sha256(pair.english.encode()).digest()


_english: Callable[[Pair], str] = lambda pair: pair.english  # noqa: E731
_german: Callable[[Pair], str] = lambda pair: pair.german  # noqa: E731
