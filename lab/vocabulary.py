"""One subword vocabulary shared by both languages, trained once by sentencepiece and cached."""

from __future__ import annotations

import io
from pathlib import Path

import sentencepiece

from lab.corpus import Corpus
from lab.files import locked, write_atomically

PAD, UNKNOWN, BEGIN, END = 0, 1, 2, 3
SAMPLED = 4_000_000  # of a larger corpus the vocabulary is trained on so many sentences


class Vocabulary:
    """Text to subword ids and back."""

    def __init__(self, model: bytes) -> None:
        """Wrap a trained sentencepiece model."""
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def __len__(self) -> int:
        """How many subwords there are."""
        return int(self._processor.get_piece_size())

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Subword ids of each text, without begin and end marks."""
        return [list(ids) for ids in self._processor.encode(texts)]

    def decode(self, ids: list[int]) -> str:
        """The text of subword ids; marks are left out."""
        return str(self._processor.decode([i for i in ids if i not in (PAD, BEGIN, END)]))


def train(corpus: Corpus, size: int, cache: Path) -> Vocabulary:
    """The vocabulary of `size` byte-pair subwords for a corpus, from the cache or trained now."""
    path = cache / "vocabulary" / f"{corpus.name}-{corpus.fingerprint()}-{size}.model"
    with locked(path.with_suffix(".lock")):
        if not path.exists():
            model = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(side for p in corpus.train for side in (p.english, p.german)),
                model_writer=model,
                model_type="bpe",
                vocab_size=size,
                character_coverage=1.0 if corpus.name == "generated" else 0.9999,
                pad_id=PAD, unk_id=UNKNOWN, bos_id=BEGIN, eos_id=END,
                num_threads=1,
                input_sentence_size=SAMPLED if 2 * len(corpus.train) > SAMPLED else 0,
                shuffle_input_sentence=2 * len(corpus.train) > SAMPLED,
                minloglevel=2,
            )  # fmt: skip
            write_atomically(path, lambda stream: stream.write(model.getvalue()))
    return Vocabulary(path.read_bytes())
