"""A translation task made by rules: English phrases with numbers into German.

It needs no download, and is hard enough to show learning: German says units before tens ("five and twenty").
"""

from __future__ import annotations

import random

from lab.clean import Pair

_ONES_EN = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()  # noqa: E501
_ONES_DE = "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn".split()  # noqa: E501
_TENS_EN = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_TENS_DE = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
_THINGS = {
    "books": "Bücher", "houses": "Häuser", "chairs": "Stühle", "apples": "Äpfel", "letters": "Briefe",
    "children": "Kinder", "rivers": "Flüsse", "trees": "Bäume", "clocks": "Uhren", "birds": "Vögel",
}  # fmt: skip
_ADJECTIVES = {
    "old": "alte",
    "new": "neue",
    "small": "kleine",
    "big": "große",
    "red": "rote",
    "green": "grüne",
}


def english_number(n: int) -> str:
    """A number below a million in English words."""
    if n < 20:
        return _ONES_EN[n]
    if n < 100:
        return _TENS_EN[n // 10 - 2] + (f"-{_ONES_EN[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{_ONES_EN[n // 100]} hundred" + (f" and {english_number(n % 100)}" if n % 100 else "")
    return f"{english_number(n // 1000)} thousand" + (f" {english_number(n % 1000)}" if n % 1000 else "")


def german_number(n: int) -> str:
    """A number below a million in German words, with blanks between the parts."""
    if n < 20:
        return _ONES_DE[n]
    if n < 100:
        ones = "ein" if n % 10 == 1 else _ONES_DE[n % 10]
        return (f"{ones} und " if n % 10 else "") + _TENS_DE[n // 10 - 2]
    if n < 1000:
        hundreds = "ein" if n // 100 == 1 else _ONES_DE[n // 100]
        return f"{hundreds} hundert" + (f" {german_number(n % 100)}" if n % 100 else "")
    thousands = german_number(n // 1000)
    if thousands.endswith("eins"):
        thousands = thousands[:-1]
    return f"{thousands} tausend" + (f" {german_number(n % 1000)}" if n % 1000 else "")


def _count(draw: random.Random) -> tuple[str, str]:
    n = draw.randrange(2, 10 ** draw.randint(1, 4))
    thing, adjective = draw.choice(list(_THINGS)), draw.choice(list(_ADJECTIVES))
    return (
        f"There are {english_number(n)} {adjective} {thing}.",
        f"Es gibt {german_number(n)} {_ADJECTIVES[adjective]} {_THINGS[thing]}.",
    )


def _price(draw: random.Random) -> tuple[str, str]:
    euros, cents = draw.randrange(2, 1000), draw.randrange(2, 100)
    thing = draw.choice(list(_THINGS))
    return (
        f"The {thing} cost {english_number(euros)} euros and {english_number(cents)} cents.",
        f"Die {_THINGS[thing]} kosten {german_number(euros)} Euro und {german_number(cents)} Cent.",
    )


def pairs(count: int, seed: int) -> list[Pair]:
    """`count` different pairs, the same for the same seed."""
    draw = random.Random(seed)
    kinds = {"number": _count, "price": _price}
    found: dict[str, Pair] = {}
    while len(found) < count:
        kind = draw.choice(list(kinds))
        english, german = kinds[kind](draw)
        found[english] = Pair(kind, english, english, german)
    return list(found.values())
