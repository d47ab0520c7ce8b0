"""How every picture of the documentation looks: no background, and colours that can be seen on white and on black."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context

INK, OURS, THEIRS = "#777777", "#3d7fd9", "#9a9a9a"
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor", "legend.edgecolor"), "none"),
    "grid.color": INK,
    "grid.alpha": 0.3,
}
styled = rc_context(STYLE)  # decorates a function, which then draws for light and dark pages
