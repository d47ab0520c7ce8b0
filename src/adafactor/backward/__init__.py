"""Step inside backward: parameters step as soon as their gradients are complete, and those are freed."""

from adafactor.backward.handle import Handle, step_in_backward

__all__ = ["Handle", "step_in_backward"]
