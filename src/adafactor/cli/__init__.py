"""The command `adafactor`: each sub-command is a module that describes its arguments and runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from adafactor import __version__

# name → (module with `add_arguments(parser)` and `run(arguments) -> int`, one line of help, an example)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "plan": (
        "adafactor.planning.command",
        "Show whether training a model fits into a memory, and what to write for it.",
        "adafactor plan llama-8b --budget 24GiB",
    ),
    "migrate": (
        "adafactor.migration.command",
        "Convert a checkpoint of torch's or transformers' Adafactor or of AdamW into ours, or back.",
        "adafactor migrate theirs.pt ours.pt",
    ),
    "run": (
        "adafactor.cli.run",
        "Run a training script with this Adafactor in place of transformers'.",
        "adafactor run --set rounding=stochastic train.py --optim adafactor",
    ),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit status; a mistake of the user's is a message on stderr."""
    parser = argparse.ArgumentParser("adafactor", description="Tools for Adafactor in PyTorch.")
    parser.add_argument("--version", action="version", version=f"adafactor {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands", required=True)
    for name, (module, text, example) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text, epilog=f"example: {example}")
        command = importlib.import_module(module)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    arguments = parser.parse_args(words)
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError, ImportError) as mistake:
        print(f"adafactor {arguments.command}: {mistake}", file=sys.stderr)
        return 2
