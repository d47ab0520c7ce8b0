"""The paper's own setting, as it goes on real hardware: shrunk, on a CPU, with files made for it."""

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lab import vocabulary
from lab.__main__ import main
from lab.batches import Batches
from lab.corpus import Corpus
from lab.presets import SCALES
from lab.rows import ROWS
from lab.sharded import Processes

TINY = replace(SCALES["tiny"], steps=6, dev=0, test=0)


def test_base_does_not_start_on_another_text_or_on_a_cpu_that_nobody_named(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, reason in (
        (["run"], "give it WMT 2014 with --wmt FOLDER"),
        (["table", "--devices", "0-7"], "give it WMT 2014 with --wmt FOLDER"),
        (["run", *files], "name them with --device "),
        (["table", *files], "name them with --devices "),
        (["table", "--devices", "cpu", "--wmt", str(tmp_path)], "has no training-parallel-europarl-v7.tgz"),
    ):
        monkeypatch.setattr(sys, "argv", ["lab", *words, "--scale", "base", "--cache", str(tmp_path)])
        assert main() == 2
        assert reason in capsys.readouterr().out


def test_a_table_of_own_files_runs_on_each_device_and_is_reported_beside_the_paper(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCALES, "base", replace(TINY, name="base", branch=2, dev=10))
    monkeypatch.setattr("lab.experiments.TABLE_2", [ROWS["B"], ROWS["O"]])
    devices: list[str] = []

    def lab(*words: str) -> int:
        with monkeypatch.context() as inner:
            inner.setattr(sys, "argv", ["lab", *words])
            return main()

    def run_here(words: list[str], **streams: Any) -> Any:
        """In this process: in another one the scale would not be shrunk."""
        assert "--bfloat16" in words
        devices.append(words[words.index("--device") + 1])
        status = lab(*words[3:])
        return SimpleNamespace(poll=lambda: status, returncode=status)

    monkeypatch.setattr("lab.pool.subprocess", SimpleNamespace(Popen=run_here))
    table = ["table", "--scale", "base", "--devices", "cpu,cpu", "--bfloat16", "--cache", str(tmp_path), *files]
    for _ in range(2):  # the second time nothing is missing
        assert lab(*table) == 0 and devices == ["cpu"] * 4
    page = tmp_path / "report.md"
    assert lab("report", "--scale", "base", "--cache", str(tmp_path), "--output", str(page)) == 0
    table_2 = page.read_text().split("### Table 2 at the paper")[1].split("###")[0]
    cells = {line[2:].split(" | ")[0]: line[2:-2].split(" | ")[2:] for line in table_2.splitlines() if line[:2] == "| "}
    assert cells["A"] == ["25.6", "–", "0.1", "–"] and cells["Q150"] == ["24.0", "–", "diverged", "–"]
    assert set(ROWS) - {"Adam", "Adam2017", "A160"} <= set(cells)
    assert all(cells[row][place] != "–" for row in "BO" for place in (1, 3))


def test_encoded_pairs_are_kept_in_files_that_processes_share(corpus: Corpus, tmp_path: Path) -> None:
    words = vocabulary.train(corpus, 400, tmp_path)
    plain = Batches(corpus.train, words, 300)
    for _ in range(2):  # made, then read
        kept = Batches(corpus.train, words, 300, kept=tmp_path / "encoded" / "train")
        for one, other in zip(islice(plain.stream(3), 20), islice(kept.stream(3), 20), strict=True):
            assert torch.equal(one.source, other.source) and torch.equal(one.target_out, other.target_out)
    assert isinstance(kept._sources.lengths, np.memmap)
    assert len(list((tmp_path / "encoded").glob("*.ids"))) == 2


def test_processes_draw_dropout_of_their_own_which_a_resumed_run_draws_again() -> None:
    def draws(rank: int, step: int) -> list[float]:
        processes = Processes()
        processes.size, processes.rank = 2, rank
        processes.seed(0, step)
        return list(torch.rand(4).tolist())

    state = torch.get_rng_state()
    assert draws(0, 1) == draws(0, 1)
    assert len({tuple(draws(rank, step)) for rank in (0, 1) for step in (1, 2)}) == 4
    torch.set_rng_state(state)
    Processes().seed(0, 1)  # alone, a run goes on with the stream that it has
    assert torch.equal(torch.get_rng_state(), state)
