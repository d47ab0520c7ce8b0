"""What depends on a group's settings and t alone: the one place to change for a new scalar keyword.

`row_of` makes a row of a table of the settings of a group, and `write_rates` makes of it the rates of a step, as
`Settings.rates` does for the other backends: on the device, where t is, so that the host need not wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from adafactor.core.settings import Settings
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.elements import mix

# ---- numbers: float64, the settings of a group, uploaded when they have changed
(
    LR,
    DECAYS,  # 1: ρₜ = min(lr, 1/√t)
    RELATIVE,
    BETA1,
    OF_GRADIENT,
    BETA2,  # negative: 1 − t^−c
    DECAY_RATE,  # c
    BETA2_MAX,  # 1: no bound
    CLIP,  # 0: none
    EPS1,
    EPS2,
    WEIGHT_DECAY,
    DECAY_BY,  # what it is multiplied by, one of DECAYS_BY; a positive number lr₀: ρₜ²/lr₀
    SIGN,
    IGNORE,
) = map(tl.constexpr, range(15))
NUMBERS = tl.constexpr(15)
BY_RHO, BY_ALPHA, BY_LR, BY_CONSTANT = map(tl.constexpr, range(0, -4, -1))
DECAYS_BY = {"rho": BY_RHO, "alpha": BY_ALPHA, "lr": BY_LR, "constant": BY_CONSTANT}


def row_of(s: Settings) -> tuple[float, ...]:
    """Return the numbers of a group; a learning rate that lies on a device is copied there, later."""
    row: list[float] = [
        0.0 if isinstance(s.lr, Tensor) else s.lr,
        s.lr_decay == "rsqrt",
        s.relative,
        s.beta1,
        s.momentum_of == "gradient",
        -1.0 if s.beta2 is None else s.beta2,
        s.decay_rate,
        1.0 if s.beta2_max is None else s.beta2_max,
        s.clip or 0.0,
        *s.eps,
        s.weight_decay,
        DECAYS_BY[s.weight_decay_by].value if isinstance(s.weight_decay_by, str) else s.weight_decay_by,
        -1.0 if s.maximize else 1.0,
        s.on_nonfinite == "ignore",
    ]
    return tuple(map(float, row))


@triton.jit
def corrected_decay(t, beta):
    """β·(1 − βᵗ⁻¹)/(1 − βᵗ) (§7.1)."""
    log = tl.log(tl.where(beta > 0, beta, 0.5))
    decay = beta * (1.0 - tl.exp((t - 1.0) * log)) / (1.0 - tl.exp(t * log))
    return tl.where(beta > 0, decay, 0.0)


@triton.jit
def write_rates(tensor_ptr, group_ptr, note_ptr):
    """Note the rates of a tensor's step; of β̂₂ₜ and 1 − β̂₂ₜ the small one is not taken from the other."""
    t = tl.load(tl.load(tensor_ptr + f.STEP).to(tl.pointer_type(tl.float32))).to(tl.float64) + 1.0
    beta1, beta2 = tl.load(group_ptr + BETA1), tl.load(group_ptr + BETA2)
    increasing = tl.exp(-tl.load(group_ptr + DECAY_RATE) * tl.log(t))
    increasing = tl.maximum(increasing, 1.0 - tl.load(group_ptr + BETA2_MAX))
    constant = corrected_decay(t, tl.where(beta2 < 0, 0.5, beta2))
    tl.store(note_ptr + f.W2, tl.where(beta2 < 0, increasing, 1.0 - constant))
    tl.store(note_ptr + f.BETA2, tl.where(beta2 < 0, 1.0 - increasing, constant))
    tl.store(note_ptr + f.W1, 1.0 - tl.where(tl.load(group_ptr + OF_GRADIENT) > 0, corrected_decay(t, beta1), beta1))
    lr = tl.load(group_ptr + LR)
    rho = tl.where((tl.load(group_ptr + DECAYS) != 0) & (lr * lr * t > 1.0), 1.0 / tl.sqrt(t), lr)
    tl.store(note_ptr + f.RHO, rho)
    by = tl.load(group_ptr + DECAY_BY)
    rate = tl.where(by == BY_LR, lr, tl.where(by == BY_CONSTANT, 1.0, rho))  # αₜ is not known yet
    rate = tl.where(by > 0, rho * rho / tl.where(by > 0, by, 1.0), rate)
    tl.store(note_ptr + f.SHARE, rate * tl.load(group_ptr + WEIGHT_DECAY))
    t_word, zero = t.to(tl.int64).to(tl.uint32), tl.full((), 0, tl.uint32)
    tl.store(note_ptr + f.KEY1, mix(t_word ^ tl.load(tensor_ptr + f.ROOT1).to(tl.uint32), zero).to(tl.float64))
    tl.store(note_ptr + f.KEY2, mix(t_word ^ tl.load(tensor_ptr + f.ROOT2).to(tl.uint32), zero).to(tl.float64))
