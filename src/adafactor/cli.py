"""The command `adafactor`: each sub-command is a module that describes its arguments and runs."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
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
    "bench": ("adafactor.bench.command", "Benchmark a step against every other optimizer on this machine."),
    "check": ("adafactor.bench.gpu_check", "Check the step on this GPU, and time it with --bench."),
    "warm": ("adafactor.warm", "Compile the step for CPUs now, so that no training waits for it."),
}
EXAMPLES = {
    "plan": """
        adafactor plan gpt2 --budget 8GiB                  # what fits into 8 GiB?
        adafactor plan mymodel:build --shards 8            # your own model, on 8 devices
    """,
    "migrate": """
        adafactor migrate optimizer.pt ours.pt --from transformers
        adafactor migrate checkpoint-500 --in-place        # the folder of a Trainer
        adafactor migrate ours.pt theirs.pt --from adafactor --to torch
    """,
    "bench": """
        adafactor bench --suite gpt2 --contender adamw-fused cpu
        adafactor bench --model mymodel:build              # the shapes of your own model
    """,
    "check": """
        adafactor check                                    # does the GPU compute the right steps?
        adafactor check --bench                            # and how fast? Prints a block for an issue
    """,
    "warm": """
        adafactor warm                                     # while a container image is built
    """,
}


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line; argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        """End the process with the line on stderr."""
        message = re.sub(r"invalid int value: (.*)", r"\1 must be a whole number", message)
        self.exit(2, f"{self.prog}: {message}\n")


def main(words: Sequence[str] | None = None) -> int:
    """Run one sub-command; its exit status is returned, and a mistake of the user's is one line on stderr."""
    parser = Parser("adafactor", description="Tools for Adafactor in PyTorch.", **_with_examples(EXAMPLES["plan"]))
    parser.add_argument("--version", action="version", version=f"adafactor {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=text, description=text, **_with_examples(EXAMPLES.get(name, f"adafactor {name}"))
        )
        command = importlib.import_module(module)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError, ImportError) as mistake:
        print(f"adafactor {arguments.command}: {mistake}", file=sys.stderr)
        return 2


def _with_examples(lines: str) -> dict[str, Any]:
    """The keywords of a parser whose help ends with these lines as they are."""
    epilog = "examples:\n" + indent(dedent(lines).strip(), "  ")
    return {"epilog": epilog, "formatter_class": argparse.RawDescriptionHelpFormatter}


if __name__ == "__main__":
    sys.exit(main())
