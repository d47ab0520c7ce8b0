"""Histories are kept, continued and read again."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from adafactor import Adafactor, Record
from adafactor.diagnostics import History, diagnose
from studies.diagnoses import Perceptron, regression, run


def same(one: Record, other: Record) -> bool:
    def alike(a: Any, b: Any) -> bool:
        return a == b or bool(np.isclose(a, b, rtol=1e-5, equal_nan=True))

    return all(alike(getattr(one, field.name), getattr(other, field.name)) for field in fields(Record))


def test_a_history_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    model = Perceptron()
    nn.init.zeros_(model.last.weight)
    model.last.bias.requires_grad_(False)  # no figures: NaN
    groups: list[dict[str, Any]] = [{"params": model[0].named_parameters()}, {"params": model.last.named_parameters()}]
    optimizer = Adafactor([groups[0], {**groups[1], "clip": None}], rules={"weight": {"decay_rate": 0.7}})
    history = run(optimizer, regression(model), history=History(tmp_path / "streamed.jsonl"))
    history.save(tmp_path / "saved.jsonl")
    for name in ("streamed.jsonl", "saved.jsonl"):
        loaded = History.load(tmp_path / name)
        assert [report.step for report in loaded] == [4 * i for i in range(1, 11)]
        assert [report.loss for report in loaded] == pytest.approx([report.loss for report in history], rel=1e-5)
        for one, other in zip(loaded, history, strict=True):
            assert all(map(same, one.records, other.records))
            strip = {
                key: replace(about, settings=replace(about.settings, lr=1e-2)) for key, about in other.about.items()
            }
            assert one.about == strip
        assert [str(finding) for finding in diagnose(loaded)] == [str(finding) for finding in diagnose(history)]
    for line in (tmp_path / "saved.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_history_is_continued_after_a_resume_and_a_line_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    model = Perceptron()
    optimizer = Adafactor(model.named_parameters())
    run(optimizer, regression(model), steps=8, history=History(path))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    run(optimizer, regression(model), steps=8, history=History(path))  # steps 12 and 16, of a run that then dies
    optimizer.load_state_dict(checkpoint)
    run(optimizer, regression(model), steps=4, history=History(path))
    assert [report.step for report in History.load(path)] == [4, 8, 12]
    path.write_text(path.read_text() + '{"step": 16, "rms_upd')
    assert [report.step for report in History.load(path)] == [4, 8, 12]
    run(optimizer, regression(model), steps=8, history=History(path))
    assert [report.step for report in History.load(path)] == [4, 8, 12, 16, 20]


@pytest.mark.parametrize("line", ["nothing", "[]", '{"step": 3}', '{"parameters": [{"name": "a"}]}'])
def test_a_file_that_is_no_history_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(f"{line}\n")
    with pytest.raises(ValueError, match="line 1"):
        History.load(tmp_path / "file")


@pytest.mark.parametrize("content", ['{"my": "results"}', "step,loss\n1,2.0\n", "\x00\x01"])
def test_a_file_of_another_kind_is_not_continued(content: str, tmp_path: Path) -> None:
    path = tmp_path / "results"
    path.write_text(content)
    with pytest.raises(ValueError, match="results is there already and is no history"):
        History(path)
    assert path.read_text() == content


@pytest.mark.parametrize("content", ["", '{"para', '{"parameters": [{"na'])
def test_a_file_that_a_run_had_only_begun_is_continued(content: str, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(content)
    model = Perceptron()
    run(Adafactor(model.named_parameters()), regression(model), steps=4, history=History(path))
    assert [report.step for report in History.load(path)] == [4]
