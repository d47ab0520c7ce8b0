"""pytorch_optimizer's AdaFactor, as releases from 4.0 on understand its arguments."""

from __future__ import annotations

import torch

from adafactor.migration.state import HALF, Arguments
from adafactor.migration.transformers import read
from adafactor.migration.translate import DECAY_BY_ALPHA, HALF_MOMENTUM, Peer, Translation, clip

AMS_BOUND_SIZE = "20 steps end 114 % of the distance travelled apart"
CAUTIOUS_SIZE = "20 steps end 22 % of the distance travelled apart"
L2_SIZE = (
    "20 steps with weight_decay=0.01 and gradients of RMS 1 end 9 % of the distance travelled apart, of RMS 0.01 81 %"
)


def _express(translation: Translation, args: Arguments, step: int | None) -> None:
    translation.set_step_size(args, step)
    beta1, cap = args["betas"]
    translation.keywords |= {
        "relative": args["scale_parameter"],
        "beta1": beta1 or 0.0,
        "eps": (1e-7 if args["momentum_dtype"] == torch.float16 else args["eps1"], args["eps2"]),
        "clip": clip(args["clip_threshold"]),
        "maximize": args["maximize"],
        "weight_decay": args["weight_decay"] or 0.0,
    }
    translation.set_capped_beta2(-args["decay_rate"], cap, step)
    if args["weight_decay"] and not args["weight_decouple"]:
        translation.leave_out(f"{translation.peer}'s weight_decouple=False", L2_SIZE)
        translation.keywords["weight_decay"] = 0.0
    elif args["weight_decay"] and args["fixed_decay"]:
        translation.set_raw_decay(args["weight_decay"])
    elif args["weight_decay"] and args["scale_parameter"]:
        translation.note(DECAY_BY_ALPHA)
    if beta1 and args["momentum_dtype"] in HALF:
        translation.note(HALF_MOMENTUM, dtype=str(args["momentum_dtype"]).removeprefix("torch."))
    for argument, size in (("ams_bound", AMS_BOUND_SIZE), ("cautious", CAUTIOUS_SIZE)):
        if args.get(argument):
            translation.leave_out(f"{translation.peer}'s {argument}", size)


PYTORCH_OPTIMIZER = Peer(
    "pytorch_optimizer's AdaFactor",
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
    _express,
    read,
    internal=frozenset({"step"}),
    unsaved=("decay_rate", "clip_threshold", "momentum_dtype", "maximize"),
    doubt=(
        "the state is taken to be of pytorch_optimizer 4.0 or later: 3.10 scaled small updates up to RMS 1 instead of "
        "clipping large ones (20 steps end 10 % of the distance travelled apart), and releases up to 3.9 read "
        "scale_parameter the other way round"
    ),
)
