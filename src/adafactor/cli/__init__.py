"""The command `adafactor`: each sub-command is a module that describes its arguments and runs."""

from __future__ import annotations

import argparse
import codecs
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from textwrap import dedent, indent
from typing import Any, NoReturn

from adafactor import __version__

# name → (module with `add_arguments(parser)` and `run(arguments) -> int`, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("adafactor.planning.command", "Show how much memory it takes to train a model."),
    "migrate": (
        "adafactor.migration.command",
        "Convert a checkpoint of another Adafactor or of AdamW into ours, or back.",
    ),
    "run": ("adafactor.cli.run", "Run a training script with this Adafactor in place of transformers'."),
}
EXAMPLES = {
    "plan": """
        adafactor plan gpt2 --budget 8GiB                  # what fits into 8 GiB, and what to write for it?
        adafactor plan llama-8b --budget 80G --batch 4 --tokens 2048 --checkpointing
        adafactor plan llama-8b --budget 24G --lora 16     # with LoRA
        adafactor plan mymodel:build --shards 8            # your own model, on 8 devices
        adafactor plan --shards 8 1024 --bandwidth 50GB --latency 10    # how long do the collectives of a step take?
    """,
    "migrate": """
        adafactor migrate optimizer.pt ours.pt --from transformers
        adafactor migrate checkpoint-500 --in-place        # the folder of a Trainer
        adafactor migrate ours.pt theirs.pt --from adafactor --to torch
    """,
    "run": """
        adafactor run train.py --optim adafactor           # also: accelerate launch -m adafactor run train.py
        adafactor run --set rounding=stochastic --step-in-backward -m trl.scripts.sft --optim adafactor
    """,
}
BENCH_MOVED = "bench is now a tool of the repository: run `python -m benchmarks` in a checkout of it"

# what is printed instead where the output's encoding lacks a sign, as on Windows or in a pipe
PLAIN = str.maketrans("█▓▒░▚▞·│─−–×…", "#%o:x/.|---x.") | str.maketrans("⁰²³⁹₂", "02392")
INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell makes of a process that ends by these signals


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line; argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        """End the process with the line on stderr."""
        message = re.sub(r"invalid int value: (.*)", r"\1 must be a whole number", message)
        message = re.sub(r"invalid float value: (.*)", r"\1 must be a number", message)
        self.exit(2, f"{self.prog}: {message}\n")


def main(words: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit status."""
    return guard("adafactor", lambda: _run(words))


def guard(program: str, run: Callable[[], int]) -> int:
    """Run what a command does and return its exit status; a mistake of the user's is one line on stderr."""
    codecs.register_error("plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")
    try:
        status = int(run())
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough; without a place to go, the rest would raise at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError, ImportError) as mistake:
        print(f"{program}: {' '.join(str(mistake).split())}", file=sys.stderr)
        return 2


def _run(words: Sequence[str] | None) -> int:
    arguments = _parse(words)
    name = f"adafactor {arguments.command}" if arguments.command else "adafactor"
    return guard(name, lambda: int(arguments.run(arguments)))


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    examples = "\n".join(text.strip().splitlines()[0].strip() for text in EXAMPLES.values())
    parser = Parser("adafactor", description="Tools for Adafactor in PyTorch.", **_with_examples(examples))
    parser.add_argument("--version", action="version", version=f"adafactor {__version__}")
    parser.set_defaults(run=lambda _: print(parser.format_help(), end="") or 0)
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text, **_with_examples(EXAMPLES[name]))
        command = importlib.import_module(module)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    words = sys.argv[1:] if words is None else words
    if list(words[:1]) == ["bench"]:
        parser.error(BENCH_MOVED)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        sub = commands.choices.get(arguments.command, parser)
        near = difflib.get_close_matches(unknown[0].partition("=")[0], sub._option_string_actions, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        sub.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return arguments


def _with_examples(lines: str) -> dict[str, Any]:
    """The keywords of a parser whose help ends with these lines as they are."""
    epilog = "examples:\n" + indent(dedent(lines).strip(), "  ")
    return {"epilog": epilog, "formatter_class": argparse.RawDescriptionHelpFormatter}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What to print for signs that the encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(PLAIN)
    return text.encode("ascii", "replace").decode(), error.end
