"""bfloat16 weights that still learn: the lab's Transformer in 16 bits, with each way of rounding, beside float32.

Weights and gradients are bfloat16, and so is the result of every linear layer, norm and residual layer, forwards and
backwards. The products themselves are of float32: a CPU without 16-bit units takes ten times as long for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from safetensors.torch import load_model
from torch import Tensor, nn
from torch.func import functional_call

from adafactor import Adafactor
from lab import train
from lab.batches import Batches
from lab.corpus import Corpus
from lab.files import put_between
from lab.model import Layer, Transformer
from lab.presets import SCALES, Job, Scale
from lab.results import Record
from lab.style import styled
from lab.train import Options, Trainer, run_folder

SCALE = replace(SCALES["mini"], name="precision", dev=0)
TUNING_STEPS = 400
TUNING_RATE = 1e-3  # relative and constant, as T5 is fine-tuned
TUNING_DOMAIN = "ding"
SEEDS = (0, 1, 2)
ROUNDINGS = (None, "nearest", "stochastic", "kahan")
PARTS = ("train", "tune")
BEGIN, END = "<!-- from the records: python -m lab precision --render -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class PrecisionJob(Job):
    """A run of a row from scratch or, on one domain of the text, from what the float32 run of its seed has learned."""

    rounding: str | None = None  # of bfloat16 weights; None: float32
    domain: str | None = None  # None: from scratch, on all of the text
    momentum: str = "float32"  # its format, in a row that has one

    @property
    def name(self) -> str:
        """A name for files."""
        kind = [self.domain] if self.domain else []
        format = [f"{self.momentum}-momentum"] if self.settings.beta1 else []
        return "-".join([super().name, *kind, self.rounding or "float32", *format])

    def config(self) -> dict[str, Any]:
        """Everything, as JSON."""
        found = {**super().config(), "rounding": self.rounding, "domain": self.domain}
        return found | {"momentum": self.momentum} if self.settings.beta1 else found


def jobs(scale: Scale = SCALE, domain: str = TUNING_DOMAIN, corpus: str = "debian") -> list[PrecisionJob]:
    """All runs, seed by seed, so that what is there at any time can be compared."""
    tuning = replace(scale, steps=TUNING_STEPS)
    found = []
    for seed in SEEDS:
        from_scratch = [PrecisionJob("O", scale, False, seed, None, corpus, r) for r in ROUNDINGS]
        tuned = [PrecisionJob("O", tuning, False, seed, TUNING_RATE, corpus, r, domain) for r in ROUNDINGS]
        found += [from_scratch[0], *tuned, *from_scratch[1:]]
    return found


def run(job: PrecisionJob, corpus: Corpus, options: Options, scale: Scale = SCALE) -> Record:
    """Train, evaluate and record a job, and before it the run that it starts from, if its weights are not there."""
    base = PrecisionJob("O", scale, False, job.seed, None, job.corpus)
    weights = run_folder(base, options.cache) / "weights.safetensors"
    if job.domain and not weights.exists():
        train.run(base, corpus, options, PrecisionTrainer)
    return train.run(job, corpus, options, partial(PrecisionTrainer, weights=weights))


class ShortTransformer(Transformer):
    """The same model in bfloat16, whose products are of float32."""

    def __init__(self, model: Transformer) -> None:
        """Take over the weights of a float32 model, rounded to nearest."""
        super().__init__(model.shape, len(model.embedding))
        self.load_state_dict(model.state_dict())
        for parameter in self.parameters():
            parameter.data = parameter.data.bfloat16()
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm | Layer):
                module.register_forward_hook(lambda module, inputs, output: output.bfloat16().float())

    def loss(self, source: Tensor, target_in: Tensor, target_out: Tensor, smoothing: float) -> Tensor:
        """As the float32 model's, with its weights converted for this one use; gradients come back as bfloat16."""
        weights = {f"model.{name}": parameter.float() for name, parameter in self.named_parameters()}
        loss: Tensor = functional_call(_Loss(self), weights, (source, target_in, target_out, smoothing))
        return loss


class _Loss(nn.Module):
    """`Transformer.loss` as a forward, which is what `functional_call` calls."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Tensor:
        return Transformer.loss(self.model, *inputs)


class PrecisionTrainer(Trainer):
    """A run with its weights in float32 or, rounded as the job says, in bfloat16."""

    job: PrecisionJob

    def __init__(self, job: PrecisionJob, corpus: Corpus, options: Options, weights: Path | None = None) -> None:
        """Build everything from the job's seed, or from `weights` if the job is a fine-tuning."""
        super().__init__(job, corpus, options)
        if job.domain:
            assert weights is not None
            self.corpus = only(corpus, job.domain)
            self.batches = Batches(self.corpus.train, self.vocabulary, job.scale.tokens)
            load_model(self.model, str(weights))
            self.initial_loss = self._dev_loss(self.model)
        if job.rounding:
            self.model = ShortTransformer(self.model)
        self.start = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = Adafactor(
            self.model.named_parameters(),
            lr_decay=None,
            on_nonfinite="ignore",
            rounding=job.rounding or "nearest",
            beta1=job.settings.beta1,
            momentum_dtype=job.momentum,
            seed=job.seed,
        )

    def _rate(self) -> float:
        return self.job.effective_multiplier if self.job.domain else super()._rate()

    def whole(self) -> Transformer:
        """The model to evaluate, which is by the same arithmetic for every run, that of float32."""
        return self._filled({name: value.float() for name, value in self.model.state_dict().items()})

    def record(self) -> Record:
        """What is kept of any run, and what this experiment asks for."""
        return {**super().record(), **measure(self.model, self.start)}


def only(corpus: Corpus, domain: str) -> Corpus:
    """One domain of a corpus."""
    train, dev, test = ([pair for pair in corpus.part(part) if pair.domain == domain] for part in
                        ("train", "dev", "test"))  # fmt: skip
    return Corpus(corpus.name, train, dev, test)


def measure(model: nn.Module, start: list[Tensor]) -> dict[str, Any]:
    """Bytes, and how far the weights have gone from where they started."""
    now = [p.detach() for p in model.parameters()]
    pairs = list(zip(now, start, strict=True))
    count = sum(p.numel() for p in now)
    distance = sum(float((p.double() - s.double()).square().sum()) for p, s in pairs)
    length = sum(float(s.double().square().sum()) for s in start)
    return {
        "parameters": count,
        "parameter_bytes": sum(p.nbytes for p in now),
        "gradient_bytes": sum(p.nbytes for p in now),  # torch gives a gradient its parameter's dtype
        "unchanged": round(sum(int((p == s).sum()) for p, s in pairs) / count, 4),
        "distance": round((distance / length) ** 0.5, 5),
    }


def group(records: list[Record]) -> dict[str, dict[str | None, list[Record]]]:
    """Records by part of the experiment and rounding, in the order of seeds."""
    found: dict[str, dict[str | None, list[Record]]] = {part: {r: [] for r in ROUNDINGS} for part in PARTS}
    for record in sorted(records, key=lambda record: record["config"]["seed"]):
        config = record["config"]
        found["tune" if config["domain"] else "train"][config["rounding"]].append(record)
    return found


def label(rounding: str | None) -> str:
    """A row's name."""
    return f"bfloat16, {rounding}" if rounding else "float32"


def tables(records: list[Record]) -> str:
    """The part of docs/precision.md that is measured."""
    if not records:
        return "There are no records yet.\n"
    found, blocks = group(records), []
    for part, title in (("train", "From scratch"), ("tune", "Fine-tuned")):
        if any(found[part].values()):
            blocks.append(_loss_table(found[part], title))
    blocks.append("![Training losses, and their difference from float32](precision.png)\n")
    return "\n".join(blocks)


def _loss_table(runs: dict[str | None, list[Record]], title: str) -> str:
    heads = [title, "dev loss", "minus float32, same seed", "weights where they started", "distance from the start"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    base = {record["config"]["seed"]: record["dev_loss"] for record in runs[None]}
    before = [record["initial_loss"] for record in runs[None]]
    lines += [f"| before | {spread(before)} | | | |"] if before else []
    for rounding, records in runs.items():
        if records:
            losses = [record["dev_loss"] for record in records]
            gaps = [r["dev_loss"] - base[r["config"]["seed"]] for r in records if r["config"]["seed"] in base]
            cells = [label(rounding), spread(losses)]
            cells.append(spread(gaps, signed=True) if rounding and gaps else "")
            cells.append(f"{100 * mean(r['unchanged'] for r in records):.1f} %")
            cells.append(f"{100 * mean(r['distance'] for r in records):.1f} %")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: list[float], signed: bool = False) -> str:
    """The mean of seeds and, of more than one, their deviation."""
    middle = f"{mean(values):+.3f}".replace("-", "−") if signed else f"{mean(values):.3f}"
    return f"{middle} ± {stdev(values):.3f}" if len(values) > 1 else middle


def render(records: list[Record], document: Path, picture: Path) -> None:
    """Put the tables into the document, between its two marks, and draw the figure."""
    put_between(document, BEGIN, END, tables(records))
    if records:
        draw(records, picture)


@styled
def draw(records: list[Record], picture: Path) -> None:
    """Training losses above, and below them how far each is from the float32 run of the same seed and batches."""
    from matplotlib.figure import Figure

    found = group(records)
    titles = {"train": "From scratch", "tune": f"Fine-tuned at {TUNING_RATE:g}, constant"}
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col")
    for column, part in enumerate(PARTS):
        above, below = axes[0][column], axes[1][column]
        above.set_title(titles[part], fontsize=11)
        below.set_xlabel("step")
        base = {r["config"]["seed"]: r["curve"] for r in found[part][None]}
        for colour, (rounding, runs) in enumerate(found[part].items()):
            runs = [r for r in runs if r["config"]["seed"] in base]
            if not runs:
                continue
            steps = [step for step, _ in runs[0]["curve"]]
            style = {"color": f"C{colour}", "label": label(rounding), "linewidth": 1.3}
            above.plot(steps, _smooth(_mean_curve([r["curve"] for r in runs])), **style)
            for one in runs if rounding else []:
                both = zip(one["curve"], base[one["config"]["seed"]], strict=True)
                gap = _smooth([ours - wide for (_, ours), (_, wide) in both])
                below.plot(steps, gap, color=f"C{colour}", linewidth=0.9, alpha=0.8)
        below.axhline(0, color="C0", linewidth=1.3)
        for axis in (above, below):
            axis.grid()
    axes[0][0].set_ylabel("training loss, mean of seeds")
    axes[1][0].set_ylabel("minus float32, each seed")
    axes[0][0].legend(fontsize=9)
    figure.savefig(picture, dpi=110)


def _mean_curve(curves: list[list[list[float]]]) -> list[float]:
    return [mean(value for _, value in points) for points in zip(*curves, strict=True)]


def _smooth(values: list[float], width: int = 7) -> list[float]:
    """Means over `width` points around each, fewer at the ends."""
    half = width // 2
    return [mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
