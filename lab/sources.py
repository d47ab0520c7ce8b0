"""Read aligned paragraphs out of the three fetched sources."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.fetch import RawFiles


@dataclass(frozen=True)
class Aligned:
    """A piece of text in both languages, and the document it comes from."""

    domain: str  # lo, deb or ding
    document: str
    english: str
    german: str


def read_all(files: RawFiles) -> Iterator[Aligned]:
    """Yield every aligned paragraph, in an order that does not depend on the machine."""
    yield from read_help(files.help_en, files.help_de)
    yield from read_descriptions(files.descriptions_en, files.descriptions_de)
    yield from read_dictionary(files.dictionary)


# LibreOffice help: the same paragraph has the same id in both languages.

_PARAGRAPH = re.compile(r'<(p|h\d?) id="((?:par|hd)_[^"]+)"[^>]*>(.*?)</\1>', re.DOTALL)
# Text for one operating system only; the same place holds the other text too.
_MAC = re.compile(r'<span[^>]*class="MAC"[^>]*>(?:<span[^>]*>[^<]*</span>|[^<])*</span>')
_TAG = re.compile(r"<[^>]+>")


def read_help(english: Path, german: Path) -> Iterator[Aligned]:
    """Pair paragraphs of the help pages by file and id."""
    for page in sorted(english.rglob("*.html")):
        name = page.relative_to(english)
        other = german / name
        if not other.exists():
            continue
        translated = _paragraphs(other)
        for key, text in _paragraphs(page).items():
            if key in translated:
                yield Aligned("lo", str(name), text, translated[key])


def _paragraphs(page: Path) -> dict[str, str]:
    text = page.read_text(encoding="utf-8", errors="replace")
    return {key: html.unescape(_TAG.sub("", _MAC.sub("", body))) for _, key, body in _PARAGRAPH.findall(text)}


# Debian's package descriptions: the same original text has the same md5 in both languages.

_FAMILY = re.compile(r"^(?:lib)?([a-z]+)")


def read_descriptions(english: Path, german: Path) -> Iterator[Aligned]:
    """Pair descriptions by md5, then paragraph by paragraph where both have as many.

    They come in the order of the German list, which Debian's main archive alone has. The security archive lists
    English ones, too, and others from day to day: in their order a pair's place would change with them.
    """
    originals = {key: paragraphs for _, key, paragraphs in _descriptions(english)}
    seen: set[str] = set()
    for package, key, translated in _descriptions(german):
        paragraphs = originals.get(key, [])
        if key in seen or len(paragraphs) != len(translated):
            continue
        seen.add(key)
        for source, target in zip(paragraphs, translated, strict=True):
            items, other_items = source.split("\n"), target.split("\n")
            if len(items) != len(other_items):
                items, other_items = [source], [target]
            for item, other in zip(items, other_items, strict=True):
                yield Aligned("deb", package_family(package), item, other)


def package_family(package: str) -> str:
    """The word packages of one origin share: `libfoo2-dev` and `foo-doc` are both `foo`."""
    match = _FAMILY.match(package)
    return match[1] if match else package


def _descriptions(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    for record in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        package = key = ""
        paragraphs: list[str] = []
        for line in record.splitlines():
            if line.startswith("Package: "):
                package = line[9:]
            elif line.startswith("Description-md5: "):
                key = line[17:]
            elif line.startswith("Description-"):
                paragraphs = [""]  # the headline is no sentence
            elif line == " .":
                paragraphs.append("")
            elif line.startswith(" ") and paragraphs:
                item = line.lstrip().startswith(("* ", "- ", "o "))
                paragraphs[-1] += ("\n" if item else " ") + line.strip()
        if key:
            yield package, key, paragraphs


# The ding dictionary: "German | sub-entry | … :: English | sub-entry | …", a line an entry.

_STOP = re.compile(r"[.!?]")  # single words, nine tenths of the dictionary, have none


def read_dictionary(path: Path) -> Iterator[Aligned]:
    """Pair sub-entries by position; of several wordings the first is taken."""
    for line in path.read_text(encoding="utf-8").splitlines():
        german, separator, english = line.partition(" :: ")
        if not separator or line.startswith("#"):
            continue
        sources, targets = english.split(" | "), german.split(" | ")
        if len(sources) != len(targets):
            continue
        for source, target in zip(sources, targets, strict=True):
            if source[-1:] != "}" and _STOP.search(source) and _STOP.search(target):
                yield Aligned("ding", targets[0], source.split(";")[0], target.split(";")[0])
