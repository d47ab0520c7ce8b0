"""What a step did to each parameter: RMS(U), clipping and the step size of §5, kept until somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from adafactor.equations import Scalar


@dataclass(frozen=True)
class Record:
    """One parameter's figures, all of the last step unless said otherwise; NaN where there was none yet."""

    name: str
    shape: tuple[int, ...]
    rms_update: float  # RMS(Uₜ) before clipping (§5): far from 1 means an out-of-date second moment
    clip_rate: float  # the share of steps since the last report in which the update was clipped (§6)
    step_size: float  # αₜ
    rms_parameter: float  # RMS(Xₜ₋₁); NaN for absolute steps, which do not need it
    beta2: float  # β̂₂ₜ
    skipped: int  # steps not taken because of a NaN or infinite gradient, since the optimizer was made or loaded
    state_bytes: int


@dataclass
class Trace:
    """What is behind a `Record`: 0-d tensors where reading them would make the host wait, else numbers."""

    rms_update: Scalar | None = None
    step_size: Scalar | None = None
    rms_parameter: Scalar | None = None
    beta2: Scalar | None = None
    clipped: Tensor | int = 0  # steps since the last report
    taken: Tensor | int = 0
    skipped: Tensor | int = 0  # steps ever

    def note(
        self,
        beta2: Scalar,
        rms_parameter: Scalar | None,
        step_size: Scalar,
        rms_update: Scalar,
        clipped: Tensor | bool,
        taken: Tensor | int,
    ) -> None:
        """Keep the figures of a step."""
        self.beta2, self.rms_parameter, self.step_size, self.rms_update = beta2, rms_parameter, step_size, rms_update
        self.clipped, self.taken = self.clipped + clipped, self.taken + taken

    def record(self, name: str, shape: tuple[int, ...], state_bytes: int) -> Record:
        """Read the figures (here the host may wait for the device) and start the next clip rate."""
        taken, clipped = int(self.taken), int(self.clipped)
        self.taken = self.clipped = 0
        return Record(
            name=name,
            shape=shape,
            rms_update=_read(self.rms_update),
            clip_rate=clipped / taken if taken else float("nan"),
            step_size=_read(self.step_size),
            rms_parameter=_read(self.rms_parameter),
            beta2=_read(self.beta2),
            skipped=int(self.skipped),
            state_bytes=state_bytes,
        )


def _read(value: Scalar | None) -> float:
    return float("nan") if value is None else float(value)
