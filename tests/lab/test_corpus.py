"""The corpus: cleaning rules, splitting, the generated task."""

import io
import itertools
import random
import tarfile
from pathlib import Path

import pytest

from lab import corpus, files, generated, wmt
from lab.clean import Pair, clean, key, refusal
from lab.sources import Aligned, read_descriptions
from lab.split import leaks, split

GOOD = ("Select the cells that you want to print.", "Wählen Sie die Zellen aus, die Sie drucken möchten.")


@pytest.mark.parametrize(
    ("english", "german", "reason"),
    [
        (*GOOD, None),
        ("Too short.", "Zu kurz.", "length"),
        ("Open the file now.", "Öffnen Sie " + "jetzt gleich " * 12 + "die Datei.", "length"),
        ("Press <b>Enter</b> to continue now.", "Drücken Sie die <b>Eingabetaste</b>.", "markup"),
        ("The word слово is not Latin here.", "Das Wort слово ist hier nicht lateinisch.", "letters"),
        ("The list has 12 entries in it.", "Die Liste enthält 13 verschiedene Einträge.", "digits"),
        ("Do you want to save it?", "Sie wollen das jetzt speichern.", "ending"),
        ("Adobe Photoshop Express Reader Tool", "Adobe Photoshop Express Reader Werkzeug", "copy"),
        ("Das ist nicht der Anfang von dem Satz.", "Wählen Sie die Zellen für den Druck aus.", "language"),
    ],
)
def test_each_rule_refuses_what_it_is_for(english: str, german: str, reason: str | None) -> None:
    assert refusal(Pair("lo", "page", english, german)) == reason


def test_duplicates_on_either_side_are_dropped() -> None:
    again = ("Select the CELLS that you want to print!", "Ein ganz anderer Satz steht hier auf Deutsch!")
    kept, refused = clean([Aligned("lo", "a", *GOOD), Aligned("lo", "b", *again)])
    assert len(kept) == 1
    assert refused["duplicate"] == 1
    assert key("Page 12, now!") == key("page 7 now")


def test_pairs_do_not_depend_on_which_archive_lists_a_package_first(tmp_path: Path) -> None:
    def entry(package: str, number: int, language: str) -> str:
        text = {"en": f"The package {package} prints pages.", "de": f"Das Paket {package} druckt die Seiten."}[language]
        return f"Package: {package}\nDescription-md5: {number}\nDescription-{language}: headline\n {text}\n\n"

    packages = ["anna", "bert", "carl", "dora"]
    english = [entry(package, number, "en") for number, package in enumerate(packages)]
    shared = entry("anna", 9, "en").replace("anna prints", "dora prints")  # of these duplicates the first is kept
    (tmp_path / "de").write_text("".join(entry(package, i, "de") for i, package in enumerate(packages))
                                 + entry("emil", 9, "de").replace("emil druckt", "anna druckt"))  # fmt: skip
    found = []
    for lists in ([*english, shared], [shared, english[3], *english], [english[2], *english, shared]):
        (tmp_path / "en").write_text("".join(lists))
        found.append(clean(read_descriptions(tmp_path / "en", tmp_path / "de"))[0])
    assert [pair.document for pair in found[0]] == packages
    assert found[0] == found[1] == found[2]


def _documents() -> list[Pair]:
    """Documents of five sentences of random words; every tenth sentence also stands in the next document."""
    draw = random.Random(0)
    words = ["".join(letters) for letters in itertools.product("abcdefg", repeat=3)]
    pairs: list[Pair] = []
    for i in range(3000):
        english, german = (" ".join(draw.choices(words, k=8)) + "." for _ in range(2))
        if i % 10 == 9:
            english, german = pairs[i - 5].english, pairs[i - 5].german
        pairs.append(Pair("lo", f"document {i // 5}", english, german))
    return pairs


def test_no_document_is_in_two_parts_and_no_held_out_sentence_leaks() -> None:
    parts = split(_documents(), {"dev": 1000, "test": 2000})
    names = {part: {pair.document for pair in pairs} for part, pairs in parts.items()}
    assert all(parts.values())
    assert not names["train"] & (names["dev"] | names["test"])
    assert not names["dev"] & names["test"]
    for part in ("dev", "test"):
        assert not leaks([p.english for p in parts[part]], [p.english for p in parts["train"]])
        assert not leaks([p.german for p in parts[part]], [p.german for p in parts["train"]])


def test_a_sentence_leaks_when_half_its_four_grams_are_in_one_training_sentence() -> None:
    held = ["a b c d e f g", "p q r s t u v"]
    assert leaks(held, ["x a b c d e y"]) == {0}  # two of four
    assert leaks(held, ["x a b c d y", "y b c d e x"]) == set()  # one in each
    assert leaks(held, ["P, q r s t u!"]) == {1}


def test_the_generated_task_is_right_and_repeatable() -> None:
    assert generated.english_number(421) == "four hundred and twenty-one"
    assert generated.german_number(421) == "vier hundert ein und zwanzig"
    assert generated.german_number(1001) == "ein tausend eins"
    assert generated.pairs(50, seed=1) == generated.pairs(50, seed=1)
    loaded = corpus.generated_corpus()
    assert not {p.english for p in loaded.train} & {p.english for p in [*loaded.dev, *loaded.test]}


def archives(folder: Path) -> dict[str, str]:
    """WMT 2014's archives in small, with the marks inside of lines that its files have, and their SHA-256."""
    folder.mkdir()
    texts = {
        "en": "one\rmore\ntwo\u2028more\n\nfour\n",
        "de": "eins\nzwei\x85mehr\ndrei\nvier\n",
    }
    for name in wmt.ARCHIVES:
        with tarfile.open(folder / name, "w:gz") as archive:
            for members in wmt.MEMBERS.values():
                for _, *sides in (member for member in members if member[0] == name):
                    for member, text in zip(sides, texts.values(), strict=True):
                        if member.endswith(".sgm"):
                            text = "".join(f'<seg id="1">{t} &amp; co</seg>\n' for t in text.split("\n")[:-1])
                        info = tarfile.TarInfo(member)
                        info.size = len(text.encode())
                        archive.addfile(info, io.BytesIO(text.encode()))
    return {name: files.digest([folder / name]) for name in wmt.ARCHIVES}


def test_wmt_archives_become_pairs_that_stay_aligned(tmp_path: Path) -> None:
    known = archives(tmp_path / "wmt")
    paths = wmt.unpack(tmp_path / "wmt", tmp_path, known)
    loaded = corpus.load("own", tmp_path, corpus.OwnFiles(paths, "wmt14"))
    assert loaded.name == "wmt14"
    pairs = [(pair.english, pair.german) for pair in loaded.train]
    assert pairs == 3 * [("one more", "eins"), ("two more", "zwei mehr"), ("four", "vier")]
    assert [pair.english for pair in loaded.test] == ["one more & co", "two more & co", "& co", "four & co"]
    (tmp_path / "wmt" / "dev.tgz").unlink()
    assert wmt.unpack(tmp_path / "wmt", tmp_path, known) == paths  # once unpacked, the archives are not needed


def test_another_archive_is_refused(tmp_path: Path) -> None:
    known = archives(tmp_path / "wmt")
    with pytest.raises(corpus.CorpusError, match="dev.tgz is not the archive of WMT 2014"):
        wmt.unpack(tmp_path / "wmt", tmp_path, {**known, "dev.tgz": "0" * 64})


def test_own_files_are_split_at_line_feeds_alone_and_are_a_sequence(tmp_path: Path) -> None:
    english, german = tmp_path / "en", tmp_path / "de"
    english.write_bytes("one\rmore\ntwo\u2028more\x85more\r\n\nfour\n".encode())
    german.write_bytes(b"eins\nzwei\n\nvier")
    loaded = corpus.load("own", tmp_path, corpus.OwnFiles({"train": (english, german), "dev": (english, german)}))
    assert [pair.english for pair in loaded.train] == ["one\rmore", "two\u2028more\x85more", "four"]
    assert [pair.german for pair in loaded.train[:2]] == ["eins", "zwei"] and loaded.train[-1].german == "vier"
    german.write_text("")
    with pytest.raises(corpus.CorpusError, match="en has 4 lines, de 0"):
        corpus.FilePairs(english, german)
