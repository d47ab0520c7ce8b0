"""Turn aligned paragraphs into clean sentence pairs; each rule says no with its own name."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lab.sources import Aligned


@dataclass(frozen=True)
class Pair:
    """One sentence in both languages."""

    domain: str
    document: str
    english: str
    german: str


_FORMS = str.maketrans({
    **dict.fromkeys("„“”«»‟", '"'),
    **dict.fromkeys("’‘‚‛`´", "'"),
    **dict.fromkeys("–—‐‑‒―−", "-"),
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\ufeff", None),
})  # fmt: skip


def normalise(text: str) -> str:
    """NFC, and one form of quote, dash and space."""
    return " ".join(unicodedata.normalize("NFC", text).translate(_FORMS).split())


_END = re.compile(r"([.!?][\"')]*)\s+(?=[\"'(]*[A-ZÄÖÜ])")
_NO_END = re.compile(
    r"(?:\b[A-Za-zÄÖÜ]|\d|\b(?:e\.g|i\.e|etc|vs|cf|Dr|Mr|Mrs|St|No|Nr|ca|bzw|usw|ggf|evtl|vgl|inkl|sog|Abb|Fig|Inc))\.$"
)


def sentences(text: str) -> list[str]:
    """Split at sentence ends; abbreviations, initials and ordinals are none."""
    found, start = [], 0
    for match in _END.finditer(text):
        if not _NO_END.search(text[start : match.end(1)]):
            found.append(text[start : match.end(1)])
            start = match.end()
    return [*found, text[start:]]


_NOTES = re.compile(r"\{[^}]*\}|\[[^]]*\]|\([^)]*\)|<[^>]*>")


def pairs_of(piece: Aligned) -> Iterator[Pair]:
    """Sentence pairs 1:1 where both sides have as many, else the paragraph whole."""
    english, german = piece.english, piece.german
    if piece.domain == "ding":  # grammar notes and remarks
        english, german = _NOTES.sub(" ", english), _NOTES.sub(" ", german)
    english, german = normalise(english), normalise(german)
    split_en, split_de = sentences(english), sentences(german)
    if len(split_en) != len(split_de):
        split_en, split_de = [english], [german]
    for source, target in zip(split_en, split_de, strict=True):
        yield Pair(piece.domain, piece.document, _lead(source), _lead(target))


def _lead(text: str) -> str:
    """Drop a list mark at the start."""
    return re.sub(r"^(?:[*•+o-]\s+)+", "", text)


_WORD = re.compile(r"[^\W\d_]+")
_MARKUP = re.compile(r"[<>{}\[\]\\|@#$^*~_]|&\w+;|\.\.\.|…")
_ADDRESS = re.compile(r"https?:|www\.|\w/\w+/|(?:^|\s)/\w|\.(?:org|com|net|html|txt|conf|so|py)\b|\w\.\w{2,}\b(?<!z\.)")
_IDENTIFIER = re.compile(r"\w::\w|\w\(\)|\b[a-z]+[A-Z]\w*|\w_\w|(?:^|\s)--?\w|\b\w+-(?:dev|dbg|doc)\b")
_DING = re.compile(r"/|…|\.\.|\b(?:sb|sth|jdn|jdm|jds|etw|jd)\b")
_DIGITS = re.compile(r"\d+")
_ENGLISH = frozenset(
    "the of and to is that for with you this are be or as it from by can not your which on have".split()
)
_GERMAN = frozenset(
    "der die das und ist den dem des ein eine einen einer für mit von auf sie nicht zu sich wird werden oder im".split()
)


def refusal(pair: Pair) -> str | None:
    """The name of the first rule a pair breaks; None for a clean pair."""
    for name, breaks in _RULES:
        if breaks(pair):
            return name
    return None


def _length(pair: Pair) -> bool:
    english, german = len(pair.english.split()), len(pair.german.split())
    low, high = sorted((english, german))
    ratio = len(pair.english) / max(1, len(pair.german))
    return low < 3 or high > 50 or high > 2 * low + 2 or not 0.5 <= ratio <= 1.7


def _markup(pair: Pair) -> bool:
    return any(
        _MARKUP.search(text) or _ADDRESS.search(text) or _IDENTIFIER.search(text)
        for text in (pair.english, pair.german)
    )


def _letters(pair: Pair) -> bool:
    for text in (pair.english, pair.german):
        dense = text.replace(" ", "")
        if sum(map(str.isalpha, dense)) < 0.75 * len(dense):
            return True
        if any(ord(letter) > 0x24F and letter.isalpha() for letter in dense):
            return True
    return False


def _digits(pair: Pair) -> bool:
    return sorted(_DIGITS.findall(pair.english)) != sorted(_DIGITS.findall(pair.german))


def _ending(pair: Pair) -> bool:
    return any(pair.english.endswith(mark) != pair.german.endswith(mark) for mark in "?:")


def _copy(pair: Pair) -> bool:
    english, german = words(pair.english), words(pair.german)
    shared = sum((Counter(english) & Counter(german)).values())
    return 2 * shared > max(len(english), len(german))


def _language(pair: Pair) -> bool:
    english, german = words(pair.english), words(pair.german)
    return _hits(english, _GERMAN) > _hits(english, _ENGLISH) or _hits(german, _ENGLISH) > _hits(german, _GERMAN)


def _hits(found: list[str], stop_words: frozenset[str]) -> int:
    return sum(word in stop_words for word in found)


def _dictionary(pair: Pair) -> bool:
    """Only full sentences of the dictionary, without its place-holders and alternatives."""
    if pair.domain != "ding":
        return False
    return any(
        _DING.search(text) or not text[:1].isupper() or text[-1:] not in ".!?" for text in (pair.english, pair.german)
    )


_RULES = (
    ("length", _length),
    ("markup", _markup),
    ("letters", _letters),
    ("digits", _digits),
    ("ending", _ending),
    ("copy", _copy),
    ("language", _language),
    ("dictionary", _dictionary),
)


def words(text: str) -> list[str]:
    """The words in lower case."""
    return _WORD.findall(text.lower())


def key(text: str) -> str:
    """What duplicates share: case, punctuation and digits masked."""
    return " ".join(re.findall(r"[^\W\d_]+|\d", re.sub(r"\d+", "0", text.lower())))


def clean(pieces: Iterable[Aligned]) -> tuple[list[Pair], Counter[str]]:
    """The clean pairs, each English and each German sentence once, and how often each rule said no."""
    kept: list[Pair] = []
    refused: Counter[str] = Counter()
    seen_en: set[str] = set()
    seen_de: set[str] = set()
    for piece in pieces:
        for pair in pairs_of(piece):
            reason = refusal(pair)
            english, german = key(pair.english), key(pair.german)
            if reason is None and (english in seen_en or german in seen_de):
                reason = "duplicate"
            if reason is not None:
                refused[reason] += 1
                continue
            seen_en.add(english)
            seen_de.add(german)
            kept.append(pair)
    return kept, refused
