"""`studies.capacity`: the limit holds, the search finds the largest model, the record becomes a table and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from studies.capacity.gpt import GPT, LENGTH, VOCABULARY, count, layers_of, linear
from studies.capacity.limited import Trial, trial
from studies.capacity.page import BASE, CONTENDERS, OURS, Found, Record, draw, load, markdown
from studies.capacity.search import largest, main, planned, search

LIMIT = 900 << 20


def test_a_model_that_does_not_fit_says_so_and_one_that_fits_learns() -> None:
    assert count(640) * 16 > LIMIT
    large = trial("adamw-float32", 640, LIMIT)
    assert not large.fits and large.reason.startswith("out of memory") and large.peak_bytes == 0
    pytest.importorskip("numba")
    small = trial(OURS, 32, LIMIT)
    assert small.fits and small.losses[0] > small.losses[1] > small.losses[2]
    assert count(32) * 2 < small.peak_bytes < LIMIT and len(small.seconds) == 2


def test_an_error_of_another_kind_is_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="must be a multiple of 16"):
        trial("adamw-float32", 33, LIMIT)


@pytest.mark.parametrize("start", [16, 160, 992, 1000, 1008, 4000])
@pytest.mark.parametrize("most", [16, 176, 1007, 1008, 5000])
def test_the_search_ends_at_the_largest_width_that_fits(most: int, start: int) -> None:
    asked: list[int] = []

    def fits(width: int) -> bool:
        asked.append(width)
        return width <= most

    assert largest(fits, start) == most // 16 * 16
    assert len(asked) == len(set(asked)) <= 20 and all(width % 16 == 0 for width in asked)


def test_a_good_guess_takes_few_tries() -> None:
    asked: list[int] = []
    assert largest(lambda width: not asked.append(width) and width <= 1000, 992) == 992  # type: ignore[func-returns-value]
    assert asked == [992, 1008]
    assert largest(lambda width: False, 64) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_blocks_of_a_product_make_up_the_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.capacity.gpt.BLOCK", 40)
    draw = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=draw) for shape in ((5, 8), (23, 8), (5, 23)))
    ours = [t.to(dtype).requires_grad_() for t in (x, w)]
    exact = [t.detach().float().requires_grad_() for t in ours]
    out, reference = linear(*ours), F.linear(*exact)
    out.backward(g.to(dtype))
    reference.backward(g.to(dtype).float())
    within = 1e-6 if dtype == torch.float32 else 2**-7
    for a, b in ((out, reference), (ours[0].grad, exact[0].grad), (ours[1].grad, exact[1].grad)):
        assert a is not None and b is not None and a.dtype == dtype
        assert (a.float() - b).abs().max() <= within * b.abs().max()


def test_the_model_has_the_parameters_that_are_counted_and_a_tied_embedding() -> None:
    for width in (16, 64, 304, 1600):
        model = GPT(width, torch.bfloat16, "meta")
        assert sum(p.numel() for p in model.parameters()) == count(width)
        assert len(model.layers) == layers_of(width)
    assert planned(BASE, 64) == 16 * count(64) + 4 * len(list(GPT(64, torch.float32, "meta").parameters())) + (
        2 * 4 * VOCABULARY * 64
    )


def test_weights_are_drawn_and_the_first_loss_is_that_of_a_guess() -> None:
    model = GPT(32, torch.bfloat16)
    assert model.embedding.float().std().item() == pytest.approx(0.02, abs=1e-3)
    tokens = torch.arange(LENGTH + 1)
    assert model(tokens).item() == pytest.approx(torch.tensor(VOCABULARY).log().item(), abs=0.1)


def a_record() -> Record:
    found = []
    for limit in (2**30, 2**31):
        for place, key in enumerate(CONTENDERS):
            width = 256 + 40 * place + 64 * (limit >> 30)
            best = Trial(
                key, width, layers_of(width), count(width), True, [10.9, 9.8, 9.1], [2.0, 1.5], limit - 5, 1, ""
            )
            found.append(Found(limit, best, [(width, True), (width + 16, False)]))
    step = Trial(OURS, 2976, 46, count(2976), True, [11.0, 10.5], [321.0], 11 << 30, 1, "")
    return Record({"processor": "a processor", "cores": 2}, {"torch": "2.13.0"}, found, step)


def test_a_record_is_kept_and_becomes_tables_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    record = a_record()
    record.save(tmp_path / "capacity.json")
    assert load(tmp_path / "capacity.json") == record
    main(["--render", "--record", str(tmp_path / "capacity.json"), "--picture", str(tmp_path / "capacity.png")])
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(record, tmp_path / "capacity.svg")
    picture = (tmp_path / "capacity.svg").read_text()
    assert picture.count("AdamW, float32") == 2 and ">22 M<" in picture and "train within 2.00 GiB" in picture
    text = capsys.readouterr().out
    assert text.strip() == markdown(record).strip()
    assert "| AdamW, float32 | 22 M | 1.00 | 320 × 5 | 1,024 MiB | 10.90 → 9.10 | 1.5 |" in text
    ours, base = count(320 + 40 * CONTENDERS.index(OURS)), count(320)
    assert f"{ours / base:.2f} times the parameters of AdamW in float32 (target 5.0: MISSED)" in text
    assert "the best other Adafactor (target 1.7: met)" in text
    assert f"One step of {count(2976):,} parameters" in text and "321 s, 11.0 GiB resident" in text


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"found": []}))
    with pytest.raises(ValueError, match="is not a record of studies.capacity"):
        load(tmp_path / "x.json")
    with pytest.raises(ValueError, match="there is nothing to draw"):
        draw(Record(), tmp_path / "x.png")


@pytest.mark.slow
def test_within_one_gibibyte_ours_trains_more_than_twice_the_parameters_of_adamw() -> None:
    pytest.importorskip("numba")
    found = {key: search(key, 2**30, lambda text: None) for key in (BASE, OURS)}
    for key, result in found.items():
        assert result.best.fits and result.best.losses[-1] < result.best.losses[0], key
        assert not dict(result.tried)[result.best.width + 16], key
    assert found[OURS].best.parameters > 2 * found[BASE].best.parameters
