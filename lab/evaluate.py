"""Loss and BLEU of a trained model on held-out pairs."""

from __future__ import annotations

import base64
import lzma
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU

from lab.batches import make_batch
from lab.clean import Pair
from lab.model import Transformer
from lab.vocabulary import END, PAD, Vocabulary

BOOTSTRAP = 1000  # resamples


@torch.inference_mode()
def held_out_loss(model: Transformer, vocabulary: Vocabulary, pairs: Sequence[Pair], smoothing: float) -> float:
    """The training loss on held-out pairs, the mean over target tokens."""
    was_training = model.training
    model.eval()
    sources = vocabulary.encode([pair.english for pair in pairs])
    targets = vocabulary.encode([pair.german for pair in pairs])
    encoded = [([*s, END], [*t, END]) for s, t in zip(sources, targets, strict=True)]
    encoded.sort(key=lambda both: len(both[1]))
    total = count = 0.0
    for start in range(0, len(encoded), 50):
        batch = make_batch(encoded[start : start + 50]).to(model.embedding.device)
        tokens = int((batch.target_out != PAD).sum())
        total += tokens * float(model.loss(batch.source, batch.target_in, batch.target_out, smoothing))
        count += tokens
    model.train(was_training)
    return total / count


def bleu(found: list[str], pairs: Sequence[Pair]) -> dict[str, Any]:
    """BLEU, and half the width of its bootstrap interval over the sentences."""
    metric, references = BLEU(), [[pair.german for pair in pairs]]
    score: Any = metric.corpus_score(found, references, n_bootstrap=BOOTSTRAP)
    return {
        "all": round(float(score.score), 2),
        "interval": round(float(score._ci), 2),
        "sentences": len(pairs),
        "signature": str(BLEU(references=references).get_signature()),
    }


def pack(translations: dict[str, list[str]]) -> dict[str, Any]:
    """Translations of the same sentences by several weights, compressed: sentence by sentence, since they are alike."""
    lines = (text.replace("\n", " ") for each in zip(*translations.values(), strict=True) for text in each)
    packed = lzma.compress("\n".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
    return {"ways": list(translations), "lines": base64.b85encode(packed).decode()}


def unpack(packed: dict[str, Any]) -> dict[str, list[str]]:
    """What `pack` was given."""
    lines = lzma.decompress(base64.b85decode(packed["lines"])).decode().split("\n")
    ways = packed["ways"]
    return {way: lines[number :: len(ways)] for number, way in enumerate(ways)}


def pack_figures(figures: Sequence[Sequence[float]]) -> str:
    """Figures in sixteenths of an octave from 2⁻⁸ to 2⁸, compressed; 0 stands for anything smaller, or none."""
    values = np.nan_to_num(np.asarray(figures, dtype=np.float64), nan=0.0)
    with np.errstate(divide="ignore"):
        codes = np.clip(np.rint(16 * np.log2(values)) + 128, 0, 255).astype(np.uint8)
    packed = lzma.compress(codes.T.tobytes(), preset=9 | lzma.PRESET_EXTREME)  # a parameter's figures are alike
    return base64.b85encode(packed).decode()


def unpack_figures(packed: str, columns: int) -> NDArray[np.float64]:
    """What `pack_figures` was given, of so many columns, to within 3 %."""
    codes = np.frombuffer(lzma.decompress(base64.b85decode(packed)), np.uint8).reshape(columns, -1).T
    return np.where(codes == 0, 0.0, 2.0 ** ((codes.astype(np.float64) - 128) / 16))
