"""pytorch_optimizer's AdaFactor, as releases from 4.0 on understand its arguments."""

from __future__ import annotations

import torch

from adafactor.migration.state import Arguments
from adafactor.migration.transformers import read
from adafactor.migration.translate import (
    DECAY_BY_ALPHA,
    HALF_MOMENTUM,
    Peer,
    Translation,
    beta2_with_cap,
    clip,
    raw_decay,
    step_size,
)

NAME = "pytorch_optimizer's AdaFactor"
AMS_BOUND_SIZE = "20 steps end 114 % of the distance travelled apart"
CAUTIOUS_SIZE = "20 steps end 22 % of the distance travelled apart"
L2_SIZE = (
    "20 steps with weight_decay=0.01 and gradients of RMS 1 end 9 % of the distance travelled apart, of RMS 0.01 81 %"
)


def _translate(args: Arguments, step: int | None) -> Translation:
    translation = step_size(args, step, NAME)
    beta1, cap = args["betas"]
    eps1 = 1e-7 if args["momentum_dtype"] == torch.float16 else args["eps1"]
    translation.keywords |= {
        "relative": args["scale_parameter"],
        "beta1": beta1 or 0.0,
        "eps": (eps1, args["eps2"]),
        "clip": clip(args["clip_threshold"]),
        "maximize": args["maximize"],
        **beta2_with_cap(-args["decay_rate"], cap, step, NAME, translation.notes),
        "weight_decay": _weight_decay(args, translation),
    }
    if beta1 and args["momentum_dtype"] in (torch.float16, torch.bfloat16):
        dtype = str(args["momentum_dtype"]).removeprefix("torch.")
        translation.notes.append(HALF_MOMENTUM.format(peer=NAME, dtype=dtype))
    for argument, size in (("ams_bound", AMS_BOUND_SIZE), ("cautious", CAUTIOUS_SIZE)):
        if args.get(argument):
            translation.leave_out(NAME, argument, size)
    return translation


def _weight_decay(args: Arguments, translation: Translation) -> float:
    decay: float = args["weight_decay"]
    if not decay:
        return 0.0
    if not args["weight_decouple"]:
        translation.leave_out(NAME, "weight_decouple=False", L2_SIZE)
        return 0.0
    if args["fixed_decay"]:
        return raw_decay(decay, translation.keywords["lr"], NAME, translation.notes)
    if args["scale_parameter"]:
        translation.notes.append(DECAY_BY_ALPHA.format(peer=NAME))
    return decay


PYTORCH_OPTIMIZER = Peer(
    NAME,
    {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "decay_rate": -0.8,
        "weight_decay": 0.0,
        "weight_decouple": True,
        "fixed_decay": False,
        "clip_threshold": 1.0,
        "ams_bound": False,
        "scale_parameter": True,
        "relative_step": True,
        "warmup_init": False,
        "eps1": 1e-30,
        "eps2": 1e-3,
        "momentum_dtype": torch.bfloat16,
        "foreach": None,
        "maximize": False,
        "cautious": False,
    },
    _translate,
    read,
    internal=frozenset({"step"}),
    unsaved=("decay_rate", "clip_threshold", "momentum_dtype", "maximize"),
    doubt=(
        "the state is taken to be of pytorch_optimizer 4.0 or later: 3.10 scaled small updates up to RMS 1 instead of "
        "clipping large ones (20 steps end 10 % of the distance travelled apart), and releases up to 3.9 read "
        "scale_parameter the other way round"
    ),
)
