"""What figures are no good, and what to change then: one small rule each, of one parameter through all reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

import torch

from adafactor.core.factoring import find_factoring
from adafactor.core.record import Record
from adafactor.core.settings import Settings
from adafactor.diagnostics.report import About

# Of the GPT of docs/diagnostics.md, trained with the defaults, nine of ten RMS(U) are between 0.5 and 1.8. The largest
# is 4.4, but clipped. With the paper's unstable setting four of five tensors jump above 4, and stay at 0.01–0.2 else.
JUMP = 4.0  # RMS(U) of a single step that is no chance
HIGH = 2.0  # RMS(U) that is too high if it is so often
OFTEN = 1 / 4  # of the reports; without clipping three of them are enough
LOW = 0.25  # RMS(U) that is too low if it is so mostly
LARGE = 64  # elements; RMS(U) of a smaller tensor is the mean of too few to say much (§5: "a large weight matrix")
ALWAYS = 0.99  # of the steps
ENOUGH = 200  # steps, to say "always"
# The limits of a step too large or too small are from the runs of studies/diagnoses.py and of that GPT, at lr from 3e-4
# to 0.3: where the loss goes down as it should, no step is above 0.1 of a matrix and none grows to 2.3 times its scale.
OVERWRITTEN = 0.15  # of a matrix in one step
GROWN = 2.0  # RMS(X) against its least; the first report may come when it has grown already
OUTGROWN = 3.0  # RMS(X) against the matrix's scale
SLOW = 2e-3  # lr of relative steps: the defaults have 1e-2, and AdamW is hardly ever given more than 1e-3
STILL = 1e-6  # relative change of absolute steps: a thousand of them are a thousandth of the parameter
BEYOND = 1.5  # times what an up-to-date but whole estimate could give
UNIT_ROUNDOFFS = 1 / 8  # of eps: with a smaller relative change, most elements of a normal matrix stay where they are


@dataclass(frozen=True)
class Parameter:
    """One parameter through all reports."""

    name: str
    shape: tuple[int, ...]
    steps: tuple[int, ...]  # t of each record
    records: tuple[Record, ...]
    about: About | None

    @cached_property
    def stepped(self) -> list[Record]:
        """Those of a time in which it was stepped: the others repeat old figures, which a single one may."""
        single = len(self.records) == 1
        return [r for r in self.records if r.steps or (single and not math.isnan(r.rms_update))]

    @cached_property
    def taken(self) -> int:
        """Steps in all reports."""
        return sum(record.steps for record in self.records)

    @cached_property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def settings(self) -> Settings:
        """Of its group; the defaults if nothing is known of it."""
        return self.about.settings if self.about else Settings()

    @property
    def averaged(self) -> bool:
        """Is U made of an average of gradients, so that its RMS is below 1 by right?"""
        return bool(self.settings.beta1) and self.settings.momentum_of == "gradient"

    @property
    def factored(self) -> bool:
        """Is V̂ made of factors? Known only with the settings."""
        s = self.settings
        return self.about is not None and find_factoring(self.shape, s.factored, s.axes).estimator != "full"

    @cached_property
    def latest(self) -> list[Record]:
        """The last quarter of these, at least two: all of them have a fault that began in the middle of a run."""
        return self.stepped[-max(2, math.ceil(len(self.stepped) / 4)) :]

    @property
    def scale(self) -> float:
        """The RMS of a matrix whose outputs are as large as its inputs, for as many inputs as its smaller side has.

        A matrix that starts at zero is measured by this: whatever it does is much of itself.
        """
        return math.sqrt(max(self.shape) / self.count)

    def middle(self, figure: str) -> float:
        """The median of a figure over the reports; NaN without any."""
        values = [getattr(record, figure) for record in self.stepped]
        return median(values) if values and not any(map(math.isnan, values)) else math.nan


@dataclass(frozen=True)
class Hit:
    """A rule that holds for a parameter."""

    name: str
    severity: str
    what: str
    figure: str
    weight: float  # how bad it is, to tell of the worst
    certainty: str
    change: str


Rule = Callable[[Parameter, list[Parameter]], Hit | None]


def not_finite(p: Parameter, everyone: list[Parameter]) -> Hit | None:
    """Steps that were left out, or taken with numbers that are none."""
    skipped = p.records[-1].skipped
    if any(not math.isfinite(record.rms_update) for record in p.stepped):
        what = "RMS(U) is not a finite number, and this update was applied: the parameter is lost."
        change = 'Go back to a checkpoint; on_nonfinite="skip" or "raise" keeps such gradients out.'
        return Hit(p.name, "warning", what, "RMS(U) is NaN or infinite", math.inf, "certain", change)
    if not skipped:
        return None
    what = "Gradients were NaN, infinite or too large to square; these parameters were not stepped then."
    if all(other.records[-1].skipped for other in everyone if other.taken or other.records[-1].skipped):
        change = (
            "It is every parameter, so the loss itself is not finite: look at the batches and the loss, lower lr or "
            'warm it up, and use a GradScaler in float16. on_nonfinite="raise" stops at the first.'
        )
    else:
        change = (
            "It is not every parameter, so the loss is finite and these layers overflow in backward: compute them in "
            'float32 or bfloat16, or bound what goes in. on_nonfinite="raise" stops at the first.'
        )
    before = p.records[0].skipped if len(p.records) > 1 else 0
    since = f", {skipped - before} of them since the first report" if len(p.records) > 1 else ""
    return Hit(p.name, "warning", what, f"{skipped} steps skipped{since}", skipped, "certain", change)


def unused(p: Parameter, everyone: list[Parameter]) -> Hit | None:
    """Others step, this one never gets a gradient."""
    moved = any(other.taken for other in everyone)
    if p.taken or p.records[-1].skipped or not moved or p.about is None or not p.about.trainable:
        return None
    what = "No gradient arrives: these parameters are not part of the loss."
    change = "Use them in forward(), or set requires_grad=False, or leave them out of the optimizer."
    most = max(other.taken for other in everyone)
    return Hit(p.name, "warning", what, f"0 steps, where others took {most}", 0, "certain", change)


def zero_gradient(p: Parameter, _: list[Parameter]) -> Hit | None:
    """U is exactly zero."""
    if not p.stepped or any(record.rms_update for record in p.latest):
        return None
    what = "The gradient arrives and is all zero: these parameters do not learn."
    change = (
        "Look for what cuts the gradient: a multiplication by zero, dead ReLUs, a mask that hides everything, or "
        "float16 gradients that underflow without a GradScaler."
    )
    return Hit(p.name, "warning", what, f"RMS(U) 0 {_in(p, len(p.latest))}", 0, _sure(p), change)


def no_step_size(p: Parameter, _: list[Parameter]) -> Hit | None:
    """α is zero, and not only for the first step of a warm-up."""
    if len(p.stepped) < 2 or any(record.step_size for record in p.latest):
        return None
    what = "The step size is zero: nothing moves."
    change = "Look at the group's lr and at the scheduler: has it come to its end?"
    return Hit(p.name, "warning", what, f"step size 0 {_in(p, len(p.latest))}", 0, "certain", change)


def lost_to_rounding(p: Parameter, _: list[Parameter]) -> Hit | None:
    """The change is below the resolution of the parameter's dtype."""
    if p.about is None or p.about.dtype not in ("bfloat16", "float16") or p.settings.rounding != "nearest":
        return None
    moved, eps = p.middle("relative_change"), torch.finfo(getattr(torch, p.about.dtype)).eps
    if not 0 < moved < eps * UNIT_ROUNDOFFS:
        return None
    what = f"Steps are below the resolution of {p.about.dtype}: rounding puts most elements back where they were."
    change = (
        'rounding="stochastic" (no more memory) or rounding="kahan" (2 bytes a parameter more); or keep these '
        "parameters in float32; or a larger lr, if that is right otherwise."
    )
    figure = f"a step changes {moved:.1e} of the parameter; the halfway points are {eps / 4:.1e} to {eps / 2:.1e} away"
    return Hit(p.name, "warning", what, figure, -moved, _sure(p), change)


def out_of_date(p: Parameter, everyone: list[Parameter]) -> Hit | None:
    """RMS(U) far above 1, where the age of V̂ can explain it (§5)."""
    if p.count < LARGE or poor_fit(p, everyone):
        return None
    values = [record.rms_update for record in p.stepped]
    high, jumps = (sum(value > limit for value in values) for limit in (HIGH, JUMP))
    clipped = p.about is not None and p.settings.clip is not None
    if clipped:
        jumps = 0  # now and then is what clipping is for
    often = OFTEN * len(values) if clipped else min(3, OFTEN * len(values))
    if not jumps and (high < often or high == 0 or (high == 1 and len(values) > 1)):
        return None
    what = "RMS(U) is far above 1: the second moment is out of date, and updates are larger than meant."
    severity = "note" if clipped else "warning"
    figure = f"RMS(U) at most {max(values):.3g}, {median(values):.2g} in the median, above {HIGH:g} {_in(p, high)}"
    sure = "likely" if high >= 3 else "possible"
    return Hit(p.name, severity, what, figure, max(values), sure, _fresher(p))


def poor_fit(p: Parameter, _: list[Parameter]) -> Hit | None:
    """RMS(U) so far above 1 that no age of V̂ explains it: then the factors do not fit."""
    if not p.factored or p.averaged:
        return None
    beyond = [r for r in p.stepped if r.rms_update > max(HIGH, BEYOND * _bound(p, r))]
    if not beyond or len(beyond) < OFTEN * len(p.stepped):
        return None
    what = "The factors do not fit: no whole second moment, however old, could give an RMS(U) that large."
    worst = max(beyond, key=lambda r: r.rms_update / _bound(p, r))
    most = f"more than 1/sqrt(1 - beta2) = {_bound(p, worst):.3g}"
    figure = f"RMS(U) {worst.rms_update:.3g}, {most}; likewise {_in(p, len(beyond))}"
    change = (
        "Measure it with diagnostics.FullMoment. Other `axes` for a tensor of more than two, or factored=False in a "
        "group of their own (n * m numbers instead of n + m)."
    )
    severity = "note" if p.about and p.settings.clip is not None else "warning"
    return Hit(p.name, severity, what, figure, worst.rms_update, "certain", change)


def too_small(p: Parameter, _: list[Parameter]) -> Hit | None:
    """RMS(U) far below 1: V̂ remembers gradients that are gone."""
    values = [r.rms_update for r in p.stepped]
    low = sum(0 < value < LOW for value in values)
    if p.averaged or p.count < LARGE or not low or low < len(values) / 2:
        return None
    what = "RMS(U) is far below 1: the second moment remembers larger gradients, and updates are smaller than meant."
    change = "Nothing, if training has come to its end. After a jump of the gradient: " + _fresher(p, after_a_jump=True)
    figure = f"RMS(U) {median(values):.2g} in the median, below {LOW:g} {_in(p, low)}"
    return Hit(p.name, "note", what, figure, -median(values), _sure(p, low), change)


def overwritten(p: Parameter, _: list[Parameter]) -> Hit | None:
    """A step replaces a good part of a matrix, of the size that it had before such steps made it large.

    The step is αₜ, that of an update of RMS 1: after a few of these gradients may vanish, and the real steps with them.
    """
    if len(p.shape) < 2 or p.count < LARGE or not p.stepped:
        return None
    size = max(p.scale, min(record.rms_parameter for record in p.stepped))
    moves = [record.step_size / size for record in p.stepped]
    large = sum(move > OVERWRITTEN for move in moves)
    if not large:
        return None
    what = "A step changes much of the parameter: what it has learnt is overwritten within a few steps."
    change = (
        "Lower lr, by ten for a start, or use relative=True, whose steps are at most 1e-2 of the parameter."
        if not p.settings.relative
        else "Lower lr: with relative steps it is the share of the parameter that a step changes, 1e-2 by default."
    )
    figure = f"a step changes {max(moves):.0%} of the parameter, more than {OVERWRITTEN:.0%} {_in(p, large)}"
    return Hit(p.name, "warning", what, figure, max(moves), _sure(p, large), change)


def growing(p: Parameter, _: list[Parameter]) -> Hit | None:
    """A matrix becomes large: steps that are too long do not cancel out, or nothing bounds the loss."""
    sizes = [record.rms_parameter for record in p.stepped]
    if len(p.shape) < 2 or p.count < LARGE or not sizes:
        return None
    if not sizes[-1] > max(OUTGROWN * p.scale, GROWN * min(sizes)):
        return None
    what = "The parameter grows, and its outputs with it: steps are too long, or nothing bounds the loss."
    change = "Lower lr, or let it decay; weight_decay for matrices; look whether the loss has the right sign."
    figure = f"RMS(X) {sizes[-1]:.2g}, {sizes[-1] / min(sizes):.1f} times its least"
    return Hit(p.name, "warning", what, figure, sizes[-1] / min(sizes), _sure(p), change)


def hardly_moves(p: Parameter, everyone: list[Parameter]) -> Hit | None:
    """No step of any matrix is large enough to matter in some thousand steps, and none is about to become so."""
    matrices = [other for other in everyone if len(other.shape) > 1 and other.stepped]
    if p not in matrices or not all(map(_slow, matrices)):
        return None
    rates = _rates(p)
    # one report does not show a schedule; else it may be at its end, or still in its warm-up
    if len(rates) < 2 or rates[-1] == 0 or rates[-1] > 1.01 * rates[0]:
        return None
    what = "Steps are so small that these parameters hardly move."
    if p.settings.relative:
        figure = f"lr at most {max(rates):.1g} with relative=True: a step changes that share of the parameter"
        change = (
            "This looks like AdamW's lr, which relative=False, lr_decay=None takes as it is; the default of relative "
            "steps is 1e-2. Nothing, if a trained model is meant to change little."
        )
    else:
        figure = f"a step changes at most {max(r.relative_change for r in p.stepped):.1g} of the parameter"
        change = "A larger lr, if the loss does not go down."
    return Hit(p.name, "note", what, figure, -max(rates), _sure(p), change)


def always_clipped(p: Parameter, _: list[Parameter]) -> Hit | None:
    """Every update is cut to the same RMS."""
    if p.taken < ENOUGH or p.settings.clip is None:
        return None
    rate = sum(record.clip_rate * record.steps for record in p.stepped) / p.taken
    if not rate >= ALWAYS:
        return None
    d = p.settings.clip
    what = f"Clipped all the time: every update has RMS {d:g}, whatever the gradient's size."
    change = f"Nothing, if the loss goes down; the steps are then of RMS lr * {d:g} exactly. Else "
    change += "clip=1.0, the paper's value, or " if d < 1 else ""
    change += f"{_fresher(p, after_a_jump=True)[0].lower()}{_fresher(p, after_a_jump=True)[1:]}"
    figure = f"clipped in {rate:.0%} of {p.taken} steps, RMS(U) {p.middle('rms_update'):.2g} in the median"
    return Hit(p.name, "note", what, figure, p.middle("rms_update"), "certain", change)


def on_the_floor(p: Parameter, _: list[Parameter]) -> Hit | None:
    """The step of a matrix is ε₂·ρₜ and not RMS(X)·ρₜ. Vectors that start at zero are meant to be there for long."""
    if p.about is None or not p.settings.relative or len(p.shape) < 2 or p.count < LARGE:
        return None
    size, alpha, eps2 = p.middle("rms_parameter"), p.middle("step_size"), p.settings.eps[1]
    if not (size < eps2 and alpha > 0):
        return None
    what = "RMS(X) is below eps[1], so that the step is eps[1] * lr: fixed, and slow for a matrix that starts at zero."
    change = (
        "Nothing, if it is to stay small. To let it grow faster (a LoRA's B, a zero-initialised output): a larger "
        "eps[1], or relative=False with an lr of its own, in a group of its own."
    )
    steps = f"{eps2 / alpha:.0f} steps in one direction reach it"
    figure = f"RMS(X) {size:.1e}, below eps[1]={eps2:g}; step size {alpha:.1e}, so that {steps}"
    return Hit(p.name, "note", what, figure, -size, _sure(p), change)


def never_forgets(p: Parameter, _: list[Parameter]) -> Hit | None:
    """A setting under which the first gradients keep their weight for ever (§7.2)."""
    s = p.settings
    if p.about is None or s.beta2 is not None or s.decay_rate <= 1:
        return None
    what = "decay_rate is above 1: the first gradients keep their weight for ever (section 7.2 of the paper)."
    figure = f"decay_rate={s.decay_rate:g}"
    return Hit(p.name, "warning", what, figure, s.decay_rate, "certain", "decay_rate=0.8, the paper's value.")


RULES: dict[str, Rule] = {
    "not finite": not_finite,
    "unused": unused,
    "zero gradient": zero_gradient,
    "no step size": no_step_size,
    "lost to rounding": lost_to_rounding,
    "out of date": out_of_date,
    "poor fit": poor_fit,
    "too small": too_small,
    "overwritten": overwritten,
    "growing": growing,
    "hardly moves": hardly_moves,
    "always clipped": always_clipped,
    "on the floor": on_the_floor,
    "never forgets": never_forgets,
}


def loss_grows(losses: Sequence[float]) -> Hit | None:
    """The loss has come up by more than half of what it had gone down, and by more than it wavers."""
    if len(losses) < 5:
        return None
    if not all(map(math.isfinite, losses)):
        what, change = "The loss is not a finite number.", "Look at the batches and the loss; lower lr or warm it up."
        figure = f"NaN or infinite in {sum(not math.isfinite(loss) for loss in losses)} of {len(losses)} losses"
        return Hit("", "warning", what, figure, math.inf, "certain", change)
    size = max(2, len(losses) // 10)
    means = [fmean(losses[i : i + size]) for i in range(len(losses) % size, len(losses), size)]
    least, last = min(losses[0], *means), means[-1]
    wavers = median(abs(b - (a + c) / 2) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False))
    if last - least <= max((losses[0] - least) / 2, 5 * wavers, abs(least) / 50):
        return None
    what = "The loss grows."
    change = (
        "Other findings say why. Without any, look at the data from there on and at the sign of the loss; else go back "
        "to a checkpoint from before and lower lr."
    )
    figure = f"{losses[0]:.3g} at first, {least:.3g} at its least, {last:.3g} at the end"
    return Hit("", "warning", what, figure, last - least, "certain", change)


def _rates(p: Parameter) -> list[float]:
    """What lr was, as far as its decay with time lets it be seen."""
    if not p.settings.relative:
        return [record.step_size for record in p.stepped]
    return [record.step_size / max(record.rms_parameter, p.settings.eps[1]) for record in p.stepped]


def _slow(p: Parameter) -> bool:
    """Was lr, and not its decay with time, too small for a matrix to move in all reports?"""
    if p.about is None:
        return False
    if not p.settings.relative:
        return max(record.relative_change for record in p.stepped) < STILL
    return max(_rates(p)) < min(SLOW, 0.9 / math.sqrt(max(1, p.steps[-1])))


def _bound(p: Parameter, record: Record) -> float:
    """The largest RMS(U) of a whole V̂: G² ≤ V̂/(1 − β̂₂ₜ), whatever came before."""
    return math.inf if p.averaged or record.beta2 >= 1 else (1 - record.beta2) ** -0.5


def _fresher(p: Parameter, after_a_jump: bool = False) -> str:
    """What keeps V̂ up to date, with what is set now in mind."""
    if p.about is None:
        return "clip=1.0 if it is off, a faster decay (beta2=None, a lower decay_rate), a warm-up or a lower lr."
    s, ways = p.settings, []
    if s.clip is None and not after_a_jump:
        ways.append("clip=1.0 (in Table 2 of the paper rows A and C fail without warm-up, H and J with it do not)")
    if s.beta2 is not None:
        ways.append(f"beta2=None with decay_rate=0.8, which forgets faster at first, in place of beta2={s.beta2:g}")
    elif s.decay_rate > 0.8:
        ways.append(f"a decay_rate of 0.8 in place of {s.decay_rate:g}")
    else:
        ways.append(f"a decay_rate below {s.decay_rate:g} (row K of the paper's Table 2 has 0.5)")
    if not after_a_jump:
        ways.append("a warm-up (schedules.warmup) or a lower lr")
    held = (
        "" if s.clip is None or after_a_jump else f"Clipping holds the update at RMS {s.clip:g}, so this may do. Else: "
    )
    return f"{held}{'; '.join(ways)}."


def _in(p: Parameter, held: int | None = None) -> str:
    total = len(p.stepped)
    held = total if held is None else held
    return "at the last step" if total == 1 else f"in {held} of {total} reports"


def _sure(p: Parameter, held: int | None = None) -> str:
    held = len(p.stepped) if held is None else held
    return "likely" if len(p.stepped) >= 5 and held >= min(3, len(p.stepped) / 2) else "possible"
