"""The command `adafactor`: each sub-command is a module that describes its arguments and runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from adafactor import __version__

# name → (module with `add_arguments(parser)` and `run(arguments) -> int`, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("adafactor.bench.command", "Time a step of ours and of every other optimizer on this machine."),
    "plan": ("adafactor.planning.command", "What training a model takes: memory part by part, and what a step sends."),
    "warm": ("adafactor.warm", "Compile the step for CPUs now, as while an image is built, so that no training waits."),
    "migrate": ("adafactor.migration.command", "Convert another Adafactor's checkpoint into ours, or back."),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one sub-command; its exit status is returned, and a mistake of the user's is one line on stderr."""
    parser = argparse.ArgumentParser("adafactor", description="Adafactor for PyTorch: tools around the optimizer.")
    parser.add_argument("--version", action="version", version=f"adafactor {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        command = importlib.import_module(module)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    arguments = parser.parse_args(words)
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError, ImportError) as mistake:
        print(f"adafactor {arguments.command}: {mistake}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
