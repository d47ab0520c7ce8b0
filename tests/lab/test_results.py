"""Intervals, verdicts, the range of good step sizes, significance."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from lab import claims, compare, pictures, report, tables
from lab.clean import Pair
from lab.evaluate import pack
from lab.experiments import BEST, CLAIMED, COMPARED, UNTUNED, placed
from lab.presets import SCALES, Job
from lab.records import RECORDS, read
from lab.results import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Difference,
    Record,
    Spread,
    best_multiplier,
    difference,
    good_range,
    learners,
    learns_up_to,
    noise,
    rank_correlation,
    select,
    setting,
    spread,
    sweep_curve,
)


def _record(job: Job, loss: float, bleu: float = 5.0, **ways: float) -> Record:
    return {
        "name": job.name, "config": job.config(), "diverged": False, "steps": 10, "initial_loss": 8.0,
        "dev_loss": loss, "bleu": {"test": {"all": bleu}}, "curve": [[5, loss + 1], [10, loss]], "state_bytes": 10,
        "ways": {way: {"dev_loss": value, "bleu": {"test": {"all": bleu}}} for way, value in ways.items()},
        "train_seconds": 60.0, "evaluate_seconds": 0.0, "parameter_bytes": 100, "rms_update": {"values": []},
        "corpus": {"name": "debian", "fingerprint": "of one"},
    }  # fmt: skip


def test_what_a_seed_does_to_all_rows_is_no_noise() -> None:
    shifts = {0: 0.0, 1: 0.3, 2: -0.1}
    values = {(row, seed): level + shift for row, level in (("A", 4.0), ("B", 5.0), ("C", 4.5))
              for seed, shift in shifts.items()}  # fmt: skip
    found = spread(values)
    assert found.freedom == 4
    assert found.deviation == pytest.approx(0.0, abs=1e-9)


def test_the_deviation_of_two_seeds_is_that_of_their_differences() -> None:
    steps = {"A": 0.10, "B": -0.10, "C": 0.04, "D": -0.04}  # from seed 0 to seed 1; their mean is zero
    values = {(row, seed): 4.0 + seed * step for row, step in steps.items() for seed in (0, 1)}
    found = spread(dict([*values.items(), (("alone", 0), 9.0)]))
    assert found.freedom == 3
    assert found.deviation == pytest.approx(math.sqrt(sum(s**2 for s in steps.values()) / 3 / 2))


def test_a_row_that_does_not_learn_does_not_blur_the_others() -> None:
    """Its own differences are judged by the noise of all, itself included."""
    losses = {"A": (4.5, 4.52), "B": (4.5, 4.48), "C": (4.51, 4.5), "D": (4.6, 4.6), "E": (5.2, 5.6)}
    records = [_record(Job(row, SCALES["mini"], True, seed), loss) for row, both in losses.items()
               for seed, loss in enumerate(both)]  # fmt: skip
    assert learners(records) == {setting(r) for r in records if r["config"]["row"]["name"] != "E"}
    of_e = [r for r in records if r["config"]["row"]["name"] in "AE"]
    quiet, loud = noise(records, ("mini",)), noise(records, ("mini",), of=of_e)
    assert (quiet.freedom, loud.freedom) == (3, 4)
    assert loud.deviation > 5 * quiet.deviation
    runs = claims.Runs(records)
    assert runs.minus("A", "B").half == quiet.half(2, settings=2)
    assert runs.minus("A", "E").half == loud.half(2, settings=2)


def test_claims_without_warm_up_are_decided_at_pattern_by_the_two_rows_alone() -> None:
    losses = {"H": (4.41, 4.43, 4.42), "A": (6.03, 6.01, 6.19), "D": (4.6, 6.0, 5.1)}
    records = [_record(Job(row, SCALES["pattern"], False, seed), loss) for row, some in losses.items()
               for seed, loss in enumerate(some)]  # fmt: skip
    records += [_record(Job(row, SCALES["mini"], False, 0), 4.5) for row in "HA"]
    text, verdict = claims.better("H-", "A-")(claims.Runs(records))
    assert verdict == HOLDS
    assert text.splitlines()[0] == "H without warm-up − A without warm-up at `pattern`: −1.66 ± 0.25 (3 seeds)"
    assert text.splitlines()[1] == "at `mini`: +0.00 (1 seed)", "shown, and decides nothing"
    without = [record for record in records if record["config"]["row"]["name"] != "D"]
    assert claims.better("H-", "A-")(claims.Runs(without)) == (text, verdict)
    broken = [{**record, "diverged": True} if record["config"]["row"]["name"] == "A" else record for record in records]
    assert "−3.58 ± 0.02" in claims.better("H-", "A-")(claims.Runs(broken))[0], "as a fresh model, whose loss is 8"


def test_the_rows_that_get_more_seeds_are_those_that_claims_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    deciding, minus = {"O-"}, claims.Runs.minus  # O without warm-up stands beside the headline

    def noted(self: claims.Runs, first: str, second: str, scale: str = "mini") -> Difference:
        if scale == "mini" and "-" not in first + second:
            deciding.update({first, second})
        return minus(self, first, second, scale)

    monkeypatch.setattr(claims.Runs, "minus", noted)
    record = _record(Job("A", SCALES["mini"], True, 0), 4.5)
    claims.table([{**record, "rms_update": {"values": [[5, 1.0]]}}])
    more_seeds = {row if warm else f"{row}-" for warm, rows in CLAIMED.items() for row in rows}
    assert {name for name in deciding if name[0] != "Q"} == more_seeds


def test_the_rank_correlation_is_spearmans_with_fishers_interval() -> None:
    found = rank_correlation([1.0, 2.0, 2.0, 4.0, 5.0], [10.0, 30.0, 20.0, 40.0, 50.0])
    # by hand: ranks 1, 2.5, 2.5, 4, 5 and 1, 3, 2, 4, 5
    assert found.value == pytest.approx(9.5 / math.sqrt(9.5 * 10.0))
    assert found.low < found.value < found.high < 1
    assert math.atanh(found.high) - math.atanh(found.value) == pytest.approx(1.96 * math.sqrt(1.06 / 2))
    assert rank_correlation([1.0, 2.0], [2.0, 1.0]).low == -1.0


def _pattern(seeds: int = 3) -> list[Record]:
    """Rows A to P as the paper has them, but B, which fails without warm-up."""
    records = []
    for row in tables.PATTERN_ROWS:
        for warm in (True, False):
            fails = (row.warm if warm else row.cold) < 1 or (row.name == "B" and not warm)
            loss = 6.1 if fails else 5.0 - (row.warm if warm else row.cold) / 100
            jobs = [Job(row.name, SCALES["pattern"], warm, seed) for seed in range(seeds)]
            records += [_record(job, loss + 0.01 * job.seed) for job in jobs]
    return records


def test_the_answer_says_which_rows_do_not_do_as_in_the_paper() -> None:
    text = claims.answer(_pattern())
    assert "of its 8 rows that fail 8 fail here, and of its 8 that learn 7 learn (not B)." in text
    assert "No run is longer than 2,000 steps" in text and "**not decided at this scale**" in text
    assert len(re.findall(r"\.(?:\s|$)", text)) == 5, "sentences"
    assert "rank correlation" not in claims.answer(_pattern()[:40]), "as long as rows are missing"
    table = tables.table_2(_pattern())
    assert table is not None and len(table.rows) == 16
    assert table.rows[0] == ["A", "β₂ = 0.999", "25.6", "0.1", "4.74 4.75 4.76", "6.10 6.11 6.12", "–", "–"]
    assert "Fisher" in table.note
    sgd = [_record(Job("Q200", SCALES["mini"], warm, 0), 4.0) for warm in (True, False)]
    beside = tables.table_2([*_pattern(), _record(Job("A", SCALES["mini"], True, 0), 4.0), *sgd])
    assert beside is not None and [row[6:] for row in beside.rows[:2]] == [["4.00", "–"], ["–", "–"]]
    assert beside.rows[-1] == ["Q200", "SGD, lr = 200·s", "24.3", "diverged", "–", "–", "4.00", "4.00"]


def test_the_pictures_are_drawn_from_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "PATTERN", tmp_path / "pattern.png")
    monkeypatch.setattr(pictures, "OVER_THE_RUN", tmp_path / "run.png")
    assert pictures.draw(_pattern()[:40]) == []
    assert pictures.draw([*_pattern(), *_long(0.1)]) == [tmp_path / "pattern.png", tmp_path / "run.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_too_few_seeds_give_no_interval() -> None:
    assert spread({("A", 0): 1.0, ("B", 0): 2.0}).half(1) == math.inf
    assert Spread(0.1, 1).half(2) == math.inf
    assert Spread(0.1, 4).half(2, settings=2) == pytest.approx(2.78 * 0.1)


@pytest.mark.parametrize(
    ("mean", "half", "as_good", "better"),
    [
        (-0.20, 0.05, HOLDS, HOLDS),
        (0.00, 0.04, HOLDS, FAILS),  # surely not 0.05 better
        (0.00, 0.10, UNDECIDED, UNDECIDED),
        (0.03, 0.01, HOLDS, FAILS),
        (0.20, 0.05, FAILS, FAILS),
        (0.08, 0.05, UNDECIDED, FAILS),
        (-0.04, math.inf, UNDECIDED, UNDECIDED),
        (math.nan, math.inf, UNDECIDED, UNDECIDED),
    ],
)
def test_the_interval_decides(mean: float, half: float, as_good: str, better: str) -> None:
    found = Difference(mean, half, 2)
    assert (found.as_good(0.05), found.better(0.05)) == (as_good, better)


def test_a_difference_is_taken_seed_by_seed_and_bleu_is_turned_round() -> None:
    mini = SCALES["mini"]
    first = [_record(Job("O", mini, False, seed), 4.0 + seed, 3.0) for seed in (0, 1)]
    second = [_record(Job("B", mini, True, seed), 4.5 + seed, 5.0) for seed in (1, 2)]
    found = difference(first, second, Spread(0.1, 10))
    assert found.mean == pytest.approx(-0.5)
    assert found.seeds == 1
    assert difference(first, second, Spread(0.1, 10), bleu=True).mean == pytest.approx(2.0)  # worse


def test_the_range_of_good_step_sizes_is_found_between_the_points_and_ignores_failures() -> None:
    curve = [(0.1, 5.2), (1.0, 5.0), (10.0, 5.4)]
    low, high = good_range(curve)
    assert low == pytest.approx(10**-0.5)
    assert high == pytest.approx(10**0.25)
    assert good_range([*curve, (100.0, 50.0)]) == (low, high)
    assert good_range([(1.0, 5.0), (3.0, 5.05)]) == (1.0, 3.0)


def test_learning_ends_where_the_curve_crosses_the_limit() -> None:
    assert learns_up_to([(1.0, 5.0), (10.0, 6.0)], limit=5.5) == pytest.approx(10**0.5)
    assert learns_up_to([(1.0, 5.0), (10.0, 5.1)], limit=5.5) == 10.0
    assert math.isnan(learns_up_to([(1.0, 6.0)], limit=5.5))


def _comparison(gap: float) -> list[Record]:
    """The compared rows at `small`, three seeds, with a little noise; O is worse by `gap`."""
    noise = {("B", 0): 0.01, ("O", 1): -0.01, ("P", 2): 0.01}
    return [
        _record(Job(*placed(name, SCALES["small"]), seed, BEST["small"][name]), loss := 3.6 + gap * (name == "O")
                + noise.get((name, seed), 0.0), 15.0 - 10 * gap * (name == "O"), mean=loss, decayed=loss)
        for name in BEST["small"] for seed in range(3)
    ]  # fmt: skip


def _long(gap: float, seeds: int = 4) -> list[Record]:
    """O and B at `long` with nothing tuned; O is worse by `gap`, a little more or less from seed to seed."""
    return [
        _record(Job(*placed(name, SCALES["long"]), seed, UNTUNED[name]), 9.0, decayed=3.3 + seed / 10
                + (gap + 0.01 * (seed % 2)) * (name == "O"))
        for name in ("O", "B") for seed in range(seeds)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("records", "verdict"),
    [(_long(0.0), HOLDS), (_long(0.3), FAILS), (_long(0.04), UNDECIDED), (_long(0.0, seeds=3), UNDECIDED)],
    ids=["level", "behind", "near the margin", "a seed is missing"],
)
def test_the_headline_follows_the_decayed_weights_of_the_longest_runs(records: list[Record], verdict: str) -> None:
    table = claims.table([*records, *_comparison(0.3)])  # what shorter runs say at tuned steps decides nothing
    assert table is not None
    found = {row[0]: row[1] for row in table.rows}
    assert next(v for claim, v in found.items() if claim.startswith("Adafactor without momentum or")) == verdict
    assert found["Row means alone (D) suffice"] == UNDECIDED


def test_the_page_shows_the_runs_that_decide_the_headline() -> None:
    page = report._headline([*_long(0.0), *_comparison(0.1)])
    assert page.index("at <code>long</code></h2>") < page.index("at <code>small</code></h2>")
    assert '<text class="title" x="6" y="18">Training loss, nothing tuned</text>' in page


def test_no_interval_is_given_for_a_step_size_that_is_not_the_best() -> None:
    records = _comparison(0.1)
    records += [
        _record(Job("O", SCALES["small"], False, seed, 2 * BEST["small"]["O"]), 3.6 + seed) for seed in range(3)
    ]
    table = tables.headline(records, "small")
    assert table is not None
    losses = {(row[0], row[2]): row[4] for row in table.rows}
    best = BEST["small"]["O"]
    assert "±" in losses["O, no warm-up", f"×{best:g}"]
    assert losses["O, no warm-up", f"×{2 * best:g}"] == "4.60"


def test_a_table_has_a_cell_for_every_head() -> None:
    records = _comparison(0.1)
    records += [_record(Job(row, SCALES["quarter"], warm, 0, m), 4.0 + m, mean=4.0, decayed=4.0 - m)
                for row, warm in COMPARED.values() for m in (1.0, 2.0)]  # fmt: skip
    headline, sizes = tables.headline(records, "small"), tables.step_sizes(records, "quarter")
    for table in (headline, sizes, tables.times(records), claims.table(records)):
        assert table is not None
        assert {len(row) for row in table.rows} == {len(table.heads)}
    assert sizes is not None
    assert ["B", "3.00", "**2.00**", "5.0", "5.0"] in sizes.rows, "by the decayed weights, not by the last"


def test_compared_runs_are_grouped_by_setting_and_drawn() -> None:
    records = _comparison(0.1)
    groups = compare.group(records, ["P", "small-B-*"], "small")
    assert [len(runs) for runs in groups.values()] == [3, 3]
    page = compare.draw(records, groups)
    assert page.count("<figure>") == 3
    assert page.count("<polygon") == 2  # a band over the seeds of each


def test_paired_bootstrap_tells_a_better_translation_from_an_equal_one() -> None:
    pairs = [Pair(f"d{i % 2}", "", f"sentence {i}", f"der Satz Nummer {i} steht hier im Text") for i in range(40)]
    right = [pair.german for pair in pairs]

    def broken(which: int) -> list[str]:
        return [text.replace("Nummer", "Zahl") if i % 4 // 2 == which else text for i, text in enumerate(right)]

    def record(name: str, texts: list[str]) -> dict[str, Any]:
        return {"name": name, "translations": pack({"last": texts})}

    def p_value(*records: dict[str, Any]) -> float:
        (line,) = compare.significance(list(records), pairs, "last")
        assert line.startswith("second − first: ")
        return float(line.rpartition(" = ")[2])

    assert p_value(record("first", right), record("second", broken(0))) < 0.01
    assert p_value(record("first", broken(0)), record("second", broken(1))) > 0.3


def test_the_best_step_sizes_are_those_of_the_records() -> None:
    for scale, rows in (("quarter", ("B", "O", "P")), ("small", ("B", "O", "P"))):
        records = read(RECORDS, scale)
        for row in rows:
            runs = select(records, scale, row=row, warmup=COMPARED[row][1])
            assert len(sweep_curve(runs, "decayed")) >= 2
            assert BEST[scale][row] == best_multiplier(runs, "decayed")
