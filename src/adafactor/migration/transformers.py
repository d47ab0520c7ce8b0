"""fairseq's Adafactor, and transformers' copy of it."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from adafactor.migration.state import Arguments, Axes, Shape, read_moments
from adafactor.migration.translate import DECAY_BY_ALPHA, Peer, Translation, clip

KEYS = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
COMPOUNDS = (
    "fairseq multiplies group['lr'] by max(ε₂, RMS(X)) anew with every parameter and every step when scale_parameter "
    "is on and relative_step off, so that its steps vanish (at RMS(X) = 0.05 within 20 steps, to 0 % of ours); ours "
    "takes lr·max(ε₂, RMS(X))"
)


def _express(translation: Translation, args: Arguments, step: int | None) -> None:
    if step is None and args["lr"] is not None and args["relative_step"]:
        raise ValueError(f"{translation.peer} takes lr={args['lr']!r} only with relative_step=False")
    translation.set_step_size(args, step)
    if args["scale_parameter"] and args["weight_decay"]:
        translation.note(DECAY_BY_ALPHA)
    translation.keywords |= {
        "relative": args["scale_parameter"],
        "decay_rate": -args["decay_rate"],
        "beta1": args["beta1"] or 0.0,
        "eps": tuple(args["eps"]),
        "clip": clip(args["clip_threshold"]),
        "weight_decay": args["weight_decay"],
    }


def _express_fairseq(translation: Translation, args: Arguments, step: int | None) -> None:
    """As transformers', but for an lr that the optimizer itself overwrites."""
    _express(translation, args, step)
    if args["scale_parameter"] and not args["relative_step"]:
        if step is not None and "lr" not in args["overrides"]:
            raise ValueError(
                f"lr={args['lr']!r} in the groups is not the one that fairseq was given but that of the last "
                "parameter's last step: pass the real one in arguments={'lr': …}"
            )
        translation.note(COMPOUNDS)


def _locate(args: Arguments, row: Tensor, col: Tensor, name: str) -> tuple[Shape, Axes, Tensor, Tensor]:
    """Rows are (…, n), columns (…, m)."""
    return (*row.shape, *col.shape[-1:]), (-2, -1), row, col


read = partial(read_moments, keys=KEYS, locate=_locate)
DEFAULTS = {
    "lr": None,
    "eps": (1e-30, 1e-3),
    "clip_threshold": 1.0,
    "decay_rate": -0.8,
    "beta1": None,
    "weight_decay": 0.0,
    "scale_parameter": True,
    "relative_step": True,
    "warmup_init": False,
}
TRANSFORMERS = Peer("transformers' Adafactor", DEFAULTS, _express, read)
FAIRSEQ = Peer("fairseq's Adafactor", DEFAULTS, _express_fairseq, read)
