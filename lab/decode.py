"""Batched beam search with the length penalty of the paper (beam 4, α = 0.6)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.batches import pad
from lab.model import Layer, Transformer
from lab.vocabulary import BEGIN, END, PAD, Vocabulary


def penalty(length: int, alpha: float) -> float:
    """The length penalty ((5 + length) / 6)^α that a hypothesis's log-probability is divided by."""
    return float(((5 + length) / 6) ** alpha)


@dataclass
class LayerCache:
    """What one decoder layer remembers between steps."""

    memory: tuple[Tensor, Tensor]  # keys, values of the source, each (B, heads, S, d/heads)
    past: tuple[Tensor, Tensor] | None = None  # of the target so far, each (B·K, heads, t, d/heads)


class Stepper:
    """The decoder one token at a time, for K hypotheses of each of B sentences."""

    def __init__(self, model: Transformer, source: Tensor, beam: int) -> None:
        """Encode the sources (B, S) once."""
        memory, self.mask = model.encode(source)
        self.model, self.beam, self.length = model, beam, 0
        self.caches = [LayerCache(layer.other.read(memory)) for layer in model.layers("decoder")]

    def step(self, tokens: Tensor) -> Tensor:
        """(B·K,) last tokens → (B·K, vocabulary) log-probabilities of the next."""
        x = self.model.embed(tokens[:, None], start=self.length)  # (B·K, 1, d)
        for layer, cache in zip(self.model.layers("decoder"), self.caches, strict=True):
            x = layer(x, partial(self._own, layer, cache), partial(self._other, layer, cache))
        self.length += 1
        return F.log_softmax(self.model.logits(self.model.decoder_norm(x[:, 0])), dim=-1)

    def keep(self, rows: Tensor, sentences: Tensor) -> None:
        """Go on with hypotheses `rows` (of B·K), which belong to `sentences` (of B)."""
        self.mask = self.mask[sentences]
        for cache in self.caches:
            cache.memory = (cache.memory[0][sentences], cache.memory[1][sentences])
            if cache.past is not None:
                cache.past = (cache.past[0][rows], cache.past[1][rows])

    def _own(self, layer: Layer, cache: LayerCache, x: Tensor) -> Tensor:
        x, cache.past = layer.attention.extend(x, cache.past)
        return x

    def _other(self, layer: Layer, cache: LayerCache, x: Tensor) -> Tensor:
        # The hypotheses of a sentence are so many queries to one source, which need not be copied.
        grouped = x.view(-1, self.beam, x.shape[-1])  # (B, K, d)
        seen: Tensor = layer.other(grouped, cache.memory, self.mask)
        return seen.view_as(x)


@torch.inference_mode()
def beam_search(
    model: Transformer, source: Tensor, beam: int = 4, alpha: float = 0.6, longest: int | None = None
) -> list[list[int]]:
    """Translate sources (B, S) into the ids of the best finished hypothesis each, without marks.

    A sentence is done when no open hypothesis can still beat its best finished one: log-probabilities only
    fall, so an open one can reach at most its present score under the largest penalty. `longest` bounds the
    translation's tokens, end mark included; the default is 1.5 times the source's and 10 more. A sentence
    that never ends within it gets its best open hypothesis.
    """
    batch, device = source.shape[0], source.device
    limit = longest or int(1.5 * source.shape[1]) + 10
    limits = torch.full((batch,), limit) if longest else ((source != PAD).sum(1).cpu() * 3 // 2 + 10)
    stepper = Stepper(model, source, beam)
    sentences = torch.arange(batch)  # those still searched, as numbers in the batch
    tokens = torch.full((batch * beam,), BEGIN, device=device)
    history = torch.zeros(batch, beam, 0, dtype=torch.long, device=device)
    # At first all hypotheses are the same: only the first counts.
    scores = torch.full((batch, beam), -torch.inf, device=device)
    scores[:, 0] = 0.0
    best: list[tuple[float, list[int]]] = [(-torch.inf, [])] * batch

    for length in range(1, limit + 1):
        logs = stepper.step(tokens)
        logs[:, [PAD, BEGIN]] = -torch.inf
        totals = (scores[:, :, None] + logs.view(len(sentences), beam, -1)).flatten(1)  # (B, K·V)
        # Of 2K candidates at most K end, so K can go on. An end outside of them is no translation worth
        # having: a weak model would otherwise find the empty sentence the most probable of all.
        values, flat = totals.topk(2 * beam)  # (B, 2K)
        parents, chosen = flat // logs.shape[-1], flat % logs.shape[-1]
        ends = chosen == END
        _finish(best, sentences, history, parents, values.masked_fill(~ends, -torch.inf) / penalty(length, alpha))
        scores, going_on = values.masked_fill(ends, -torch.inf).topk(beam)  # (B, K)
        parents, chosen = parents.gather(1, going_on), chosen.gather(1, going_on)
        history = torch.cat([history.gather(1, parents[:, :, None].expand_as(history)), chosen[:, :, None]], 2)

        reachable = scores[:, 0].double().cpu() / torch.tensor([penalty(int(n), alpha) for n in limits[sentences]])
        open_ = torch.tensor([
            bool(reachable[i] > best[int(s)][0]) and length < int(limits[s]) for i, s in enumerate(sentences)
        ])  # fmt: skip
        for i in (~open_).nonzero()[:, 0].tolist():
            if best[int(sentences[i])][0] == -torch.inf:
                best[int(sentences[i])] = (float(scores[i, 0]), history[i, 0].tolist())
        if not open_.any():
            break
        rows = (torch.arange(len(sentences), device=device)[:, None] * beam + parents)[open_.to(device)].flatten()
        stay = open_.nonzero()[:, 0].to(device)
        stepper.keep(rows, stay)
        sentences = sentences[open_]
        scores, history, tokens = scores[stay], history[stay], chosen[stay].flatten()
    return [ids for _, ids in best]


def _finish(
    best: list[tuple[float, list[int]]], sentences: Tensor, history: Tensor, parents: Tensor, ended: Tensor
) -> None:
    """Note for each sentence the best hypothesis that ends here, if it beats those that ended before."""
    values, which = ended.max(dim=1)
    rows = parents.gather(1, which[:, None])[:, 0]
    for i, (value, k) in enumerate(zip(values.tolist(), rows.tolist(), strict=True)):
        sentence = int(sentences[i])
        if value > best[sentence][0]:
            best[sentence] = (value, history[i, k].tolist())


def translate(
    model: Transformer, vocabulary: Vocabulary, texts: list[str], beam: int = 4, batch: int = 100
) -> list[str]:
    """Translate sentences, those of like length together."""
    was_training = model.training
    model.eval()
    device = model.embedding.device
    encoded = [[*ids, END] for ids in vocabulary.encode(texts)]
    order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
    results = [""] * len(texts)
    for start in range(0, len(order), batch):
        chunk = order[start : start + batch]
        found = beam_search(model, pad([encoded[i] for i in chunk]).to(device), beam=beam)
        for i, ids in zip(chunk, found, strict=True):
            results[i] = vocabulary.decode(ids)
    model.train(was_training)
    return results
