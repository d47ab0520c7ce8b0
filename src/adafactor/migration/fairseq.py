"""fairseq's Adafactor, transformers' copy of it, and pytorch_optimizer's descendant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adafactor.migration import arguments as common
from adafactor.migration.form import Arguments, Moments, Peer, Shape, Translation, count, factors, statistics, tensor

KEYS = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
COMPOUNDS = (
    "fairseq multiplies group['lr'] by max(ε₂, RMS(X)) anew with every parameter and every step when scale_parameter "
    "is on and relative_step off, so that its steps vanish (at RMS(X) = 0.05 within 20 steps, to 0 % of ours); ours "
    "takes lr·max(ε₂, RMS(X))"
)


def transformers(theirs: Arguments, step: int | None) -> Translation:
    """Their keywords in ours."""
    return _translate(theirs, step, "transformers' Adafactor")


def fairseq(theirs: Arguments, step: int | None) -> Translation:
    """As transformers', but for an lr that the optimizer itself overwrites."""
    told = _translate(theirs, step, "fairseq's Adafactor")
    if theirs["scale_parameter"] and not theirs["relative_step"]:
        if step is not None and "lr" not in theirs["given"]:
            raise ValueError(
                f"lr={theirs['lr']!r} in the groups is not the one that fairseq was given but that of the last "
                "parameter's last step: pass the real one in arguments={'lr': …}"
            )
        told.notes.append(COMPOUNDS)
    return told


def _translate(theirs: Arguments, step: int | None, peer: str) -> Translation:
    if step is None and theirs["lr"] is not None and theirs["relative_step"]:
        raise ValueError(f"{peer} takes lr={theirs['lr']!r} only with relative_step=False")
    told = common.step_size(theirs, step, peer)
    if theirs["scale_parameter"] and theirs["weight_decay"]:
        told.notes.append(common.DECAY_BY_ALPHA.format(peer=peer))
    told.keywords |= {
        "relative": theirs["scale_parameter"],
        "decay_rate": -theirs["decay_rate"],
        "beta1": theirs["beta1"] or 0.0,
        "eps": tuple(theirs["eps"]),
        "clip": common.clip(theirs["clip_threshold"]),
        "weight_decay": theirs["weight_decay"],
    }
    return told


def pytorch_optimizer(theirs: Arguments, step: int | None) -> Translation:
    """Its keywords in ours, as releases from 4.0 on understand them."""
    peer = "pytorch_optimizer's AdaFactor"
    told = common.step_size(theirs, step, peer)
    beta1, cap = theirs["betas"]
    eps1 = 1e-7 if theirs["momentum_dtype"] == torch.float16 else theirs["eps1"]
    told.keywords |= {
        "relative": theirs["scale_parameter"],
        "beta1": beta1 or 0.0,
        "eps": (eps1, theirs["eps2"]),
        "clip": common.clip(theirs["clip_threshold"]),
        "maximize": theirs["maximize"],
        **common.capped(-theirs["decay_rate"], cap, step, peer, told.notes),
        "weight_decay": _decay(theirs, told, peer),
    }
    if beta1 and theirs["momentum_dtype"] in (torch.float16, torch.bfloat16):
        dtype = str(theirs["momentum_dtype"]).removeprefix("torch.")
        told.notes.append(common.HALF_MOMENTUM.format(peer=peer, dtype=dtype))
    for argument, size in (("ams_bound", AMS_BOUND_SIZE), ("cautious", CAUTIOUS_SIZE)):
        if theirs.get(argument):
            told.notes.append(common.NO_COUNTERPART.format(peer=peer, argument=argument, size=size))
    return told


AMS_BOUND_SIZE = "20 steps end 114 % of the distance travelled apart"
CAUTIOUS_SIZE = "20 steps end 22 % of the distance travelled apart"
L2_SIZE = (
    "20 steps with weight_decay=0.01 and gradients of RMS 1 end 9 % of the distance travelled apart, of RMS 0.01 81 %"
)


def _decay(theirs: Arguments, told: Translation, peer: str) -> float:
    decay: float = theirs["weight_decay"]
    if not decay:
        return 0.0
    if not theirs["weight_decouple"]:
        told.notes.append(common.NO_COUNTERPART.format(peer=peer, argument="weight_decouple=False", size=L2_SIZE))
        return 0.0
    if theirs["fixed_decay"]:
        return common.raw_decay(decay, told.keywords["lr"], peer, told.notes)
    if theirs["scale_parameter"]:
        told.notes.append(common.DECAY_BY_ALPHA.format(peer=peer))
    return decay


def read(theirs: Arguments, entry: Mapping[str, Any], shape: Shape | None, where: str) -> Moments:
    """`exp_avg_sq_row` (…, n) and `exp_avg_sq_col` (…, m), or `exp_avg_sq`; `exp_avg` where there is momentum."""
    # pytorch_optimizer counts steps in the group
    step = count(entry if "step" in entry else theirs, "step", where)
    momentum = tensor(entry, "exp_avg", where) if "exp_avg" in entry else None
    found = statistics(entry, KEYS, where)
    if len(found) == 1:
        return Moments(tuple(found[0].shape), step, whole=found[0], momentum=momentum)
    row, col = found
    full = (*row.shape, *col.shape[-1:])
    return Moments(full, step, over=factors(full, (-2, -1), row, col, where), momentum=momentum)


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
TRANSFORMERS = Peer("transformers' Adafactor", DEFAULTS, transformers, read)
FAIRSEQ = Peer("fairseq's Adafactor", DEFAULTS, fairseq, read)
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
    pytorch_optimizer,
    read,
    internal=frozenset({"step"}),
    unsaved=("decay_rate", "clip_threshold", "momentum_dtype", "maximize"),
    doubt=(
        "the state is taken to be of pytorch_optimizer 4.0 or later: 3.10 scaled small updates up to RMS 1 instead of "
        "clipping large ones (20 steps end 10 % of the distance travelled apart), and releases up to 3.9 read "
        "scale_parameter the other way round"
    ),
)
