"""What the metrics say in words: one small rule for each fault, of one parameter through all reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

from adafactor.core.factoring import find_factoring
from adafactor.diagnostics.series import LARGE, Parameter


@dataclass(frozen=True)
class Hit:
    """What a rule says of one parameter."""

    what: str
    figure: str
    change: str
    severity: str = "warning"
    certainty: str = "certain"
    weight: float = 0.0  # how bad it is, to name the worst


# ---- steps that are not taken, or in vain


def not_finite(p: Parameter) -> Hit | None:
    """Steps were left out, or taken with numbers that are none."""
    if any(not math.isfinite(value) for value in p.values("rms_update")):
        what = "RMS(U) is not a finite number, and this update was applied: the parameter is lost."
        change = 'Go back to a checkpoint; on_nonfinite="skip" or "raise" keeps such gradients out.'
        return Hit(what, "RMS(U) is NaN or infinite", change, weight=math.inf)
    skipped = p.records[-1].skipped
    if not skipped:
        return None
    what = "Gradients were NaN, infinite or too large to square; these parameters were not stepped then."
    if all(other.records[-1].skipped for other in p.everyone if other.taken or other.records[-1].skipped):
        change = "It is every parameter, so the loss itself is not finite: look at the batches and the loss, and lower "
        change += "lr or warm it up."
        change += " In float16 use a GradScaler." if p.dtype == "float16" else ""
    else:
        change = "It is not every parameter, so the loss is finite and backward overflows in these layers: "
        change += "compute them in float32 or bfloat16, or " if p.dtype == "float16" else ""
        change += "bound what goes in, and look for a division, log or square root of 0."
    since = skipped - p.records[0].skipped
    figure = f"{skipped} steps skipped" + (f", {since} of them since the first report" if len(p.records) > 1 else "")
    return Hit(what, figure, change + ' on_nonfinite="raise" stops at the first.', weight=skipped)


def unused(p: Parameter) -> Hit | None:
    """Others step, this one never gets a gradient."""
    most = max(other.taken for other in p.everyone)
    if p.taken or p.records[-1].skipped or not most or not p.trainable:
        return None
    what = "No gradient arrives: these parameters are not part of the loss."
    change = "Use them in forward(), or set requires_grad=False, or leave them out of the optimizer."
    return Hit(what, f"0 steps, where others took {most}", change)


def zero_gradient(p: Parameter) -> Hit | None:
    """U is exactly zero."""
    if not p.stepped or any(record.rms_update for record in p.latest):
        return None
    what = "The gradient arrives and is all zero: these parameters do not learn."
    change = (
        "Look for what cuts the gradient: a multiplication by zero, dead ReLUs, a mask that hides everything, or "
        "float16 gradients that underflow without a GradScaler."
    )
    return Hit(what, f"RMS(U) 0 {p.seen(len(p.latest))}", change, certainty=p.certainty(len(p.stepped)))


def no_step_size(p: Parameter) -> Hit | None:
    """The step size is zero, and not only for the first step of a warm-up."""
    if len(p.stepped) < 2 or any(record.step_size for record in p.latest):
        return None
    change = "Look at the group's lr and at the scheduler: has it come to its end?"
    return Hit("The step size is zero: nothing moves.", f"step size 0 {p.seen(len(p.latest))}", change)


UNIT_ROUNDOFFS = 1 / 8  # of eps: with a smaller relative change, most elements of a normal matrix stay where they are


def lost_to_rounding(p: Parameter) -> Hit | None:
    """The change is below the resolution of the parameter's dtype."""
    if p.dtype not in ("bfloat16", "float16") or p.settings.rounding != "nearest":
        return None
    moved, eps = p.median("relative_change"), torch.finfo(getattr(torch, p.dtype)).eps
    if not 0 < moved < eps * UNIT_ROUNDOFFS:
        return None
    what = f"Steps are below the resolution of {p.dtype}: rounding puts most elements back where they were."
    figure = f"a step changes {moved:.1e} of the parameter; the halfway points are {eps / 4:.1e} to {eps / 2:.1e} away"
    change = (
        'rounding="stochastic" (no more memory) or rounding="kahan" (2 bytes a parameter more); or keep these '
        "parameters in float32; or a larger lr, if that is right otherwise."
    )
    return Hit(what, figure, change, certainty=p.certainty(len(p.stepped)), weight=-moved)


# ---- RMS(U) of a second moment that is old, or that does not fit (§5)

# Of the GPT of docs/diagnostics.md, trained with the defaults, nine of ten RMS(U) are between 0.5 and 1.8. The largest
# is 4.4, but clipped. With the paper's unstable setting four of five tensors jump above 4, and stay at 0.01–0.2 else.
JUMP = 4.0  # RMS(U) of a single step that is no chance
HIGH = 2.0  # RMS(U) that is too high if it is so often
OFTEN = 1 / 4  # of the reports; without clipping three of them are enough
LOW = 0.25  # RMS(U) that is too low if it is so mostly
BEYOND = 1.5  # times what an up-to-date unfactored estimate could give
ALWAYS = 0.99  # of the steps
ENOUGH = 200  # steps, to say "always"


def out_of_date(p: Parameter) -> Hit | None:
    """RMS(U) is far above 1, and the age of V̂ can explain it (§5)."""
    if p.count < LARGE or poor_fit(p):
        return None
    values = p.values("rms_update")
    high, jumps = (sum(value > limit for value in values) for limit in (HIGH, JUMP))
    often = OFTEN * len(values) if p.clipped else min(3, OFTEN * len(values))
    # now and then is what clipping is for
    if high < max(often, 1 if len(values) == 1 else 2) and (p.clipped or not jumps):
        return None
    what = "RMS(U) is far above 1: the second moment is out of date, and updates are larger than meant."
    figure = f"RMS(U) at most {max(values):.3g}, {median(values):.2g} in the median, above {HIGH:g} {p.seen(high)}"
    severity, certainty = "note" if p.clipped else "warning", "likely" if high >= 3 else "possible"
    return Hit(what, figure, _fresher(p), severity, certainty, max(values))


def poor_fit(p: Parameter) -> Hit | None:
    """RMS(U) is so far above 1 that no age of V̂ explains it: then the factors do not fit."""
    s = p.settings
    if p.averaged or find_factoring(p.shape, s.factored, s.axes, s.min_factored).estimator == "full":
        return None
    # the largest RMS(U) of an unfactored V̂: G² ≤ V̂/(1 − β̂₂ₜ), whatever came before
    bounds = [((1 - r.beta2) ** -0.5, r.rms_update) for r in p.stepped if r.beta2 < 1]
    beyond = [(value / bound, bound, value) for bound, value in bounds if value > max(HIGH, BEYOND * bound)]
    if not beyond or len(beyond) < OFTEN * len(p.stepped):
        return None
    _, bound, value = max(beyond)
    what = "The factors do not fit: no whole second moment, however old, could give an RMS(U) that large."
    figure = f"RMS(U) {value:.3g}, more than 1/sqrt(1 - beta2) = {bound:.3g}; likewise {p.seen(len(beyond))}"
    change = (
        "Other `axes` for a tensor of more than two, or factored=False in a group of their own (n * m numbers instead "
        "of n + m)."
    )
    return Hit(what, figure, change, "note" if p.clipped else "warning", weight=value)


def too_small(p: Parameter) -> Hit | None:
    """RMS(U) is far below 1: V̂ remembers gradients that are gone."""
    values = p.values("rms_update")
    low = sum(0 < value < LOW for value in values)
    if p.averaged or p.count < LARGE or not low or low < len(values) / 2:
        return None
    what = "RMS(U) is far below 1: the second moment remembers larger gradients, and updates are smaller than meant."
    figure = f"RMS(U) {median(values):.2g} in the median, below {LOW:g} {p.seen(low)}"
    change = f"Nothing, if training has come to its end. After a jump of the gradient: {_faster_decay(p)}."
    return Hit(what, figure, change, "note", p.certainty(low), -median(values))


def always_clipped(p: Parameter) -> Hit | None:
    """Every update is cut to the same RMS."""
    d = p.settings.clip
    if p.taken < ENOUGH or d is None:
        return None
    rate = sum(record.clip_rate * record.steps for record in p.stepped) / p.taken
    if not rate >= ALWAYS:
        return None
    what = f"Clipped all the time: every update has RMS {d:g}, whatever the gradient's size."
    figure = f"clipped in {rate:.0%} of {p.taken} steps, RMS(U) {p.median('rms_update'):.2g} in the median"
    change = f"Nothing, if the loss goes down; the steps are then of RMS lr * {d:g} exactly. Else "
    change += ("clip=1.0, the paper's value, or " if d < 1 else "") + f"{_faster_decay(p)}."
    return Hit(what, figure, change, "note", weight=p.median("rms_update"))


def never_forgets(p: Parameter) -> Hit | None:
    """A setting under which the first gradients keep their weight for ever (§7.2)."""
    s, c = p.settings, p.settings.decay_rate
    if s.beta2 is not None or s.beta2_max is not None or c <= 1:
        return None
    what = "decay_rate is above 1: the first gradients keep their weight for ever (section 7.2 of the paper)."
    return Hit(what, f"decay_rate={c:g}", "decay_rate=0.8, the paper's value.", weight=c)


def _faster_decay(p: Parameter) -> str:
    """Say what lets V̂ forget faster than it does."""
    s = p.settings
    if s.beta2 is not None:
        return f"beta2=None with decay_rate=0.8, which forgets faster at first, in place of beta2={s.beta2:g}"
    if s.decay_rate > 0.8:
        return f"a decay_rate of 0.8 in place of {s.decay_rate:g}"
    return f"a decay_rate below {s.decay_rate:g} (row K of the paper's Table 2 has 0.5)"


def _fresher(p: Parameter) -> str:
    """Say what keeps V̂ up to date, with what is set now in mind."""
    ways = f"{_faster_decay(p)}; a warm-up (schedules.warmup) or a lower lr."
    if p.clipped:
        return f"Clipping holds the update at RMS {p.settings.clip:g}, so this may do. Else: {ways}"
    return f"clip=1.0 (in Table 2 of the paper rows A and C fail without warm-up, H and J with it do not); {ways}"


# ---- steps too large or too small for the parameter

# The limits are from tests/diagnostics/runs.py and from the GPT of docs/diagnostics.md, at lr from 3e-4 to 0.3:
# where the loss goes down as it should, no step is above 0.1 of a matrix and none grows to 2.3 times its scale.
OVERWRITTEN = 0.15  # of a matrix in one step
GROWN = 2.0  # RMS(X) against its least; the first report may come when it has grown already
OUTGROWN = 3.0  # RMS(X) against the matrix's scale
SLOW = 2e-3  # lr of relative steps: the defaults have 1e-2, and AdamW is hardly ever given more than 1e-3
STILL = 1e-6  # relative change of absolute steps: a thousand of them are a thousandth of the parameter


def overwritten(p: Parameter) -> Hit | None:
    """A step replaces a good part of a matrix.

    The step is αₜ, that of an update of RMS 1: after a few of these gradients may vanish, and the real steps with them.
    """
    if not p.large_matrix or not p.stepped:
        return None
    sizes = [max(p.scale, size) for size in p.values("rms_parameter")]
    alphas = p.values("step_size")
    moves = [alpha / size for alpha, size in zip(alphas, sizes, strict=True)]
    what = "A step changes much of the parameter: what it has learnt is overwritten within a few steps."
    if p.settings.relative:
        change = "Lower lr: with relative steps it is the share of the parameter that a step changes, 1e-2 by default."
    else:
        change = "Lower lr, by ten for a start; or the defaults (relative=True, lr=1e-2), whose steps are at most a "
        change += "hundredth of the parameter."
        # absolute steps may have made the parameter so large by now that they look small
        least = min(sizes)
        if max(moves) <= OVERWRITTEN < max(alphas) / least:
            figure = f"steps of {max(alphas):.2g} have made RMS(X) {max(sizes):.2g}, from {least:.2g}"
            return Hit(what, figure, change, certainty=p.certainty(len(alphas)), weight=max(alphas) / least)
    large = sum(move > OVERWRITTEN for move in moves)
    if not large:
        return None
    figure = f"a step changes {max(moves):.0%} of the parameter, more than {OVERWRITTEN:.0%} {p.seen(large)}"
    return Hit(what, figure, change, certainty=p.certainty(large), weight=max(moves))


def growing(p: Parameter) -> Hit | None:
    """A matrix becomes large: steps that are too long do not cancel out, or nothing bounds the loss."""
    sizes = p.values("rms_parameter")
    if not p.large_matrix or not sizes or not sizes[-1] > max(OUTGROWN * p.scale, GROWN * min(sizes)):
        return None
    ratio = sizes[-1] / min(sizes) if min(sizes) else math.inf
    what = "The parameter grows, and its outputs with it: steps are too long, or nothing bounds the loss."
    change = "Lower lr, or let it decay; weight_decay for matrices; look whether the loss has the right sign."
    figure = f"RMS(X) {sizes[-1]:.2g}, {ratio:.1f} times its least"
    return Hit(what, figure, change, certainty=p.certainty(len(p.stepped)), weight=ratio)


def hardly_moves(p: Parameter) -> Hit | None:
    """No step of a matrix is large enough to matter in some thousand steps, and none is about to become so."""
    matrices = [other for other in p.everyone if len(other.shape) > 1 and other.stepped]
    if p not in matrices or not all(map(_slow, matrices)):
        return None
    rates = _rates(p)
    # one report does not show a schedule; else it may be at its end, or still in its warm-up
    if len(rates) < 2 or rates[-1] == 0 or rates[-1] > 1.01 * rates[0]:
        return None
    if p.settings.relative:
        figure = f"lr at most {max(rates):.1g} with relative=True: a step changes that share of the parameter"
        change = (
            "This looks like AdamW's lr, which relative=False, lr_decay=None takes as it is; the default of relative "
            "steps is 1e-2. Nothing, if a trained model is meant to change little."
        )
    else:
        figure = f"a step changes at most {max(p.values('relative_change')):.1g} of the parameter"
        change = "A larger lr, if the loss does not go down."
    what = "Steps are so small that these parameters hardly move."
    return Hit(what, figure, change, "note", p.certainty(len(p.stepped)), -max(rates))


def _slow(p: Parameter) -> bool:
    """Was lr, and not its decay with time, too small for a matrix to move in all reports?"""
    if not p.settings.relative:
        return max(p.values("relative_change")) < STILL
    return max(_rates(p)) < min(SLOW, 0.9 / math.sqrt(max(1, p.t)))


def _rates(p: Parameter) -> list[float]:
    """Return what lr was, as far as its decay with time lets it be seen."""
    if not p.settings.relative:
        return p.values("step_size")
    sizes = [max(record.rms_parameter, p.settings.eps[1]) for record in p.stepped]
    # with eps[1]=0 a parameter of zeros has no step size and shows no lr
    return [alpha / size if size else 0.0 for alpha, size in zip(p.values("step_size"), sizes, strict=True)]


def on_the_floor(p: Parameter) -> Hit | None:
    """The step of a matrix is ε₂·ρₜ and not RMS(X)·ρₜ. Vectors that start at zero are meant to be there for long."""
    size, alpha, eps2 = p.median("rms_parameter"), p.median("step_size"), p.settings.eps[1]
    if not p.settings.relative or not p.large_matrix or not (size < eps2 and alpha > 0):
        return None
    what = "RMS(X) is below eps[1], so that the step is eps[1] * lr: fixed, and slow for a matrix that starts at zero."
    figure = f"RMS(X) {size:.1e}, below eps[1]={eps2:g}; step size {alpha:.1e}, so that {eps2 / alpha:.0f} steps in "
    figure += "one direction reach it"
    change = (
        "Nothing, if it is to stay small. To let it grow faster (a LoRA's B, a zero-initialised output): a larger "
        "eps[1], or relative=False with an lr of its own, in a group of its own."
    )
    return Hit(what, figure, change, "note", p.certainty(len(p.stepped)), -size)


# causes before what comes of them, since findings are shown in this order
RULES: dict[str, Callable[[Parameter], Hit | None]] = {
    rule.__name__.replace("_", " "): rule
    for rule in (
        *(unused, no_step_size, overwritten, hardly_moves, lost_to_rounding, never_forgets, poor_fit, out_of_date),
        *(not_finite, growing, zero_gradient, too_small, on_the_floor, always_clipped),
    )
}

# ---- the loss, of the whole model


def loss_grows(losses: Sequence[float]) -> Hit | None:
    """The loss has come up by more than half of what it had gone down, and by more than it wavers."""
    if len(losses) < 5:
        return None
    if bad := sum(not math.isfinite(loss) for loss in losses):
        change = "Look at the batches and the loss; lower lr or warm it up."
        return Hit("The loss is not a finite number.", f"NaN or infinite in {bad} of {len(losses)} losses", change)
    size = max(2, len(losses) // 10)
    means = [fmean(losses[i : i + size]) for i in range(len(losses) % size, len(losses), size)]
    least, last = min(losses[0], *means), means[-1]
    wavers = median(abs(b - (a + c) / 2) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False))
    if last - least <= max((losses[0] - least) / 2, 5 * wavers, abs(least) / 50):
        return None
    change = (
        "Other findings say why. Without any, look at the data from there on and at the sign of the loss; else go back "
        "to a checkpoint from before and lower lr."
    )
    figure = f"{losses[0]:.3g} at first, {least:.3g} at its least, {last:.3g} at the end"
    return Hit("The loss grows.", figure, change)
