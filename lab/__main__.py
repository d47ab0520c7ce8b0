"""The command line: `python -m lab --help`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lab import commands, experiments
from lab.corpus import PARTS, CorpusError
from lab.presets import SCALES
from lab.rows import ROWS, TABLE_3


def main() -> int:
    """Read the arguments and do what they ask for."""
    arguments = parser().parse_args()
    # stopped by `kill` as by Ctrl-C: child processes end too. A shell's background jobs ignore the latter
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, signal.default_int_handler)
    work: Callable[[argparse.Namespace], int] = arguments.work
    try:
        return work(arguments)
    except CorpusError as error:
        print(error)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. The same command continues where it was.")
        return 130


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="python -m lab",
        description="The experiments of the Adafactor paper on English-German translation. "
        "Begin with `demo` (minutes); `reproduce`"
        " runs all that is missing (hours; it can be stopped and continued).",
    )
    add = top.add_subparsers(title="commands", required=True, metavar="COMMAND").add_parser

    _command(add("demo", help="train Adam and Adafactor side by side, and translate with both"), commands.show_demo)
    _command(add("corpus", help="fetch, clean and split the corpus, and count it"), commands.show_corpus)

    one = _command(add("run", help="one row of Table 2: train, translate, record"), commands.run_one)
    one.add_argument("row", choices=list(ROWS), metavar="ROW", nargs="?", default="O",
                     help=f"one of {' '.join(ROWS)} (default: O, Adafactor)")  # fmt: skip
    _job_options(one)
    one.add_argument("--quiet", action="store_true", help="no progress bar; only a progress file")
    one.add_argument("--device", help="as torch names it (default: cpu, but for `base`, which wants a GPU)")
    one.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    one.add_argument("--bfloat16", action="store_true", help="products in bfloat16 (autocast), weights in float32")
    one.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    one.add_argument("--again", action="store_true", help="forget an earlier result of the same run")

    for name, text, jobs, scale in (
        ("table", "Table 2: all rows, with and without warm-up", experiments.table_2, "mini"),
        ("table3", "Table 3: three embedding schemes", experiments.table_3, "mini"),
    ):
        several = _command(add(name, help=text), commands.run_table)
        several.set_defaults(jobs=jobs)
        _table_options(several, scale)
    _command(add("reproduce", help="everything that is missing, two processes at a time"), commands.reproduce)

    page = _command(add("report", help="what the records say, as one Markdown page"), commands.write_report)
    page.add_argument("--output", type=Path, default=Path("runs/report.md"))
    page.add_argument("--scale", choices=list(SCALES), help="only the runs of this scale; `base` is with Table 3's")
    page.add_argument("--headline", action="store_true", help="only print the sentences of the first pages")
    page.add_argument("--documents", action="store_true", help="also write what docs/ has from the records")
    return top


def _command(sub: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """What all commands share."""
    sub.set_defaults(work=work)
    sub.add_argument("--cache", type=Path, help="folder of corpus, checkpoints and weights (default: in ~/.cache)")
    sub.add_argument("--records", type=Path, help="folder of the results (default: lab/records)")
    sub.add_argument("--wmt", type=Path, metavar="FOLDER", help="the paper's text: the archives of WMT 2014")
    sub.add_argument("--corpus", default="debian", help="debian (default), help, generated or own")
    for part in PARTS:
        for side in ("source", "target"):
            sub.add_argument(f"--{part}-{side}", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    sub.epilog = (
        "A corpus of your own, a sentence a line: --train-source FILE --train-target FILE --dev-source FILE "
        "--dev-target FILE, and --test-source FILE --test-target FILE if there is a test set; not tokenised. "
        "The paper's own experiment: `table --scale base --devices 0-7 --bfloat16 --wmt FOLDER`."
    )
    return sub


def _table_options(sub: argparse.ArgumentParser, scale: str) -> None:
    sub.add_argument("--scale", choices=list(SCALES), default=scale)
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--devices", type=_devices, help="one run on each: 0-7, 0,2 or cpu,cpu (default: two on the CPU)")
    sub.add_argument("--bfloat16", action="store_true", help="products in bfloat16 (autocast), weights in float32")
    sub.add_argument("--compile", action="store_true", help="compile the model with torch.compile")


def _devices(text: str) -> list[str]:
    """`0-2,cpu` → cuda:0, cuda:1, cuda:2, cpu."""
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first):
            found += [f"cuda:{number}" for number in range(int(first), int(last or first) + 1)]
        elif part == "cpu":
            found.append(part)
        else:
            raise argparse.ArgumentTypeError(f"{text!r} must be numbers of GPUs, such as 0-7 or 0,2, or cpu")
    return found


def _job_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--scale", choices=list(SCALES), default="small", help="model, data and length (default: small)")
    sub.add_argument("--warmup", action=argparse.BooleanOptionalAction, default=True, help="of the step size")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--multiplier", type=float, help="of the paper's step size (default: the scale's)")
    sub.add_argument("--embedding", choices=list(TABLE_3), help="untie the softmax, with this embedding scheme")
    sub.add_argument("--checkpoint-seconds", type=float, help="time between checkpoints (default: 30; base: 600)")


if __name__ == "__main__":
    sys.exit(main())
