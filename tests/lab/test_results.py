"""Pairs and their intervals, verdicts by the rules of `claims.json`, tables and the answer."""

import math
import re
from dataclasses import replace

import pytest

from lab import answer, claims, experiments, rules, tables, updates
from lab.evaluate import pack_figures, unpack_figures
from lab.presets import SCALES, Job
from lab.records import RECORDS, read
from lab.results import FAILS, HOLDS, TOO_FEW, UNDECIDED, Difference, Record, best_multiplier, interval, of_row, paired

NAMES = ["decoder.0.attention.inputs.weight", "decoder.0.other.query.weight", "encoder.0.attention.inputs.weight"]


def _record(job: Job, loss: float, bleu: float = 5.0, **ways: float) -> Record:
    return {
        "name": job.name, "config": job.config(), "diverged": False, "steps": 10, "initial_loss": 8.0,
        "dev_loss": loss, "bleu": {"test": {"all": bleu}}, "curve": [[5, loss + 1], [10, loss]], "state_bytes": 10,
        "ways": {way: {"dev_loss": value, "bleu": {"test": {"all": bleu}}} for way, value in ways.items()},
        "train_seconds": 60.0, "evaluate_seconds": 0.0, "parameter_bytes": 100, "rms_update": {"values": []},
        "corpus": {"name": "debian", "fingerprint": "of one"},
    }  # fmt: skip


def _runs(name: str, scale: str, seeds: range, *losses: float) -> list[Record]:
    return [_record(experiments.job(name, scale, seed), loss) for seed, loss in zip(seeds, losses, strict=True)]


def _claim(words: str) -> rules.Claim:
    return next(claim for claim in rules.claims() if claim.claim.startswith(words))


def _found(words: str, records: list[Record]) -> claims.Finding:
    found = claims.judge(_claim(words), records)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("mean", "half", "as_good", "better", "alike"),
    [
        (-0.20, 0.05, HOLDS, HOLDS, FAILS),
        (0.00, 0.04, HOLDS, FAILS, HOLDS),  # surely not 0.05 better
        (0.00, 0.10, UNDECIDED, UNDECIDED, UNDECIDED),
        (0.03, 0.01, HOLDS, FAILS, HOLDS),
        (0.20, 0.05, FAILS, FAILS, FAILS),
        (0.08, 0.05, UNDECIDED, FAILS, UNDECIDED),
        (-0.04, math.inf, UNDECIDED, UNDECIDED, UNDECIDED),
        (math.nan, math.inf, UNDECIDED, UNDECIDED, UNDECIDED),
    ],
)
def test_the_interval_decides(mean: float, half: float, as_good: str, better: str, alike: str) -> None:
    found = Difference(mean, half, 3)
    assert (found.as_good(), found.better(), found.alike()) == (as_good, better, alike)


def test_the_interval_is_students_of_the_pairs_alone() -> None:
    found = interval([0.1, 0.2, 0.3])
    assert found.mean == pytest.approx(0.2) and found.seeds == 3
    assert found.half == pytest.approx(4.30 * 0.1 / math.sqrt(3))
    assert interval([0.1]).half == math.inf


def test_a_pair_is_of_one_seed_and_one_text() -> None:
    ours, theirs = _runs("H", "mini", range(3), 4.0, 4.1, 4.4), _runs("A", "mini", range(1, 4), 4.2, 4.3, 4.9)
    assert paired(ours, theirs).seeds == 2
    ours[1]["corpus"] = {"name": "debian", "fingerprint": "of another"}
    found = paired(ours, theirs)
    assert found.seeds == 1 and found.mean == pytest.approx(0.1)
    theirs[1]["diverged"] = True
    assert paired(ours, theirs).mean == pytest.approx(4.4 - 8.0), "as a fresh model, whose loss is 8"


def test_every_claim_has_a_rule_a_date_and_runs_that_reproduce_makes() -> None:
    jobs = {job.name for job in experiments.everything([])}
    for claim in rules.claims():
        assert claim.rule in rules.STATED["rules"] and claim.evaluation in ("last", "decayed")
        assert re.fullmatch(r"2026-11-\d\d", claim.set)
        for pair in claim.pairs:
            assert pair.scale in rules.STATED["scales"]
            names = [pair.first, pair.second]
            for seed in pair.seeds if claim.rule not in ("unit", "plain", "sides") else ():
                for name, step in zip(names, pair.multipliers or (None, None), strict=True):
                    assert experiments.job(name, pair.scale, seed, step).name in jobs


def test_what_stands_beside_adam_are_runs_that_reproduce_makes() -> None:
    for scale, both in tables.DIFFERENCES:
        assert all(multiplier in experiments.COMPARISON[scale][row] for row, multiplier in both)


def test_runs_that_judge_a_claim_as_new_began_after_its_rule_was_set() -> None:
    records = read(RECORDS)
    for claim in rules.claims():
        for pair in claim.pairs if claim.known == "none" and claim.set == "2026-11-19" else ():
            for name in (pair.first, pair.second):
                runs = of_row(records, name, pair.scale, *(pair.multipliers or ())[:1]) if name else []
                began = [run["started"] for run in runs if run["config"]["seed"] in pair.seeds]
                assert all(when > "2026-11-19T06:16" for when in began), "the rule's commit, 43f4e07"


def test_a_claim_is_judged_by_its_own_seeds_at_its_scale_and_the_other_decides_nothing() -> None:
    records = _runs("H-", "pattern", range(3, 6), 4.41, 4.43, 4.42)
    records += _runs("A-", "pattern", range(3, 6), 6.03, 6.01, 6.19)
    seen = _runs("H-", "pattern", range(3), 7.0, 7.0, 7.0) + _runs("A-", "pattern", range(3), 5.0, 5.0, 5.0)
    beside = _runs("H-", "mini", range(3), 4.7, 4.7, 4.71) + _runs("A-", "mini", range(3), 4.5, 4.51, 4.5)
    found = _found("Clipping at 1 (H) relieves", [*records, *seen, *beside])
    assert (found.verdict, found.measured) == (HOLDS, "`pattern`: −1.66 ± 0.25 (3 seeds)")
    assert found.other == "`mini`: +0.20 ± 0.02 (3 seeds)"
    assert found.is_contradicted, "there it does not hold"
    assert not _found("Clipping at 1 (H) relieves", records).is_contradicted
    two = [record for record in records if record["config"]["seed"] < 5]
    assert _found("Clipping at 1 (H) relieves", two).verdict == TOO_FEW, "three seeds are the least"
    assert claims.judge(_claim("Clipping at 1 (H) relieves"), seen) is None


def test_a_claim_on_several_pairs_holds_if_all_do_and_fails_if_one_does() -> None:
    def both(gap: float) -> list[Record]:
        losses = {"N": (4.5, 4.51, 4.5), "H": (4.5, 4.5, 4.5)}
        found = [record for row, some in losses.items() for record in _runs(row, "mini", range(10, 13), *some)]
        found += _runs("N-", "pattern", range(3, 6), 4.4 + gap, 4.41 + gap, 4.4 + gap)
        return found + _runs("H-", "pattern", range(3, 6), 4.4, 4.4, 4.4)

    words = "Variable decay with clipping (N) does as well as slow"
    assert [_found(words, both(gap)).verdict for gap in (0.0, 0.05, 0.3)] == [HOLDS, UNDECIDED, FAILS]
    assert _found(words, both(0.0)).measured.splitlines()[1] == "`pattern`: N − H +0.00 ± 0.01 (3 seeds)"
    rows = [_runs(row, "mini", range(10, 13), *(4.5 + 0.3 * (row == "L"),) * 3) for row in "ABCDFHIJKLMNOP"]
    found = _found("With warm-up all rows but", [record for some in rows for record in some])
    assert (found.verdict, found.measured) == (FAILS, "`mini`: 12 of 13 hold (3 seeds); not L − A +0.30 ± 0.00")


def _long(gap: float, seeds: range = range(4)) -> list[Record]:
    """O and B at `long`; O is worse by `gap` after the decay, a little more or less from seed to seed."""
    return [
        _record(experiments.job(name, "long", seed, multiplier), 9.0, decayed=3.3 + seed / 10
                + (gap + 0.01 * (seed % 2)) * (name == "O-"))
        for name, multiplier in (("O-", 2.5), ("B", 5.0)) for seed in seeds
    ]  # fmt: skip


@pytest.mark.parametrize(("gap", "verdict"), [(0.0, HOLDS), (0.3, FAILS), (0.04, UNDECIDED)])
def test_the_headline_follows_the_decayed_weights_of_the_longest_runs(gap: float, verdict: str) -> None:
    records = _long(gap)
    assert _found("Adafactor without momentum or warm-up", records).verdict == verdict
    told = {HOLDS: "ends level with Adam", FAILS: "ends behind Adam", UNDECIDED: "is not shown to be level with Adam"}
    assert told[verdict] in answer.answer(records)
    assert f"{gap + 0.005:.3f} ± 0.009 higher (4 seeds" in answer.answer(records)


def _embeddings(scheme: str, rise: float) -> list[Record]:
    found = []
    for row, warm, more in (("Adam", True, 0.5), ("O", False, 0.5 + rise)):
        for name in ("scaled", scheme):
            for seed in range(3):
                shape = replace(SCALES["mini"].shape, tied=False, embedding=name)
                loss = 4.4 + 0.01 * seed * (row == "O") + more * (name == scheme)
                found.append(_record(Job(row, replace(SCALES["mini"], shape=shape), warm, seed), loss))
    return found


@pytest.mark.parametrize(("rise", "verdict"), [(-0.3, HOLDS), (0.0, FAILS)])
def test_embeddings_compare_how_much_the_losses_rise(rise: float, verdict: str) -> None:
    found = _found("Relative steps (O) lose less than Adam by embeddings of", _embeddings("unit", rise))
    assert found.verdict == verdict
    assert f"O loses {0.5 + rise:.2f}, Adam 0.50" in found.measured


def test_figure_1_asks_for_more_deviation_with_slow_decay_in_every_two_seeds() -> None:
    def runs(row: str, amounts: tuple[float, ...]) -> list[Record]:
        found = _runs(row, "mini", range(10, 10 + len(amounts)), *(4.5 for _ in amounts))
        for record, amount in zip(found, amounts, strict=True):
            record["rms_update"] = {"values": [[step, 1 + amount * (-1) ** step] for step in range(1, 12)]}
        return found

    words = "RMS(U) stays near 1 with fast decay"
    slow, fast = runs("A", (0.2, 0.3, 0.2)), runs("G", (0.05, 0.06, 0.1))
    assert _found(words, [*slow, *fast]).verdict == HOLDS
    assert _found(words, [*slow, *runs("G", (0.05, 0.25, 0.1))]).verdict == UNDECIDED
    assert "A 1.00 to 1.00, deviation 0.20 to 0.30 (3 seeds)" in _found(words, [*slow, *fast]).measured


def test_figures_are_packed_to_within_3_per_cent() -> None:
    figures = [[1.0, 0.013, 0.0], [7.3, 250.0, 1e-9]]
    found = unpack_figures(pack_figures(figures), 3)
    assert found.tolist()[0] == [1.0, pytest.approx(0.013, rel=0.03), 0.0]
    assert found.tolist()[1] == [pytest.approx(7.3, rel=0.03), pytest.approx(250, rel=0.03), 0.0]


def _updates(name: str, seed: int, large: int, end: float) -> Record:
    """A run whose attention has updates of RMS(U) 4 in so many steps from 41 on, and a loss that falls to `end`."""
    figures = [[4.0 if 41 <= step < 41 + large else 0.5] * 2 + [9.0] for step in range(1, 401)]
    curve = [[step, 6.5 if step <= 340 else end] for step in range(1, 401)]
    record = _record(experiments.job(name, "updates", seed), end)
    return {**record, "curve": curve, "updates": {"parameters": NAMES, "values": pack_figures(figures)}}


@pytest.mark.parametrize(
    ("large", "clipped", "verdict"), [(4, 5.7, HOLDS), (1, 5.7, FAILS), (4, 6.1, FAILS), (2, 5.7, HOLDS)]
)
def test_the_papers_account_needs_large_updates_and_that_clipping_them_helps(
    large: int, clipped: float, verdict: str
) -> None:
    records = [_updates("A-", seed, large, 6.2) for seed in (3, 4, 5)]
    records += [_updates("H-", seed, 0, clipped) for seed in (3, 4, 5)]
    found = _found("Without warm-up A has larger", records)
    assert found.verdict == verdict
    assert updates.share_large(records[0]) == large / 200, "of the decoder's attention alone"
    assert f"{large / 2:.1f} %, {large / 2:.1f} %, {large / 2:.1f} % of A's figures" in found.measured
    table = tables.of_updates(records)
    assert table is not None and [row[0] for row in table.rows] == ["A", "H"]


def test_other_models_take_the_largest_step_size_at_which_adam_with_warm_up_learns() -> None:
    learned = {1.0: 5.0, 1.7: 4.9, 3.0: 5.2, 5.0: 6.1}
    tried = [_record(experiments.job("B", "pattern-deep", 100, m), loss) for m, loss in learned.items()]
    assert experiments.chosen_step_size("pattern-deep", tried[:3]) is None
    assert experiments.chosen_step_size("pattern-deep", tried) == 3.0
    jobs = [job for job in experiments.other_models(tried) if job.scale.name == "pattern-deep"]
    assert {job.effective_multiplier for job in jobs if job.seed != 100} == {3.0}
    assert len(jobs) == 4 + 2 * 2 * 10
    runs = [_record(job, 6.1 if ((not job.warmup) and job.row in "AFIL") else 5.0) for job in jobs if job.seed != 100]
    found = _found("Which rows fail without warm-up", [*tried, *runs])
    assert (found.verdict, found.measured) == (UNDECIDED, "`pattern-deep`: 10 of 10"), "the other model is missing"
    table = tables.other_models([*tried, *runs])
    assert table is not None and table.rows[0] == ["A", "25.6", "0.1", "–", "–", "5.00 5.00", "6.10 6.10"]


def _pattern(seeds: int = 3) -> list[Record]:
    """Rows A to P as the paper has them, but B, which fails without warm-up."""
    records = []
    for name in experiments.ADAPTIVE:
        for warm in (True, False):
            row = experiments.job(name, "pattern", 0).settings
            fails = (row.warm if warm else row.cold) < 1 or (name == "B" and not warm)
            loss = 6.1 if fails else 5.0 - (row.warm if warm else row.cold) / 100
            jobs = [Job(name, SCALES["pattern"], warm, seed) for seed in range(seeds)]
            records += [_record(job, loss + 0.01 * job.seed) for job in jobs]
    return records


def test_the_answer_says_which_rows_do_not_do_as_in_the_paper() -> None:
    text = answer.answer(_pattern())
    assert "Without warm-up 15 of 16 rows fail or learn as in the paper" in text
    assert "Against the paper B (β₁ = 0.9, β₂ = 0.999) fails in 3 of 3 seeds." in text
    assert "rows fail or learn" not in answer.answer(_pattern()[:40]), "as long as rows are missing"
    table = tables.table_2(_pattern())
    assert table is not None and len(table.rows) == 16
    assert table.rows[0] == ["A", "β₂ = 0.999", "25.6", "0.1", "4.74 4.75 4.76", "6.10 6.11 6.12", "–", "–"]
    sgd = [_record(Job("Q200", SCALES["mini"], warm, 0), 4.0) for warm in (True, False)]
    beside = tables.table_2([*_pattern(), *_runs("A", "mini", range(2), 4.0, 4.2), *sgd])
    assert beside is not None and beside.rows[0][6:] == ["4.10 (4.00 to 4.20)", "–"]
    assert beside.rows[-1] == ["Q200", "SGD, lr = 200·s", "24.3", "diverged", "–", "–", "4.00", "4.00"]


def test_the_answer_counts_new_and_known_runs_apart_and_names_what_fails() -> None:
    records = _long(0.0)
    for seed in range(3):
        records += [_record(experiments.job(name, "quarter", seed, step), 4.5, decayed=4.1 + 0.3 * (name == "O-"))
                    for name, step in (("O-", 3.0), ("B", 6.0))]  # fmt: skip
    text = answer.answer(records)
    assert "Of 1 claim of the paper that is judged by runs newer than the rule (2026-11-18) 1 holds, 0 do not" in text
    failing = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(failing) == 1 and "1,000 steps" in failing[0]


def test_claims_at_the_best_step_size_have_the_best_of_the_records() -> None:
    records = read(RECORDS)
    claim = _claim("The same in 1,000 steps")
    for name, multiplier in zip(("O-", "B"), claim.pairs[0].multipliers or (), strict=True):
        runs = of_row(records, name, "quarter")
        assert len({run["config"]["multiplier"] for run in runs}) == 4
        assert best_multiplier(runs, "decayed") == multiplier
