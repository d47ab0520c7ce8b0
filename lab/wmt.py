"""WMT 2014 English-German, from the archives that the workshop offers, each checked by its SHA-256.

Put the four archives into one folder; the training text is Europarl, Common Crawl and News Commentary, the dev set
newstest2013, the test set newstest2014. They are unpacked into the cache once, as plain files with a sentence a line.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from lab.corpus import CorpusError
from lab.files import digest, locked, write_atomically

# name → SHA-256; the dev sets are those of the WMT 2019 archive, which has newstest2013 and newstest2014.
ARCHIVES = {
    "training-parallel-europarl-v7.tgz": "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
    "training-parallel-commoncrawl.tgz": "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
    "training-parallel-nc-v9.tgz": "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
    "dev.tgz": "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
}
# part → (archive, member of the source language, member of the target language)
MEMBERS = {
    "train": (
        ("training-parallel-europarl-v7.tgz", "training/europarl-v7.de-en.en", "training/europarl-v7.de-en.de"),
        ("training-parallel-commoncrawl.tgz", "commoncrawl.de-en.en", "commoncrawl.de-en.de"),
        ("training-parallel-nc-v9.tgz", "training/news-commentary-v9.de-en.en", "training/news-commentary-v9.de-en.de"),
    ),
    "dev": (("dev.tgz", "dev/newstest2013.en", "dev/newstest2013.de"),),
    "test": (("dev.tgz", "dev/newstest2014-deen-ref.en.sgm", "dev/newstest2014-deen-src.de.sgm"),),
}
_SEGMENT = re.compile(r"<seg[^>]*>(.*?)</seg>", re.DOTALL)


def unpack(folder: Path, cache: Path, archives: dict[str, str] = ARCHIVES) -> dict[str, tuple[Path, Path]]:
    """The files of each part, (source, target); the archives are checked and unpacked at the first call.

    Raises:
        CorpusError: says which archives are missing or are others.
    """
    target = cache / "wmt14"
    found = {part: (target / f"{part}.en", target / f"{part}.de") for part in MEMBERS}
    with locked(cache / "wmt14.lock"):
        if all(path.exists() for pair in found.values() for path in pair):
            return found
        missing = [name for name in archives if not (folder / name).exists()]
        if missing:
            raise CorpusError(f"{folder} has no {', '.join(missing)}: the archives of WMT 2014 go there as they are")
        print(f"Checking and unpacking {len(archives)} archives (some minutes, once) …", flush=True)
        for name, expected in archives.items():
            if digest([folder / name]) != expected:
                raise CorpusError(f"{folder / name} is not the archive of WMT 2014: its SHA-256 differs")
        for part, members in MEMBERS.items():
            for side, path in enumerate(found[part]):
                texts = (line for archive, *sides in members for line in _lines(folder / archive, sides[side]))
                write_atomically(path, lambda stream, texts=texts: stream.writelines(texts))  # type: ignore[misc]
    return found


def _lines(archive: Path, member: str) -> Iterator[bytes]:
    """The lines of a member: split at line feeds alone, what else breaks a line inside of one is a space."""
    with tarfile.open(archive) as opened:
        stream = opened.extractfile(member)
        if stream is None:
            raise CorpusError(f"{archive} has no {member}")
        with stream:
            if member.endswith(".sgm"):
                texts = [unescape(text) for text in _SEGMENT.findall(stream.read().decode("utf-8"))]
            else:
                texts = (line.decode("utf-8") for line in stream)  # type: ignore[assignment]
            for text in texts:
                yield (" ".join(text.split()) + "\n").encode()
