"""Tables, pictures and loggers."""

from __future__ import annotations

import io
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from adafactor import Adafactor
from adafactor.diagnostics import History, Live, Report, Watch, figures, to_callback, to_tensorboard
from adafactor.diagnostics.table import rows
from studies.diagnoses import Perceptron, regression


def gpt2_like() -> list[tuple[str, nn.Parameter]]:
    """GPT-2's 148 names, with tensors small enough to step quickly."""
    parts = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    names = [f"transformer.h.{i}.{part}.{kind}" for i in range(12) for part in parts for kind in ("weight", "bias")]
    names = [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        *names,
        *(f"transformer.ln_f.{kind}" for kind in ("weight", "bias")),
    ]
    torch.manual_seed(0)
    matrix = ("wte", "wpe", "attn", "mlp")
    return [
        (
            name,
            nn.Parameter(
                torch.randn(12, 8) if name.endswith("weight") and any(m in name for m in matrix) else torch.randn(8)
            ),
        )
        for name in names
    ]


def gpt2_reports(live: Live | None = None, steps: int = 3) -> list[Report]:
    parameters = gpt2_like()
    assert len(parameters) == 148
    optimizer = Adafactor(parameters)
    reports: list[Report] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with Watch(optimizer, reports.append, *([live] if live else []), every=1):
            for t in range(steps):
                for name, p in parameters:
                    p.grad = torch.randn_like(p) * (1e-3 if "h.7.mlp.c_fc.weight" in name and t else 1)
                    if "h.3.ln_2.bias" in name and t:
                        p.grad[0] = math.inf
                optimizer.step()
    return reports


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_148_tensors_fits_a_terminal_and_has_the_interesting_first(width: int) -> None:
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None, legacy_windows=False
    )
    live = Live(console)
    reports = gpt2_reports(live)
    order = list(rows(reports[-1])[1])
    assert order[:2] == ["h.*.ln_2.bias", "h.*.mlp.c_fc.weight"], "skipped, then far from 1"
    assert len(order) == 16

    text = console.file.getvalue()  # type: ignore[attr-defined]
    last = text[text.rindex("step 3: 148 tensors") :].splitlines()
    assert max(map(len, last)) <= width and len(last) <= 40
    lines = [line for line in last if line.startswith(("h.", "w", "ln_f"))]
    assert [line.split()[0] for line in lines] == order, "none is cut"
    assert lines[0].split()[1] == "x12" and lines[0].split()[-1] == "0/2", "of twelve layers one skipped two steps"
    assert lines[1].split()[3] == "7", "the layer whose RMS(U) is farthest from 1"
    assert "! not finite: transformer.h.3.ln_2.bias" in [line.rstrip() for line in last], "what diagnose says"
    assert text.isascii(), "a Windows console or file may take no more"


def test_a_small_terminal_shows_the_first_rows() -> None:
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=60, height=14, force_terminal=True, color_system=None, legacy_windows=False
    )
    gpt2_reports(Live(console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    last = text[text.rindex("step 3: 148 tensors") :].splitlines()
    assert len(last) <= 14 and max(map(len, last)) <= 60 and any("more kinds" in line for line in last)


def test_where_there_is_no_terminal_a_line_a_report_and_a_table_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    gpt2_reports(Live())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == ["step 1", "step 2", "step 3", "step 3"]
    assert "in the median" in lines[1] and "clipped" in lines[1] and "1 parameters with skipped" in lines[2]
    assert "\x1b" not in "".join(lines) and sum(line.startswith(("h.", "w", "ln_f")) for line in lines) == 16


def test_the_picture_names_every_kind_of_layer(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib.image import imread

    history = History()
    history.reports = gpt2_reports()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        for figure in ("rms_update", "clip_rate", "relative_change"):
            history.plot(tmp_path / "picture.svg", figure)
            text = (tmp_path / "picture.svg").read_text()
            for label in ("wte.weight", "h.*.attn.c_attn.weight  ×12", "ln_f.bias"):
                assert label in text, (figure, label)
    history.plot(tmp_path / "picture.png")
    corner = imread(tmp_path / "picture.png")[0, 0]
    assert len(corner) == 4 and corner[3] == 0, "no background: the page behind may be white or black"
    with pytest.raises(ValueError, match="figure='loss'"):
        history.plot(tmp_path / "picture.png", "loss")
    with pytest.raises(ValueError, match="no report"):
        History().plot(tmp_path / "picture.png")


def test_a_callback_gets_figures_by_name_and_the_step() -> None:
    got: list[tuple[dict[str, float], int]] = []
    model = Perceptron()
    model.last.bias.requires_grad_(False)
    optimizer = Adafactor(model.named_parameters())
    with Watch(optimizer, to_callback(lambda values, step: got.append((values, step)), which="rms_update"), every=2):
        for t in range(2):
            regression(model)(t).backward()
            optimizer.step()
    ((values, step),) = got
    names = ["rms_update/0.weight", "rms_update/0.bias", "rms_update/2.weight"]
    assert step == 2 and list(values) == ["adafactor/rms_update_median", "adafactor/rms_update_max", *names]
    assert values["adafactor/rms_update_max"] == max(values[name] for name in names)
    with pytest.raises(ValueError, match="which='loss'"):
        figures([], ["loss"])
    with pytest.raises(TypeError, match="add_scalar"):
        to_tensorboard("runs")
