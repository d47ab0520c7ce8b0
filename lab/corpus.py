"""The parallel text of the lab: Debian's by default, one's own files, or the generated task offline."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from lab import generated
from lab.clean import Pair, clean
from lab.fetch import FetchError, fetch
from lab.files import digest, locked, write_text
from lab.sources import read_all
from lab.split import split

PARTS = ("train", "dev", "test")
HELD_OUT_SIZES = {"dev": 1000, "test": 2000}
# The fingerprints under which runs on Debian 12's text were recorded; they count as one text.
DEBIAN_12 = {
    "14b1382a3b03a0a6",  # until 18 November 2026, when package descriptions came in the order of all archives' lists
    "6e1ed36bd0129a8a",  # the same sentences in another order: lightdm had come to the security archive
    "af541db78e69e5c3",  # in the order of the German list: 65 training pairs and a dev pair are others, of duplicates
}


class CorpusError(ValueError):
    """A text that is not there, or is not what it should be; the message says which."""


@dataclass(frozen=True)
class Corpus:
    """Training, development and test pairs under a name that tells where they come from."""

    name: str
    train: Sequence[Pair]
    dev: Sequence[Pair]
    test: Sequence[Pair]

    def part(self, name: str) -> Sequence[Pair]:
        """One of the three parts by its name."""
        return {"train": self.train, "dev": self.dev, "test": self.test}[name]

    def fingerprint(self) -> str:
        """A short hash of the text: two runs are comparable when it is the same."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        found = hashlib.sha256()
        for part in PARTS:
            pairs = self.part(part)
            if isinstance(pairs, FilePairs):
                found.update(f"{part}\t{digest(pairs.paths)}\n".encode())
            else:
                for pair in pairs:
                    found.update(f"{part}\t{pair.english}\t{pair.german}\n".encode())
        return found.hexdigest()[:16]


def is_same_text(first: str, second: str) -> bool:
    """Whether two fingerprints are of one text; those that Debian 12's has had are."""
    return first == second or {first, second} <= DEBIAN_12


@dataclass(frozen=True)
class OwnFiles:
    """Plain-text files of a corpus of one's own, a sentence a line: part → (source, target)."""

    paths: dict[str, tuple[Path, Path]] = field(default_factory=dict)
    name: str = "own"


class FilePairs(Sequence[Pair]):
    """The pairs of two files, read when they are asked for: a process need not hold millions of them.

    A line ends at a line feed and nowhere else: WMT's files have carriage returns and U+2028 inside a line.
    """

    def __init__(self, source: Path, target: Path) -> None:
        """Find where lines end.

        Raises:
            CorpusError: a file is missing, or one has more lines than the other.
        """
        self.paths = source, target
        if missing := [str(path) for path in self.paths if not path.is_file()]:
            raise CorpusError(f"there is no {' and no '.join(missing)}")
        self._data = [np.memmap(path, np.uint8, "r") if path.stat().st_size else _EMPTY for path in (source, target)]
        self._ends = [_line_ends(data) for data in self._data]
        if len(self._ends[0]) != len(self._ends[1]):
            raise CorpusError(f"{source.name} has {len(self._ends[0])} lines, {target.name} {len(self._ends[1])}")
        lengths = (np.diff(ends, prepend=-1) - 1 for ends in self._ends)
        self._kept = np.flatnonzero(np.minimum(*lengths) > 0)  # a pair has two sides

    def __len__(self) -> int:
        """How many pairs there are."""
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...

    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        """One pair, or several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        line = int(self._kept[index])
        english, german = (self._line(side, line) for side in (0, 1))
        return Pair("own", "", english, german)

    def _line(self, side: int, number: int) -> str:
        ends = self._ends[side]
        start = int(ends[number - 1]) + 1 if number else 0
        return self._data[side][start : int(ends[number])].tobytes().decode("utf-8").rstrip("\r")


_EMPTY: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


def _line_ends(data: npt.NDArray[np.uint8], at_once: int = 2**24) -> npt.NDArray[np.int64]:
    """Where the line feeds are; the last line may end without one."""
    found = [np.flatnonzero(data[start : start + at_once] == ord("\n")) + start
             for start in range(0, len(data), at_once)]  # fmt: skip
    if len(data) and data[-1] != ord("\n"):
        found.append(np.array([len(data)]))
    return np.concatenate(found) if found else np.empty(0, np.int64)


def cache_folder() -> Path:
    """`$ADAFACTOR_LAB_CACHE`, else a folder in the user's cache."""
    given = os.environ.get("ADAFACTOR_LAB_CACHE")
    if given:
        return Path(given).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "adafactor-lab"


def load(name: str, cache: Path, own: OwnFiles | None = None) -> Corpus:
    """The corpus called `debian`, `generated` or `own`; Debian's is built on the first call.

    Raises:
        FetchError: Debian's corpus is not in the cache and cannot be fetched here.
    """
    if name == "generated":
        return generated_corpus()
    if name == "own":
        if own is None or not {"train", "dev"} <= set(own.paths):
            raise CorpusError("an own corpus needs a source and a target file for train and dev (and may have test)")
        return Corpus(own.name, *(_read_own(part, *own.paths[part]) if part in own.paths else () for part in PARTS))
    if name == "help":
        return help_texts(load("debian", cache))
    if name != "debian":
        raise CorpusError(f"corpus is {name!r}, allowed are 'debian', 'help', 'generated' and 'own'")
    folder = cache / "corpus"
    with locked(cache / "corpus.lock"):
        if not (folder / "complete").exists():
            _build(folder)
    return Corpus("debian", *(_read_tsv(folder / f"{part}.tsv") for part in PARTS))


def help_texts(corpus: Corpus, words: int = 12) -> Corpus:
    """The short sentences of the help pages: formulaic, so that a small model learns them in minutes."""
    train, dev, test = (
        [
            p
            for p in corpus.part(part)
            if p.domain == "lo" and max(len(p.english.split()), len(p.german.split())) <= words
        ]
        for part in PARTS
    )
    return Corpus("help", train, dev, test)


def load_or_generated(name: str, cache: Path, own: OwnFiles | None = None) -> Corpus:
    """As `load`, but where Debian's corpus cannot be had, say so and take the generated task."""
    try:
        return load(name, cache, own)
    except FetchError as error:
        print(f"The Debian corpus is not available: {error}.")
        print("Using the generated task instead (phrases with numbers); its BLEU is not comparable.")
        return generated_corpus()


def generated_corpus() -> Corpus:
    """The rule-made task, split at random since its phrases share no documents."""
    pairs = generated.pairs(3000, seed=0)
    return Corpus("generated", pairs[:2700], pairs[2700:2800], pairs[2800:])


def counts(corpus: Corpus) -> str:
    """A table of pairs per part and domain."""
    domains = sorted({pair.domain for pair in corpus.train})
    lines = [f"{'pairs':<8}" + "".join(f"{name:>10}" for name in ("all", *domains))]
    for part in PARTS:
        found = Counter(pair.domain for pair in corpus.part(part))
        numbers = (len(corpus.part(part)), *(found[domain] for domain in domains))
        lines.append(f"{part:<8}" + "".join(f"{number:>10,}" for number in numbers))
    return "\n".join(lines)


def _build(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    print("Fetching the corpus from Debian's packages (29 MB) …", flush=True)
    files = fetch(folder)
    print("Cleaning it (about half a minute) …", flush=True)
    pairs, refused = clean(read_all(files))
    parts = split(pairs, HELD_OUT_SIZES)
    for part in PARTS:
        lines = (f"{pair.domain}\t{pair.english}\t{pair.german}\n" for pair in parts[part])
        write_text(folder / f"{part}.tsv", "".join(lines))
    print("Refused: " + ", ".join(f"{rule} {count:,}" for rule, count in refused.most_common()))
    write_text(folder / "complete", "")


def _read_tsv(path: Path) -> list[Pair]:
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").split("\n") if line)
    return [Pair(domain, "", english, german) for domain, english, german in rows]


def _read_own(part: str, source: Path, target: Path) -> FilePairs:
    try:
        return FilePairs(source, target)
    except CorpusError as error:
        raise CorpusError(f"{part}: {error}") from None
