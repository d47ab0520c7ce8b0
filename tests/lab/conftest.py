"""What the lab's tests share."""

from pathlib import Path

import pytest

from lab.corpus import Corpus, generated_corpus


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return generated_corpus()


@pytest.fixture
def files(corpus: Corpus, tmp_path: Path) -> list[str]:
    """The options of a corpus of one's own, whose files have the text of the test's corpus."""
    words = []
    for part in ("train", "dev"):
        for side, texts in (("source", [p.english for p in corpus.part(part)]),
                            ("target", [p.german for p in corpus.part(part)])):  # fmt: skip
            path = tmp_path / f"{part}.{side}"
            path.write_text("\n".join(texts) + "\n", encoding="utf-8")
            words += [f"--{part}-{side}", str(path)]
    return words
