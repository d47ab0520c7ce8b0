"""The parallel text of the lab: Debian's by default, one's own files, or the generated task offline."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from lab import generated
from lab.clean import Pair, clean
from lab.fetch import FetchError, fetch
from lab.files import locked, write_text
from lab.sources import read_all
from lab.split import split

PARTS = ("train", "dev", "test")
HELD_OUT_SIZES = {"dev": 1000, "test": 2000}
# Training pairs per domain on Debian 12; other releases differ, so this is checked within a tolerance.
EXPECTED = {"lo": 28_492, "deb": 23_292, "ding": 15_314}
TOLERANCE = 0.15


@dataclass(frozen=True)
class Corpus:
    """Training, development and test pairs under a name that tells where they come from."""

    name: str
    train: list[Pair]
    dev: list[Pair]
    test: list[Pair]

    def part(self, name: str) -> list[Pair]:
        """One of the three parts by its name."""
        return {"train": self.train, "dev": self.dev, "test": self.test}[name]

    def fingerprint(self) -> str:
        """A short hash of the text: two runs are comparable when it is the same."""
        digest = hashlib.sha256()
        for part in PARTS:
            for pair in self.part(part):
                digest.update(f"{part}\t{pair.english}\t{pair.german}\n".encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class OwnFiles:
    """Plain-text files of a corpus of one's own, a sentence a line: part → (source, target)."""

    paths: dict[str, tuple[Path, Path]] = field(default_factory=dict)


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
            raise ValueError("an own corpus needs a source and a target file for train and dev (and may have test)")
        return Corpus("own", *(_read_own(part, *own.paths[part]) if part in own.paths else [] for part in PARTS))
    if name == "help":
        return help_texts(load("debian", cache))
    if name != "debian":
        raise ValueError(f"corpus is {name!r}, allowed are 'debian', 'help', 'generated' and 'own'")
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
        print("Using the generated task instead (number and date phrases); its BLEU is not comparable.")
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


def unexpected(corpus: Corpus) -> list[str]:
    """What differs too much from the counts seen on Debian 12, as sentences; empty when all is well."""
    found = Counter(pair.domain for pair in corpus.train)
    problems = [
        f"{domain}: {found[domain]:,} training pairs where about {expected:,} are expected"
        for domain, expected in EXPECTED.items()
        if abs(found[domain] - expected) > TOLERANCE * expected
    ]
    problems += [
        f"{part}: {len(corpus.part(part)):,} pairs, not {size:,}"
        for part, size in HELD_OUT_SIZES.items()
        if len(corpus.part(part)) != size
    ]
    overlap = {pair.english for pair in corpus.train} & {pair.english for pair in corpus.dev + corpus.test}
    return problems + ([f"{len(overlap)} held-out sentences are in the training set"] if overlap else [])


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
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [Pair(domain, "", english, german) for domain, english, german in rows]


def _lines(path: Path) -> list[str]:
    """The lines of a file, split at line feeds alone: WMT's files have carriage returns and U+2028 inside a line."""
    lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    return [line.rstrip("\r") for line in lines]


def _read_own(part: str, source: Path, target: Path) -> list[Pair]:
    sources, targets = (_lines(path) for path in (source, target))
    if len(sources) != len(targets):
        raise ValueError(f"{part}: {source.name} has {len(sources)} lines, {target.name} {len(targets)}")
    return [Pair("own", "", *both) for both in zip(sources, targets, strict=True) if all(both)]
