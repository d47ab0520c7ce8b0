"""The scales of the lab, from seconds to the paper's, and what identifies one run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from lab.model import Shape
from lab.rows import ROWS, Row


@dataclass(frozen=True)
class Scale:
    """Model, data and length of a run.

    The paper's step size is best for its own model and batch. A smaller scale multiplies it: `adaptive` for
    the rows with α = 0.1·s, `relative` for those with ρ = s. SGD has its own multipliers in the table.
    """

    name: str
    shape: Shape
    vocabulary: int
    tokens: int  # of a batch, on either side
    steps: int
    adaptive: float = 1.0
    relative: float = 1.0
    dev: int = 1000  # sentences to translate at the end
    test: int = 2000
    smoothing: float = 0.1
    branch: int = 0  # steps after the last, while the step size falls to zero; 0: only the last weights are evaluated
    longest: int = 80  # subwords of a side; pairs with a longer one are left out
    autocast: bool = False  # products in bfloat16, weights in float32
    compressed: bool = True  # the paper's schedule of 100,000 steps is compressed into `steps`
    watched: int = 0  # the run ends after so many steps, RMS(U) of every parameter being recorded; 0: it is a whole one


# No dropout, and four passes over the text: it overfits by about 0.3 in loss, with Adam as with Adafactor.
SMALL = Scale("small", Shape(2, 128, 4, 512, dropout=0.0), 4000, 1536, 4000, 3.0, 3.0, dev=0, branch=400)
# The pattern of Table 2. Post-norm makes rows fail without warm-up; in pre-norm models of this size they do not.
PATTERN = Scale("pattern", Shape(3, 64, 4, 256, dropout=0.0, norm="post"), 1000, 512, 2000, 3.0, 3.0, dev=0, test=0)
# The paper's own. newstest2013, the dev set, has 3,000 sentences, newstest2014 3,003.
BASE = Scale(
    "base", Shape(6, 512, 8, 2048, dropout=0.1, inner_dropout=0.1), 32000, 4096, 100_000, dev=3000, test=3003,
    branch=10_000, longest=256,
)  # fmt: skip
# What scales have had since the first records were made; at these values it is left out of a record's configuration.
LATER = {"branch": 0, "longest": 80, "autocast": False, "compressed": True, "watched": 0, "inner_dropout": 0.0}
SCALES = {
    scale.name: scale
    for scale in (
        Scale("tiny", Shape(1, 32, 2, 64, dropout=0.0), 400, 400, 60, 3.0, 3.0, dev=20, test=20),
        Scale("offline", Shape(2, 64, 4, 256, dropout=0.0), 400, 800, 500, 3.0, 3.0, dev=0, test=200, branch=50),
        # Of the help pages' short sentences: two minutes of one core give German that can be read.
        Scale("demo", Shape(2, 128, 4, 512, dropout=0.0), 2000, 512, 1300, 3.0, 3.0, dev=0, test=300, branch=130),
        Scale("mini", Shape(2, 128, 4, 512, dropout=0.0), 2000, 512, 1200, 3.0, 3.0, dev=200, test=500),
        SMALL,
        replace(SMALL, name="quarter", steps=1000, test=500, branch=100),
        # The headline: four times `small`'s length, and with it the dropout that 17 passes over the corpus need.
        replace(SMALL, name="long", shape=replace(SMALL.shape, dropout=0.1), steps=16_000, branch=1600),
        PATTERN,
        # Its first 400 steps, for the paper's account of why rows fail (§5).
        replace(PATTERN, name="updates", watched=400),
        # Two other models in which rows fail, selected for none of them; the step size is chosen by a rule.
        replace(PATTERN, name="pattern-broad", shape=Shape(2, 128, 4, 512, dropout=0.0, norm="post")),
        replace(PATTERN, name="pattern-deep", shape=Shape(6, 64, 4, 256, dropout=0.0, norm="post")),
        # Pre-norm and deep, and long beside the memory of the second moment (row A160).
        Scale("deep", Shape(6, 64, 4, 256, dropout=0.0), 1000, 512, 16_000, 5.0, 5.0, dev=0, test=0),
        BASE,
        # Table 3's: half as many steps of the same schedule, four times the batch.
        replace(BASE, name="base3", tokens=16_384, steps=50_000, branch=5000, compressed=False),
    )
}


def is_papers(scale: Scale) -> bool:
    """Whether this is the paper's own setting, which wants its text and a GPU."""
    return scale.name.startswith("base")


@dataclass(frozen=True)
class Job:
    """All that decides a run's result, given the corpus."""

    row: str
    scale: Scale
    warmup: bool
    seed: int = 0
    multiplier: float | None = None  # of the paper's step size; None: the scale's
    corpus: str = "debian"

    @property
    def settings(self) -> Row:
        """The row's settings."""
        return ROWS[self.row]

    @property
    def effective_multiplier(self) -> float:
        """What the paper's step size is multiplied by."""
        if self.multiplier is not None:
            return self.multiplier
        return {"absolute": self.scale.adaptive, "relative": self.scale.relative}.get(self.settings.step, 1.0)

    @property
    def name(self) -> str:
        """A name for files; two different jobs of this lab never share it."""
        shape = self.scale.shape
        embedding = "" if shape.tied else f"-{shape.embedding}"
        parts = [self.scale.name + embedding, self.row, "warm" if self.warmup else "cold"]
        parts += [f"x{self.effective_multiplier:g}", f"s{self.seed}"] + ["bf16"] * self.scale.autocast
        return "-".join(parts + ([] if self.corpus == "debian" else [self.corpus]))

    def config(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "row": asdict(replace(self.settings, warm=0.0, cold=0.0)),
            "scale": {**_without_defaults(self.scale), "shape": _without_defaults(self.scale.shape)},
            "warmup": self.warmup,
            "seed": self.seed,
            "multiplier": self.effective_multiplier,
            "corpus": self.corpus,
        }


def _without_defaults(settings: Scale | Shape) -> dict[str, Any]:
    """All fields but those of `LATER` that have the value they had before there was a field."""
    return {key: value for key, value in asdict(settings).items() if key not in LATER or value != LATER[key]}


def untied(scale: Scale, embedding: str) -> Scale:
    """A scale for Table 3: its own softmax matrix and an embedding scheme."""
    return replace(scale, shape=replace(scale.shape, tied=False, embedding=embedding))
