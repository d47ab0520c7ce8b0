"""`adafactor run`: start a script or a module in which transformers' Adafactor is `adafactor.hf.Adafactor`."""

from __future__ import annotations

import argparse
import inspect
import os
import runpy
import shlex
import sys
from functools import partial, wraps
from pathlib import Path
from typing import Any

from adafactor import hf, trainers
from adafactor.core.settings import read_text

VARIABLE = "ADAFACTOR_ARGS"
IN_BACKWARD = "step_in_backward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    example = "such as rounding=stochastic; may be given again"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=f"a keyword of adafactor.Adafactor, {example}")
    add("--step-in-backward", action="store_true", help="step inside backward in transformers' Trainer")
    add("-m", dest="is_module", action="store_true", help="what follows is the name of a module, as for python -m")
    add("script", help="what is run")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.description = f"""{parser.description}

More keywords may be in the environment, {VARIABLE}='rounding=stochastic {IN_BACKWARD}=true'.
--set goes before them, and both before what the script gives. Nothing is changed on disk."""


def run(arguments: argparse.Namespace) -> int:
    """Replace the class, say so, and run what is asked for; its exit status is its own."""
    keywords = _keywords([*shlex.split(os.environ.get(VARIABLE, "")), *arguments.set])
    in_backward = keywords.pop(IN_BACKWARD, False) or arguments.step_in_backward
    if not arguments.is_module and not Path(arguments.script).is_file():
        launcher = f"; to launch it, write `{arguments.script} ... -m adafactor run train.py`"
        hint = launcher if arguments.script in ("accelerate", "torchrun", "deepspeed") else ""
        raise ValueError(f"{arguments.script} is not a file{hint}")
    replace(keywords, in_backward)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        words = [f"{name}={value}" for name, value in keywords.items()] + ["stepping in backward"] * in_backward
        print(f"adafactor run: transformers' Adafactor is adafactor.hf.Adafactor({', '.join(words)})", file=sys.stderr)
    sys.argv = [arguments.script, *arguments.arguments]
    sys.path[0] = os.getcwd() if arguments.is_module else str(Path(arguments.script).resolve().parent)
    start = partial(runpy.run_module, alter_sys=True) if arguments.is_module else runpy.run_path
    try:
        start(arguments.script, run_name="__main__")
    except Exception:  # the script's own, with its traceback: not a mistake on our command line
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def replace(keywords: dict[str, Any], in_backward: bool = False) -> None:
    """Put `adafactor.hf.Adafactor` with these keywords wherever transformers has its own, or imports it later."""
    try:
        from transformers import optimization
    except ImportError as missing:
        raise ImportError(f"transformers is needed, whose Adafactor is to be replaced: {missing}") from missing
    theirs, ours = optimization.Adafactor, _preset(keywords)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "transformers" and vars(module).get("Adafactor") is theirs:
            module.Adafactor = ours  # type: ignore[attr-defined]
    if in_backward:
        from transformers import Trainer

        Trainer.create_optimizer = _attaching(Trainer.create_optimizer)


def _preset(keywords: dict[str, Any]) -> type[hf.Adafactor]:
    """Return the class with these keywords, whatever else it is given; a name that it does not have is refused now.

    Values are checked with what the script gives, when it makes the optimizer: many are right only together.
    """
    for name in keywords:
        if name in hf.THEIR_WORD:
            raise ValueError(f"--set or {VARIABLE}: transformers' word for {name} is {hf.THEIR_WORD[name]}")
        if name not in inspect.signature(hf.Adafactor).parameters:
            raise ValueError(f"--set or {VARIABLE}: adafactor.hf.Adafactor has no keyword {name}")

    def init(self: hf.Adafactor, *args: Any, **given: Any) -> None:
        hf.Adafactor.__init__(self, *args, **{**given, **keywords})

    return type("Adafactor", (hf.Adafactor,), {"__init__": init, "__doc__": hf.Adafactor.__doc__})


def _attaching(create: Any) -> Any:
    """Wrap a Trainer's `create_optimizer`, so that our optimizer steps inside backward."""

    @wraps(create)
    def create_optimizer(trainer: Any, *args: Any, **keywords: Any) -> Any:
        is_new = trainer.optimizer is None
        made = create(trainer, *args, **keywords)
        if is_new and isinstance(made, hf.Adafactor):
            trainers.attach_in_trainer(trainer.model, made, **trainers.in_backward(trainer.args))
        return made

    return create_optimizer


def _keywords(words: list[str]) -> dict[str, Any]:
    pairs = [word.partition("=") for word in words]
    for name, equals, _ in pairs:
        if not (name.isidentifier() and equals):
            raise ValueError(f"{name}{equals} is not NAME=VALUE: --set and {VARIABLE} take keywords such as clip=1.0")
    return {name: read_text(value) for name, _, value in pairs}
