"""One run from its job to its record: resumable at any moment, and never done twice."""

from __future__ import annotations

import ctypes
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor

from adafactor import Adafactor
from lab import vocabulary
from lab.batches import Batch, Batches
from lab.corpus import Corpus
from lab.decode import translate
from lab.evaluate import bleu, held_out_loss, pack, pack_figures
from lab.files import locked, write_atomically, write_text
from lab.model import Transformer
from lab.presets import Job
from lab.records import commit, find, versions
from lab.rows import PAPER_STEPS, make_optimizer, schedule, schedule_2017, state_bytes
from lab.sharded import Processes

WATCHED = "decoder.0.feed_forward.widen.weight"  # the matrix whose RMS(U) is recorded (Figure 1)
CURVE_POINTS = 100
WAYS = ("last", "mean", "decayed")  # the weights of a run that are evaluated; those of a short one are the last only
SNAPSHOTS = 10  # of the last tenth of a run, whose mean is evaluated


@dataclass
class Progress:
    """What a run has seen so far; it is part of the checkpoint."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    rms_updates: list[float] = field(default_factory=list)
    seconds: float = 0.0  # of training
    cpu_seconds: float = 0.0  # of the process, evaluation included
    tokens: int = 0
    diverged: bool = False
    started: str = ""  # when, in UTC
    updates: list[list[float]] = field(default_factory=list)  # RMS(U) of every parameter, where they are recorded

    def smooth_loss(self) -> float:
        """The loss now."""
        return smooth(self.losses)


@dataclass(frozen=True)
class Options:
    """How to run, which does not change the result."""

    cache: Path
    checkpoint_seconds: float = 30.0
    device: str = "cpu"
    on_progress: Callable[[Progress], None] = lambda progress: None
    processes: Processes = field(default_factory=Processes)
    compiler: str | None = None  # torch.compile's backend; None: not compiled


def run(job: Job, corpus: Corpus, options: Options) -> dict[str, Any]:
    """Train, evaluate and record a job; a finished one is only read back.

    Of several processes the first one evaluates; the others return an empty record.

    Raises:
        LockedError: another process works on the same job now.
    """
    folder, processes = run_folder(job, options.cache), options.processes
    with locked(folder / "lock", wait=False) if processes.leader else nullcontext():
        finished = read_record(folder / "record.json", job, corpus)
        processes.wait()
        if finished is not None:
            return finished
        if processes.leader:
            write_text(folder / "config.json", json.dumps(job.config(), indent=1))
        keep_freed_memory()
        trainer = Trainer(job, corpus, options)
        trainer.resume()
        for way in WAYS if job.scale.branch else WAYS[:1]:
            trainer.reach(way)
        if not processes.leader:
            return {}
        record = trainer.record()
        write_text(folder / "record.json", json.dumps(record, ensure_ascii=False) + "\n")
        (folder / "checkpoint.pt").unlink(missing_ok=True)
    return record


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks: mapping them anew each step costs a tenth of the time on a CPU."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        library.mallopt(m_mmap_threshold, 2**30)
        library.mallopt(m_trim_threshold, 2**31 - 1)


def run_folder(job: Job, cache: Path) -> Path:
    """The folder of a job's checkpoint, weights and record."""
    return cache / "runs" / job.name


def read_record(path: Path, job: Job, corpus: Corpus) -> dict[str, Any] | None:
    """The record of a job if it is there and was made with the same configuration on the same text."""
    if not path.exists():
        return None
    return find(job, [json.loads(path.read_text(encoding="utf-8"))], corpus.fingerprint())


class Trainer:
    """The state of one run in memory."""

    def __init__(self, job: Job, corpus: Corpus, options: Options) -> None:
        """Build everything from the job's seed."""
        self.job, self.corpus, self.options = job, corpus, options
        self.folder = run_folder(job, options.cache)
        self.text = {"name": corpus.name, "fingerprint": corpus.fingerprint()}
        self.vocabulary = vocabulary.train(corpus, job.scale.vocabulary, options.cache)
        encoded = options.cache / "encoded" / f"{corpus.name}-{corpus.fingerprint()}-{job.scale.vocabulary}"
        self.batches = Batches(corpus.train, self.vocabulary, job.scale.tokens, job.scale.longest, encoded)
        torch.manual_seed(job.seed)
        self.device = torch.device(options.device)
        self.model = Transformer(job.scale.shape, len(self.vocabulary)).to(self.device)
        self.progress = Progress(started=now())
        self.sums: dict[str, Tensor] = {}  # of the snapshots so far
        self.found: dict[str, Any] = {}  # what was evaluated so far: way → loss, scores, translations
        self.initial_loss = self._dev_loss(self.model)
        self.processes = options.processes
        self.processes.shard(self.model)
        if options.compiler:
            self.model.compile(backend=options.compiler, dynamic=True)
        self.optimizer = make_optimizer(job.settings, self.model.named_parameters())
        self._cpu = time.process_time()

    def resume(self) -> None:
        """Continue from the last checkpoint, if it is of this very job and text."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        saved = torch.load(path, map_location=self.device, weights_only=True)
        if saved["config"] != json.dumps(self.job.config()) or saved.get("text", self.text) != self.text:
            return
        self.processes.load(self.model, saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["generator"].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(saved["device_generator"].cpu(), self.device)
        self.progress, self.sums, self.found = Progress(**saved["progress"]), saved["sums"], saved["found"]

    def reach(self, way: str) -> None:
        """Train as far as these weights need, and evaluate them; what was evaluated before stays."""
        self.train(self.job.scale.steps + self.job.scale.branch if way == "decayed" else self._last_step())
        if way in self.found or self.progress.diverged:
            return
        model = self.averaged() if way == "mean" else self.whole()
        if self.processes.leader:
            if way != "mean":
                save_weights(model, self.folder / ("weights.safetensors" if way == "last" else f"{way}.safetensors"))
            self.found[way] = self.evaluate(model)
        self.checkpoint()

    def train(self, until: int | None = None) -> None:
        """Go on to step `until`, by default the last, or to a divergence, with a checkpoint now and then."""
        self.model.train()
        until = self._last_step() if until is None else until
        stream = self.batches.stream(self.job.seed, start=self.progress.step)
        saved = began = time.monotonic()
        before = self.progress.seconds
        while self.progress.step < until and not self.progress.diverged:
            self._step(next(stream).to(self.device))
            passed = time.monotonic()
            self.progress.seconds = before + passed - began
            self.options.on_progress(self.progress)
            (due,) = self.processes.mean(
                float(self.processes.leader and passed - saved >= self.options.checkpoint_seconds)
            )
            if due:
                self.checkpoint()
                saved = time.monotonic()
        self.checkpoint()

    def _last_step(self) -> int:
        return self.job.scale.watched or self.job.scale.steps

    def _step(self, batch: Batch) -> None:
        progress = self.progress
        progress.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.zero_grad()
        self.processes.seed(self.job.seed, progress.step)
        progress.losses += self.processes.mean(self._backward(batch))
        progress.tokens += batch.tokens
        progress.diverged = has_diverged(progress.losses, self.initial_loss)
        if not progress.diverged:
            self.optimizer.step()
            progress.rms_updates.append(self._rms_update() if self._is_in_curve() else math.nan)
            if self.job.scale.watched and isinstance(self.optimizer, Adafactor):
                progress.updates.append([record.rms_update for record in self.optimizer.report()])
            if self.job.scale.branch and progress.step in snapshots(self.job.scale.steps):
                for name, value in self.processes.whole(self.model.state_dict()).items():
                    self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()

    def _backward(self, batch: Batch) -> float:
        """Leave the gradients of the batch's loss, and return the share of this process in it."""
        mine, weight = self.processes.share(batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.scale.autocast):
            loss = self.model.loss(mine.source, mine.target_in, mine.target_out, self.job.scale.smoothing)
        loss = loss * weight
        torch.autograd.backward(loss)
        return float(loss.item())

    def _rate(self) -> float:
        """The step size of the step that is counted already; after the last step it falls to zero in a line."""
        job, step, last = self.job, self.progress.step, self.job.scale.steps
        counted = min(step, last)
        if job.settings.step == "2017":
            shape = schedule_2017(counted, job.scale.shape.width)
        else:
            shape = schedule(counted, last if job.scale.compressed else PAPER_STEPS, job.warmup)
        rate = job.effective_multiplier * job.settings.scale * shape
        return rate if step <= last else rate * (1 - (step - last) / (job.scale.branch + 1))

    def _is_in_curve(self) -> bool:
        """Whether the figure shows this step: reading all parameters' figures after every one would cost a GPU time."""
        return (self.progress.step - 1) % stretch(self.job.scale.steps) == 0

    def _rms_update(self) -> float:
        if not hasattr(self.optimizer, "report"):
            return math.nan
        return next(float(r.rms_update) for r in self.optimizer.report() if r.name == WATCHED)

    def checkpoint(self) -> None:
        """Save all that decides how the run goes on, in one step."""
        self.progress.cpu_seconds += time.process_time() - self._cpu
        self._cpu = time.process_time()
        state = {
            "config": json.dumps(self.job.config()),
            "text": self.text,
            "model": self.processes.whole(self.model.state_dict()),
            "optimizer": self.processes.whole(self.optimizer.state_dict()),
            "generator": torch.get_rng_state(),
            "device_generator": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.empty(0),
            "progress": vars(self.progress),
            "sums": self.sums,
            "found": self.found,
        }
        if self.processes.leader:
            write_atomically(self.folder / "checkpoint.pt", lambda stream: torch.save(state, stream))

    def whole(self) -> Transformer:
        """The model as it is now, to evaluate and to save."""
        return self.model if self.processes.size == 1 else self._filled(self.processes.whole(self.model.state_dict()))

    def averaged(self) -> Transformer:
        """The model whose weights are the means of the snapshots."""
        return self._filled({name: value / len(snapshots(self.job.scale.steps)) for name, value in self.sums.items()})

    def _filled(self, weights: dict[str, Tensor]) -> Transformer:
        state = torch.get_rng_state()
        model = Transformer(self.job.scale.shape, len(self.vocabulary)).to(self.device)
        torch.set_rng_state(state)  # the draws of its initialisation are not the run's
        model.load_state_dict(weights)
        return model

    def evaluate(self, model: Transformer) -> dict[str, Any]:
        """Loss, scores and translations of a model."""
        began, scale = time.monotonic(), self.job.scale
        scores, translations = {}, {}
        for part, size in (("dev", scale.dev), ("test", scale.test)):
            pairs = self.corpus.part(part)[:size]
            if pairs:
                translations[part] = translate(model, self.vocabulary, [pair.english for pair in pairs])
                scores[part] = bleu(translations[part], pairs)
        loss = rounded(self._dev_loss(model))
        seconds = time.monotonic() - began
        return {"dev_loss": loss, "bleu": scores, "translations": translations, "seconds": seconds}

    def record(self) -> dict[str, Any]:
        """Put together what is kept of the run; the figures without a name are those of the last weights."""
        progress, scale = self.progress, self.job.scale
        ways = {way: {key: found[key] for key in ("dev_loss", "bleu")} for way, found in self.found.items()}
        self.progress.cpu_seconds += time.process_time() - self._cpu
        record = {
            "name": self.job.name,
            "config": self.job.config(),
            "diverged": progress.diverged,
            "steps": min(progress.step, scale.steps),
            "initial_loss": round(self.initial_loss, 4),
            "train_loss": rounded(smooth(progress.losses[: scale.steps])),
            **ways.pop("last", {"dev_loss": None, "bleu": {}}),
            "curve": thin(progress.losses[: scale.steps], points=scale.watched or CURVE_POINTS),
            "rms_update": {"parameter": WATCHED, "values": thin(progress.rms_updates[: scale.steps], every=True)},
            "state_bytes": state_bytes(self.optimizer),
            "parameter_bytes": sum(p.nbytes for p in self.model.parameters()),
            "tokens_per_second": round(progress.tokens / max(progress.seconds, 1e-9)),
            "train_seconds": round(progress.seconds, 1),
            "evaluate_seconds": round(sum(found["seconds"] for found in self.found.values()), 1),
            "cpu_seconds": round(progress.cpu_seconds, 1),
            "corpus": self.text,
            "started": progress.started,
            "finished": now(),
            "commit": commit(),
            "versions": versions(),
        }
        if scale.watched:
            names = [name for name, _ in self.model.named_parameters()]
            record["updates"] = {"parameters": names, "values": pack_figures(progress.updates)}
        if scale.branch:
            record["ways"] = ways
            said = {way: found["translations"].get("test", []) for way, found in self.found.items()}
            record["translations"] = pack(said)
        return record

    def _dev_loss(self, model: Transformer) -> float:
        pairs = self.corpus.dev if self.job.scale.branch else self.corpus.dev[:300]
        return held_out_loss(model, self.vocabulary, pairs, self.job.scale.smoothing)


def snapshots(steps: int) -> list[int]:
    """The steps after which the weights are added to the mean: evenly over the last tenth, the last among them."""
    stride = max(1, steps // (10 * SNAPSHOTS))
    return [step for step in (steps - stride * i for i in range(SNAPSHOTS)) if step > 0]


def has_diverged(losses: list[float], initial: float) -> bool:
    """A run has diverged when its loss is no number, or over ten steps far above that of a fresh model."""
    if not math.isfinite(losses[-1]):
        return True
    last = losses[-10:]
    return len(last) == 10 and sum(last) / 10 > 3 * initial


def smooth(losses: list[float]) -> float:
    """The mean of the last tenth of the losses, at most 100 of them."""
    last = losses[-min(100, max(1, len(losses) // 10)) :]
    return sum(last) / len(last) if last else math.nan


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def stretch(steps: int, points: int = CURVE_POINTS) -> int:
    """How many steps a point of a curve stands for."""
    return max(1, math.ceil(steps / points))


def thin(values: list[float], every: bool = False, points: int = CURVE_POINTS) -> list[list[float]]:
    """At most so many pairs of (step, value): means of stretches or, if `every`, single values."""
    found, each = [], stretch(len(values), points)
    for start in range(0, len(values), each):
        part = [value for value in values[start : start + each] if math.isfinite(value)]
        if part:
            value = part[0] if every else sum(part) / len(part)
            found.append([start + (1 if every else len(part)), round(value, 4)])
    return found


def rounded(value: float) -> float | None:
    """A finite number with four decimals; JSON has no other numbers."""
    return round(value, 4) if math.isfinite(value) else None


def save_weights(model: Transformer, path: Path) -> None:
    """Write the weights for `translate`."""
    save_model(model, str(path.with_suffix(".new")))
    path.with_suffix(".new").replace(path)
