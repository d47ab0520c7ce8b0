"""One run from its job to its record: resumable at any moment, and never done twice."""

from __future__ import annotations

import ctypes
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model

from lab import vocabulary
from lab.batches import Batch, Batches
from lab.corpus import Corpus
from lab.evaluate import bleu, held_out_loss
from lab.files import locked, write_atomically, write_text
from lab.model import Transformer
from lab.presets import Job
from lab.sharded import Processes
from lab.table import make_optimizer, schedule, state_bytes

WATCHED = "decoder.0.feed_forward.widen.weight"  # the matrix whose RMS(U) is recorded (Figure 1)
CURVE_POINTS = 100


@dataclass
class Progress:
    """What a run has seen so far; it is part of the checkpoint."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    rms_updates: list[float] = field(default_factory=list)
    seconds: float = 0.0  # of training
    tokens: int = 0
    diverged: bool = False

    def smooth_loss(self) -> float:
        """The mean loss of the last tenth of the run so far, at most 100 steps of it."""
        last = self.losses[-min(100, max(1, len(self.losses) // 10)) :]
        return sum(last) / len(last) if last else math.nan


@dataclass(frozen=True)
class Options:
    """How to run, which does not change the result."""

    cache: Path
    checkpoint_seconds: float = 30.0
    device: str = "cpu"
    on_progress: Callable[[Progress], None] = lambda progress: None
    processes: Processes = field(default_factory=Processes)


def run(job: Job, corpus: Corpus, options: Options, trainer_of: Callable[..., Trainer] | None = None) -> dict[str, Any]:
    """Train, evaluate and record a job; a finished one is only read back.

    Of several processes the first one evaluates; the others return an empty record.

    Raises:
        LockedError: another process works on the same job now.
    """
    folder, processes = run_folder(job, options.cache), options.processes
    with locked(folder / "lock", wait=False) if processes.leader else nullcontext():
        finished = read_record(folder / "record.json", job)
        processes.wait()
        if finished is not None:
            return finished
        if processes.leader:
            write_text(folder / "config.json", json.dumps(job.config(), indent=1))
        keep_freed_memory()
        trainer = (trainer_of or Trainer)(job, corpus, options)
        trainer.resume()
        trainer.train()
        trainer.gather()
        if not processes.leader:
            return {}
        save_weights(trainer.model, folder / "weights.safetensors")
        record = trainer.record()
        write_text(folder / "record.json", json.dumps(record, ensure_ascii=False) + "\n")
        (folder / "checkpoint.pt").unlink(missing_ok=True)
    return record


def run_folder(job: Job, cache: Path) -> Path:
    """The folder of a job's checkpoint, weights and record."""
    return cache / "runs" / job.name


def read_record(path: Path, job: Job) -> dict[str, Any] | None:
    """The record of a job if it is there and was made with the same configuration."""
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    same: bool = record["config"] == json.loads(json.dumps(job.config()))
    return record if same else None


class Trainer:
    """The state of one run in memory."""

    def __init__(self, job: Job, corpus: Corpus, options: Options) -> None:
        """Build everything from the job's seed."""
        self.job, self.corpus, self.options = job, corpus, options
        self.folder = run_folder(job, options.cache)
        self.vocabulary = vocabulary.train(corpus, job.scale.vocabulary, options.cache)
        self.batches = Batches(corpus.train, self.vocabulary, job.scale.tokens)
        torch.manual_seed(job.seed)
        self.device = torch.device(options.device)
        self.model = Transformer(job.scale.shape, len(self.vocabulary)).to(self.device)
        self.progress = Progress()
        self.initial_loss = self._dev_loss()
        self.processes = options.processes
        self.processes.shard(self.model)
        self.optimizer = make_optimizer(job.settings, self.model.named_parameters())

    def resume(self) -> None:
        """Continue from the last checkpoint, if it is of this very job."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        saved = torch.load(path, map_location=self.device, weights_only=True)
        if saved["config"] != json.dumps(self.job.config()):
            return
        self.processes.load(self.model, saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["generator"].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(saved["device_generator"].cpu())
        self.progress = Progress(**saved["progress"])

    def train(self) -> None:
        """Go on to the last step or to a divergence, with a checkpoint now and then."""
        self.model.train()
        steps = self.job.scale.steps
        stream = self.batches.stream(self.job.seed, start=self.progress.step)
        saved = began = time.monotonic()
        before = self.progress.seconds
        while self.progress.step < steps and not self.progress.diverged:
            self._step(next(stream).to(self.device))
            now = time.monotonic()
            self.progress.seconds = before + now - began
            self.options.on_progress(self.progress)
            (due,) = self.processes.mean(
                float(self.processes.leader and now - saved >= self.options.checkpoint_seconds)
            )
            if due:
                self.checkpoint()
                saved = time.monotonic()
        self.checkpoint()

    def _step(self, batch: Batch) -> None:
        progress = self.progress
        progress.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.zero_grad()
        mine, weight = self.processes.share(batch)
        loss = self.model.loss(mine.source, mine.target_in, mine.target_out, self.job.scale.smoothing) * weight
        progress.losses += self.processes.mean(loss.item())
        progress.tokens += batch.tokens
        progress.diverged = has_diverged(progress.losses, self.initial_loss)
        if not progress.diverged:
            torch.autograd.backward(loss)
            self.optimizer.step()
            progress.rms_updates.append(self._rms_update())

    def _rate(self) -> float:
        """The step size of the step that is counted already."""
        job = self.job
        rate = job.effective_multiplier * job.settings.scale
        return rate * schedule(self.progress.step, job.scale.steps, job.warmup)

    def _rms_update(self) -> float:
        if not hasattr(self.optimizer, "report"):
            return math.nan
        return next(float(r.rms_update) for r in self.optimizer.report() if r.name == WATCHED)

    def checkpoint(self) -> None:
        """Save all that decides how the run goes on, in one step."""
        state = {
            "config": json.dumps(self.job.config()),
            "model": self.processes.whole(self.model.state_dict()),
            "optimizer": self.processes.whole(self.optimizer.state_dict()),
            "generator": torch.get_rng_state(),
            "device_generator": torch.cuda.get_rng_state() if self.device.type == "cuda" else torch.empty(0),
            "progress": vars(self.progress),
        }
        if self.processes.leader:
            write_atomically(self.folder / "checkpoint.pt", lambda stream: torch.save(state, stream))

    def gather(self) -> None:
        """End of training: the whole model on every process, to evaluate and to save."""
        if self.processes.size > 1:
            weights = self.processes.whole(self.model.state_dict())
            self.model = Transformer(self.job.scale.shape, len(self.vocabulary)).to(self.device)
            self.model.load_state_dict(weights)

    def record(self) -> dict[str, Any]:
        """Evaluate the model, and put together what is kept of the run."""
        began = time.monotonic()
        scale, progress = self.job.scale, self.progress
        scores = {}
        for part, size in (("dev", scale.dev), ("test", scale.test)):
            if size and not progress.diverged:
                pairs = self.corpus.part(part)[:size]
                scores[part] = bleu(self.model, self.vocabulary, pairs, samples=5 if part == "test" else 0)
        return {
            "name": self.job.name,
            "config": self.job.config(),
            "diverged": progress.diverged,
            "steps": progress.step,
            "initial_loss": round(self.initial_loss, 4),
            "train_loss": rounded(progress.smooth_loss()),
            "dev_loss": None if progress.diverged else rounded(self._dev_loss()),
            "bleu": scores,
            "curve": thin(progress.losses),
            "rms_update": {"parameter": WATCHED, "values": thin(progress.rms_updates, every=True)},
            "state_bytes": state_bytes(self.optimizer),
            "parameter_bytes": sum(p.nbytes for p in self.model.parameters()),
            "tokens_per_second": round(progress.tokens / max(progress.seconds, 1e-9)),
            "train_seconds": round(progress.seconds, 1),
            "evaluate_seconds": round(time.monotonic() - began, 1),
            "corpus": {"name": self.corpus.name, "fingerprint": self.corpus.fingerprint()},
            "commit": commit(),
            "versions": versions(),
        }

    def _dev_loss(self) -> float:
        return held_out_loss(self.model, self.vocabulary, self.corpus.dev[:300], self.job.scale.smoothing)


def has_diverged(losses: list[float], initial: float) -> bool:
    """A run has diverged when its loss is no number, or over ten steps far above that of a fresh model."""
    if not math.isfinite(losses[-1]):
        return True
    last = losses[-10:]
    return len(last) == 10 and sum(last) / 10 > 3 * initial


def thin(values: list[float], every: bool = False) -> list[list[float]]:
    """At most CURVE_POINTS pairs of (step, value): means of stretches or, if `every`, single values."""
    stretch = max(1, math.ceil(len(values) / CURVE_POINTS))
    points = []
    for start in range(0, len(values), stretch):
        part = [value for value in values[start : start + stretch] if math.isfinite(value)]
        if part:
            value = part[0] if every else sum(part) / len(part)
            points.append([start + (1 if every else len(part)), round(value, 4)])
    return points


def rounded(value: float) -> float | None:
    """A finite number with four decimals; JSON has no other numbers."""
    return round(value, 4) if math.isfinite(value) else None


def save_weights(model: Transformer, path: Path) -> None:
    """Write the weights for `translate`."""
    save_model(model, str(path.with_suffix(".new")))
    path.with_suffix(".new").replace(path)


def commit() -> str | None:
    """The commit of this checkout, or None outside of one."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    """The versions a result may depend on."""
    names = ("torch", "numpy", "sentencepiece", "sacrebleu")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks: mapping them anew each step costs a tenth of the time on a CPU."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        library.mallopt(m_mmap_threshold, 2**30)
        library.mallopt(m_trim_threshold, 2**31 - 1)
