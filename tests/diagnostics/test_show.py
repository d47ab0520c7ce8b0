"""The picture and the loggers."""

from __future__ import annotations

from pathlib import Path

import pytest

from adafactor import Adafactor
from adafactor.diagnostics import Report, Watch, figures, plot, to_callback, to_tensorboard
from tests.diagnostics.runs import Perceptron, regression, run


def test_the_picture_has_three_panels_and_no_background(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib.image import imread

    model = Perceptron()
    model.last.bias.requires_grad_(False)  # has no metrics
    reports = run(Adafactor(model.named_parameters()), regression(model), steps=12)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot(reports, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    for words in ("RMS(U)", "step size", "clip rate", "4 parameters"):
        assert words in text
    plot(reports[:1], tmp_path / "picture.png")
    corner = imread(tmp_path / "picture.png")[0, 0]
    assert len(corner) == 4 and corner[3] == 0, "the page behind may be white or black"


def test_a_run_without_steps_is_drawn_and_one_without_reports_is_refused(tmp_path: Path) -> None:
    plot([Adafactor(Perceptron().named_parameters()).report()], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()
    with pytest.raises(ValueError, match="no report"):
        plot([], tmp_path / "picture.png")


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
        figures(Report(), ["loss"])
    with pytest.raises(TypeError, match="add_scalar"):
        to_tensorboard("runs")
