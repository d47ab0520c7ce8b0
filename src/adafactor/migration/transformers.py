"""fairseq's Adafactor, and transformers' copy of it."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from adafactor.migration.state import Arguments, Axes, Shape, read_moments
from adafactor.migration.translate import DECAY_BY_ALPHA, Peer, Translation, clip, step_size

KEYS = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
COMPOUNDS = (
    "fairseq multiplies group['lr'] by max(ε₂, RMS(X)) anew with every parameter and every step when scale_parameter "
    "is on and relative_step off, so that its steps vanish (at RMS(X) = 0.05 within 20 steps, to 0 % of ours); ours "
    "takes lr·max(ε₂, RMS(X))"
)


def _transformers(args: Arguments, step: int | None) -> Translation:
    return _translate(args, step, "transformers' Adafactor")


def _fairseq(args: Arguments, step: int | None) -> Translation:
    """Translate as for transformers, but for an lr that the optimizer itself overwrites."""
    translation = _translate(args, step, "fairseq's Adafactor")
    if args["scale_parameter"] and not args["relative_step"]:
        if step is not None and "lr" not in args["overrides"]:
            raise ValueError(
                f"lr={args['lr']!r} in the groups is not the one that fairseq was given but that of the last "
                "parameter's last step: pass the real one in arguments={'lr': …}"
            )
        translation.notes.append(COMPOUNDS)
    return translation


def _translate(args: Arguments, step: int | None, peer: str) -> Translation:
    if step is None and args["lr"] is not None and args["relative_step"]:
        raise ValueError(f"{peer} takes lr={args['lr']!r} only with relative_step=False")
    translation = step_size(args, step, peer)
    if args["scale_parameter"] and args["weight_decay"]:
        translation.notes.append(DECAY_BY_ALPHA.format(peer=peer))
    translation.keywords |= {
        "relative": args["scale_parameter"],
        "decay_rate": -args["decay_rate"],
        "beta1": args["beta1"] or 0.0,
        "eps": tuple(args["eps"]),
        "clip": clip(args["clip_threshold"]),
        "weight_decay": args["weight_decay"],
    }
    return translation


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
TRANSFORMERS = Peer("transformers' Adafactor", DEFAULTS, _transformers, read)
FAIRSEQ = Peer("fairseq's Adafactor", DEFAULTS, _fairseq, read)
