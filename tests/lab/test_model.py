"""The Transformer, its loss, and beam search."""

import inspect
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lab.batches import Batches, make_batch
from lab.corpus import generated_corpus
from lab.decode import beam_search, penalty, translate
from lab.experiments import table_3
from lab.loss import smoothed_cross_entropy
from lab.model import SelfAttention, Shape, Transformer
from lab.presets import SCALES
from lab.rows import schedule_2017
from lab.vocabulary import BEGIN, END, PAD, Vocabulary, train

SHAPE = Shape(layers=2, width=16, heads=2, filter=32, dropout=0.0)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return train(generated_corpus(), 400, tmp_path_factory.mktemp("cache"))


def _model(shape: Shape = SHAPE, size: int = 11, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(shape, size).eval()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_position_does_not_see_later_targets_but_all_of_the_source(norm: str) -> None:
    model = _model(replace(SHAPE, norm=norm))
    source, target = torch.tensor([[4, 5, 6, END]]), torch.tensor([[BEGIN, 5, 6, 7]])
    before = model(source, target)
    target[0, 2] = 9
    after = model(source, target)
    torch.testing.assert_close(before[:, :2], after[:, :2])
    assert not torch.allclose(before[:, 2:], after[:, 2:])
    source[0, 2] = 9
    assert not torch.allclose(model(source, target)[:, 0], after[:, 0])


def test_padding_changes_nothing() -> None:
    model = _model()
    pairs = [([4, 5, END], [6, 7, 8, END]), ([4, 5, 6, 7, 8, END], [9, END])]
    together = make_batch(pairs)
    padded = model(together.source, together.target_in)
    for row, pair in enumerate(pairs):
        alone = make_batch([pair])
        torch.testing.assert_close(padded[row, : len(pair[1])], model(alone.source, alone.target_in)[0])


@pytest.mark.parametrize(
    ("scheme", "spread", "size"), [("scaled", 0.25, 1.0), ("unit", 1.0, 1.0), ("plain", 0.25, 0.25)]
)
def test_embedding_schemes_of_table_3(scheme: str, spread: float, size: float) -> None:
    model = _model(replace(SHAPE, embedding=scheme), size=5000)
    assert model.embedding.std().item() == pytest.approx(spread, rel=0.02)
    assert (model.embedding * model.multiplier).std().item() == pytest.approx(size, rel=0.02)


def test_the_loss_is_label_smoothed_cross_entropy() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.double, requires_grad=True)
    weight = torch.randn(9, 5, dtype=torch.double, requires_grad=True)
    target = torch.randint(0, 9, (7,))
    logs = F.log_softmax(x @ weight.T, dim=1)
    formula = -(0.9 * logs[torch.arange(7), target] + 0.1 * logs.mean(1)).mean()
    torch.testing.assert_close(smoothed_cross_entropy(x, weight, target, 0.1), formula)
    assert torch.autograd.gradcheck(lambda x, w: smoothed_cross_entropy(x, w, target, 0.1), (x, weight))


@torch.inference_mode()
def _log_probability(model: Transformer, source: torch.Tensor, ids: tuple[int, ...]) -> float:
    logs = F.log_softmax(model.logits(model(source, torch.tensor([[BEGIN, *ids]]))), dim=-1)[0]
    return sum(float(logs[i, token]) for i, token in enumerate((*ids, END)))


@pytest.mark.parametrize(("seed", "norm"), [(0, "pre"), (1, "post")])
def test_a_wide_beam_is_exhaustive_search(seed: int, norm: str) -> None:
    size, longest, alpha = 7, 4, 0.6
    model = _model(replace(SHAPE, norm=norm), size, seed)
    source = torch.tensor([[4, 5, END, PAD], [6, 4, 5, END], [1, END, PAD, PAD]])
    letters = [i for i in range(size) if i not in (PAD, BEGIN, END)]
    widest = len(letters) ** (longest - 1) * (len(letters) + 1)  # candidates of the last step, ends included
    found = beam_search(model, source, beam=widest // 2, alpha=alpha, longest=longest)
    for row in range(3):
        one = source[row : row + 1, : int((source[row] != PAD).sum())]
        every = [ids for n in range(longest) for ids in itertools.product(letters, repeat=n)]
        scores = {ids: _log_probability(model, one, ids) / penalty(len(ids) + 1, alpha) for ids in every}
        assert tuple(found[row]) == max(scores, key=lambda ids: scores[ids])


def test_the_length_penalty_is_the_papers() -> None:
    assert penalty(1, 0.6) == 1.0
    assert penalty(7, 0.6) == pytest.approx(2**0.6)
    assert penalty(7, 0.0) == 1.0


def test_batches_hold_every_pair_once_an_epoch_within_their_bound(words: Vocabulary) -> None:
    pairs = generated_corpus().train[:300]
    stream = Batches(pairs, words, tokens=200).stream(seed=1)
    seen, rows = 0, set()
    while seen < len(pairs):
        batch = next(stream)
        assert batch.source.numel() <= 200
        assert batch.target_out.numel() <= 200
        seen += len(batch.source)
        rows |= {tuple(row) for row in batch.source.tolist()}
    assert seen == len(pairs)
    assert len(rows) == len(pairs)


def test_a_stream_continued_is_the_stream(words: Vocabulary) -> None:
    batches = Batches(generated_corpus().train[:200], words, tokens=300)
    whole = list(itertools.islice(batches.stream(seed=2), 60))
    late = list(itertools.islice(batches.stream(seed=2, start=40), 20))
    assert all(torch.equal(a.source, b.source) for a, b in zip(whole[40:], late, strict=True))


def test_inner_dropout_acts_on_attention_and_relu_in_training_alone() -> None:
    layer = Transformer(replace(SHAPE, inner_dropout=0.5), 50).layers("decoder")[0]
    for module in (layer.attention, layer.other, layer.feed_forward):
        x, mask = torch.randn(2, 7, SHAPE.width), torch.ones(2, 1, 1, 7, dtype=torch.bool)
        inputs: tuple[Any, ...] = (x, None) if isinstance(module, SelfAttention) else (x,)
        inputs = (x, layer.other.read(x), mask) if module is layer.other else inputs
        assert not torch.equal(module(*inputs), module(*inputs))
        module.eval()
        assert torch.equal(module(*inputs), module(*inputs))


def test_base_is_the_papers_setting() -> None:
    base, shape = SCALES["base"], SCALES["base"].shape
    assert (shape.layers, shape.width, shape.heads, shape.filter) == (6, 512, 8, 2048)
    assert (base.vocabulary, base.tokens, base.steps, base.dev) == (32_000, 4096, 100_000, 3000)
    assert (base.adaptive, base.relative, shape.dropout, shape.inner_dropout) == (1.0, 1.0, 0.1, 0.1)
    assert base.branch == base.steps // 10, "so that the mean and the decayed weights are evaluated, too"
    assert inspect.signature(translate).parameters["beam"].default == 4
    assert inspect.signature(beam_search).parameters["alpha"].default == 0.6
    jobs = table_3(SCALES["base3"])
    assert {job.row for job in jobs} == {"Adam2017", "O"}
    assert (jobs[0].scale.tokens, jobs[0].scale.steps, jobs[0].scale.compressed) == (16_384, 50_000, False)
    assert schedule_2017(4000, 512) == pytest.approx(512**-0.5 * 4000**-0.5)  # its peak
    assert schedule_2017(40_000, 512) == pytest.approx(512**-0.5 / 200)
