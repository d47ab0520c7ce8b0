"""Loss and BLEU of a trained model on held-out pairs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from sacrebleu.metrics.bleu import BLEU

from lab.batches import make_batch
from lab.clean import Pair
from lab.decode import translate
from lab.model import Transformer
from lab.vocabulary import END, PAD, Vocabulary


@torch.inference_mode()
def held_out_loss(model: Transformer, vocabulary: Vocabulary, pairs: list[Pair], smoothing: float) -> float:
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


def bleu(model: Transformer, vocabulary: Vocabulary, pairs: list[Pair], samples: int = 0) -> dict[str, Any]:
    """BLEU with beam 4 in all and per domain, its signature, and a few sample translations."""
    found = translate(model, vocabulary, [pair.english for pair in pairs])
    by_domain: dict[str, list[int]] = defaultdict(list)
    for index, pair in enumerate(pairs):
        by_domain[pair.domain].append(index)
    metric = BLEU()

    def score(indices: list[int]) -> float:
        references = [[pairs[i].german for i in indices]]
        return round(float(metric.corpus_score([found[i] for i in indices], references).score), 2)

    return {
        "all": score(list(range(len(pairs)))),
        "domains": {domain: score(indices) for domain, indices in sorted(by_domain.items())},
        "sentences": len(pairs),
        "signature": str(metric.get_signature()),
        "samples": [
            {"source": pairs[i].english, "reference": pairs[i].german, "translation": found[i]} for i in range(samples)
        ],
    }
