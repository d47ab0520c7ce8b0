"""What each command of `python -m lab` does."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_model

from lab import corpus as corpora
from lab import demo, experiments, pictures, records, vocabulary, wmt
from lab.answer import headline
from lab.corpus import PARTS, Corpus, OwnFiles
from lab.decode import translate
from lab.documents import END, begin, documents, report
from lab.files import LockedError, put_between, write_text
from lab.model import Shape, Transformer
from lab.pool import run_missing, summary
from lab.presets import SCALES, Job, Scale, is_papers, untied
from lab.progress import Shown
from lab.records import RECORDS
from lab.results import dev_loss
from lab.sharded import Processes
from lab.train import Options, run, run_folder


def show_corpus(arguments: argparse.Namespace) -> int:
    """Build the corpus, print its counts, and fail if it is not the text of the committed records."""
    corpus = _corpus(arguments)
    print(corpora.counts(corpus))
    for pair in corpus.test[:3]:
        print(f"\n{pair.domain}: {pair.english}\n{' ' * len(pair.domain)}  {pair.german}")
    if corpus.name == "debian" and corpus.fingerprint() not in corpora.DEBIAN_12:
        print("\nThis is not the text of Debian 12, of which the committed records are: runs will differ.")
        return 1
    return 0


def run_one(arguments: argparse.Namespace) -> int:
    """One run, with a progress bar."""
    torch.set_num_threads(arguments.threads)
    scale = SCALES[arguments.scale]
    if _refused(arguments, scale, "--device", arguments.device):
        return 2
    corpus, cache = _corpus(arguments), _cache(arguments)
    if arguments.embedding:
        scale = untied(scale, arguments.embedding)
    scale = replace(scale, autocast=arguments.bfloat16)
    job = Job(arguments.row, scale, arguments.warmup, arguments.seed, arguments.multiplier, _corpus_label(corpus))
    processes = Processes()
    if arguments.again and processes.leader:
        shutil.rmtree(run_folder(job, cache), ignore_errors=True)
    processes.wait()
    show = Shown(job, cache, processes.leader and not arguments.quiet)
    pause = arguments.checkpoint_seconds
    pause = pause if pause is not None else 600.0 if is_papers(scale) else 30.0
    compiler = "inductor" if arguments.compile else None
    options = Options(cache, pause, arguments.device or "cpu", show, processes, compiler)
    try:
        with show:
            record = run(job, corpus, options)
    except LockedError as error:
        print(f"{error}; nothing done.")
        return 1
    if processes.leader:
        records.keep(record, arguments.records or cache / "records")
        print(summary(record))
    processes.leave()
    return 0


def run_table(arguments: argparse.Namespace) -> int:
    """Run what is missing of a table or figure."""
    scale = SCALES[arguments.scale]
    if _refused(arguments, scale, "--devices", arguments.devices):
        return 2
    corpus, cache = _corpus(arguments), _cache(arguments)  # built here once, before several processes ask for it
    if corpus.name == "generated" != arguments.corpus:
        print("Without the corpus there is nothing to reproduce; `demo` works with the generated task.")
        return 2
    scale = replace(scale, autocast=arguments.bfloat16)
    vocabulary.train(corpus, scale.vocabulary, cache)
    label = _corpus_label(corpus)
    jobs = [replace(job, corpus=label) for job in arguments.jobs(scale, arguments.seed)]
    common = [*_corpus_words(arguments), *["--compile"] * arguments.compile]
    slots = [["--device", device, *common] for device in arguments.devices or ("cpu", "cpu")]
    folder = arguments.records or (RECORDS if corpus.name == "debian" else cache / "records")
    return 1 if run_missing(jobs, folder, cache, corpus.fingerprint(), slots) else 0


def reproduce(arguments: argparse.Namespace) -> int:
    """Run all that is missing, then write the report."""
    corpus = _corpus(arguments)
    if corpus.name != "debian":
        print("The reproduction is of Debian's text; `table` takes your own. `demo` works with the generated task.")
        return 2
    folder, failed = arguments.records or RECORDS, []
    for _ in range(2):  # the first runs say which step size others have
        jobs = experiments.everything(records.read(folder))
        failed += run_missing(jobs, folder, _cache(arguments), corpus.fingerprint())
    _write(Path("runs/report.md"), report(records.read(folder)))
    return 1 if failed else 0


def _refused(arguments: argparse.Namespace, scale: Scale, option: str, device: object) -> bool:
    """Say why the paper's own setting is not run on another text, or on a CPU that nobody has named."""
    if not is_papers(scale):
        return False
    if not arguments.wmt and not _own_paths(arguments):
        print(f"`{scale.name}` is the paper's setting: give it WMT 2014 with --wmt FOLDER, or files of your own.")
        return True
    if device is None:
        print(f"`{scale.name}` is for GPUs: name them with {option} (a CPU is taken if you name it).")
        return True
    return False


def write_report(arguments: argparse.Namespace) -> int:
    """Write the report of all records, or of a scale's; with `--documents` also what the docs have from them."""
    papers = arguments.scale is not None and is_papers(SCALES[arguments.scale])
    folder = arguments.records or (_cache(arguments) / "records" if papers else RECORDS)
    found = records.read(folder)
    wanted = [r for r in found if r["config"]["scale"]["name"].startswith(arguments.scale or "")]
    if arguments.headline:
        print("\n".join(headline(found)))
        return 0
    _write(arguments.output, report(wanted))
    if arguments.documents:
        for (document, part), text in documents(found).items():
            put_between(document, begin(part), END, text)
            print(f"{part} is in {document}")
        for picture in pictures.draw(found):
            print(f"Drawn: {picture}")
    return 0


def _write(output: Path, text: str) -> None:
    write_text(output, text)
    print(f"The report is in {output}")


def show_demo(arguments: argparse.Namespace) -> int:
    """Adam (row B) and Adafactor (row O) side by side, from the corpus to translations and a page."""
    began = time.monotonic()
    cache, corpus = _cache(arguments), _corpus(arguments, instead_of_debian="help")
    print(corpora.counts(corpus))
    scale = SCALES["offline" if corpus.name == "generated" else "demo"]
    label = _corpus_label(corpus)
    jobs = [Job("B", scale, True, corpus=label), Job("O", scale, False, corpus=label)]
    kept = cache / "demo"
    for folder in (kept, *(run_folder(job, cache) for job in jobs)):
        shutil.rmtree(folder, ignore_errors=True)  # the demo shows the training, not an old result
    vocabulary.train(corpus, scale.vocabulary, cache)
    if run_missing(jobs, kept, cache):
        return 1
    recorded = records.read(kept)
    found = [record for job in jobs if (record := records.find(job, recorded))]
    print(f"\n{'':<32}{'dev loss':>9}{'test BLEU':>13}{'optimizer bytes':>17}{'ms a step':>11}")
    for record in found:
        title, loss = demo.NAMES[record["config"]["row"]["name"]], dev_loss(record, "decayed")
        score, speed = demo.score(record), 1000 * demo.step_seconds(record)
        print(f"{title:<32}{loss:>9.3f}{score:>13}{record['state_bytes']:>17,}{speed:>11.0f}")
    print(f"\n{demo.verdict(found)}")
    say = {job.row: _translator(run_folder(job, cache), corpus, cache) for job in jobs}
    sentences = list(demo.SENTENCES) if corpus.name == "help" else [pair.english for pair in corpus.test[:3]]
    own = [(sentence, {row: translate_(sentence) for row, translate_ in say.items()}) for sentence in sentences]
    for sentence, texts in own:
        print("\n".join([f"\n{sentence}", *(f"  {row}  {text}" for row, text in texts.items())]))
    output = Path("runs/demo.html")
    write_text(output, demo.render(found, own, corpus.test, headline(records.read(RECORDS))))
    print(f"\nCurves, costs and more translations, the worst among them, are in {output}")
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0


def _translator(folder: Path, corpus: Corpus, cache: Path) -> Callable[[str], str]:
    scale = json.loads((folder / "config.json").read_text())["scale"]
    words = vocabulary.train(corpus, scale["vocabulary"], cache)
    model = Transformer(Shape(**scale["shape"]), len(words))
    decayed = folder / "decayed.safetensors"
    load_model(model, str(decayed if decayed.exists() else folder / "weights.safetensors"))
    return lambda sentence: translate(model, words, [sentence])[0]


def _cache(arguments: argparse.Namespace) -> Path:
    return (arguments.cache or corpora.cache_folder()).expanduser().resolve()


def _corpus(arguments: argparse.Namespace, instead_of_debian: str = "debian") -> Corpus:
    cache, own = _cache(arguments), OwnFiles(_own_paths(arguments))
    if arguments.wmt:
        own = OwnFiles(wmt.unpack(arguments.wmt, cache), "wmt14")
    name = "own" if own.paths else instead_of_debian if arguments.corpus == "debian" else arguments.corpus
    return corpora.load_or_generated(name, cache, own)


def _own_paths(arguments: argparse.Namespace) -> dict[str, tuple[Path, Path]]:
    paths = {part: (getattr(arguments, f"{part}_source"), getattr(arguments, f"{part}_target")) for part in PARTS}
    return {part: pair for part, pair in paths.items() if all(pair)}


def _corpus_words(arguments: argparse.Namespace) -> list[str]:
    """The options of a command that say which text is its own, for another command."""
    words = ["--wmt", str(arguments.wmt)] if arguments.wmt else []
    for part, (source, target) in _own_paths(arguments).items():
        words += [f"--{part}-source", str(source), f"--{part}-target", str(target)]
    return words


def _corpus_label(corpus: Corpus) -> str:
    """A name for the run's files; own corpora are told apart by their text."""
    return corpus.name if corpus.name != "own" else f"own-{corpus.fingerprint()}"
