"""fairseq's and T5X's Adafactor in float64 NumPy, for their packages do not install here.

Written from their formulas, with their names for what they keep. They import nothing from `src`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rms(x: Array) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(x))))


class Fairseq:
    """One group: `lr` of the group is overwritten with each parameter, which compounds unless steps are relative."""

    def __init__(self, params: Sequence[Array], **arguments: Any):
        """Start with fairseq's defaults."""
        defaults = {"lr": None, "beta1": None, "weight_decay": 0.0, "scale_parameter": True, "relative_step": True}
        fixed = {"eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "warmup_init": False}
        self.group = {**defaults, **fixed, **arguments}
        self.params = [np.array(p, dtype=np.float64) for p in params]
        self.state: list[dict[str, Any]] = [{} for _ in params]

    def step(self, grads: Sequence[Array]) -> None:
        """One step on each parameter."""
        for number, g in enumerate(grads):
            self.params[number] = self._step(self.params[number], g, self.state[number])

    def _step(self, p: Array, g: Array, s: dict[str, Any]) -> Array:
        group = self.group
        s["step"] = t = s.get("step", 0) + 1
        s["RMS"] = rms(p)
        size = min(1e-6 * t if group["warmup_init"] else 1e-2, t**-0.5) if group["relative_step"] else group["lr"]
        group["lr"] = size * (max(group["eps"][1], s["RMS"]) if group["scale_parameter"] else 1.0)
        b, q = 1 - t ** group["decay_rate"], g**2 + group["eps"][0]
        if g.ndim >= 2:
            r = s["exp_avg_sq_row"] = b * s.get("exp_avg_sq_row", 0.0) + (1 - b) * q.mean(-1)
            c = s["exp_avg_sq_col"] = b * s.get("exp_avg_sq_col", 0.0) + (1 - b) * q.mean(-2)
            u = g / np.sqrt(r / r.mean(-1, keepdims=True))[..., None] / np.sqrt(c)[..., None, :]
        else:
            s["exp_avg_sq"] = b * s.get("exp_avg_sq", 0.0) + (1 - b) * q
            u = g / np.sqrt(s["exp_avg_sq"])
        u = group["lr"] * u / max(1.0, rms(u) / group["clip_threshold"])
        if group["beta1"] is not None:
            u = s["exp_avg"] = group["beta1"] * s.get("exp_avg", 0.0) + (1 - group["beta1"]) * u
        return np.asarray(p - group["weight_decay"] * group["lr"] * p - u)


class T5X:
    """Parameters by path; a rule of words for each axis where there are more than two."""

    def __init__(self, params: Mapping[str, Array], learning_rate: float, **arguments: Any):
        """Start with T5X's defaults."""
        defaults: dict[str, Any] = {
            "beta1": None,
            "clipping_threshold": 1.0,
            "weight_decay_rate": None,
            "weight_decay_rate_lr_exponent": None,
            "factor_map": {},
        }
        fixed = {"min_dim_size_to_factor": 128, "factored": True, "step_offset": 0, "multiply_by_parameter_scale": True}
        self.hyper = {"learning_rate": learning_rate, **defaults, **fixed, **arguments}
        self.params = {path: np.array(p, dtype=np.float64) for path, p in params.items()}
        self.steps = 0
        self.states = {path: self._new(path, p.shape) for path, p in self.params.items()}

    def _axes(self, path: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """(d1, d0): the row and the column axis."""
        if rule := self.hyper["factor_map"].get(path):
            return (rule.index("row"), rule.index("column")) if "row" in rule else None
        least = self.hyper["min_dim_size_to_factor"]
        if not self.hyper["factored"] or len(shape) < 2 or sorted(shape)[-2] < least:
            return None
        d1, d0 = np.argsort(shape, kind="stable")[-2:]
        return int(d1), int(d0)

    def _new(self, path: str, shape: tuple[int, ...]) -> dict[str, Array]:
        state = {key: np.zeros(1) for key in ("v_row", "v_col", "v", "m")}
        if axes := self._axes(path, shape):
            state["v_row"], state["v_col"] = np.zeros(np.delete(shape, axes[1])), np.zeros(np.delete(shape, axes[0]))
        else:
            state["v"] = np.zeros(shape)
        return {**state, "m": np.zeros(shape)} if self.hyper["beta1"] is not None else state

    def state_dict(self) -> dict[str, Any]:
        """As T5X's checkpoints have it, the paths as nested dicts."""
        tree: dict[str, Any] = {}
        for path, state in self.states.items():
            node = tree
            for folder in path.split("/"):
                node = node.setdefault(folder, {})
            node.update({key: value.copy() for key, value in state.items()})
        return {"target": {}, "state": {"step": np.int32(self.steps), "param_states": tree}}

    def step(self, grads: Mapping[str, Array]) -> None:
        """One step on each parameter."""
        for path, g in grads.items():
            self.params[path] = self._step(path, self.params[path], g, self.states[path])
        self.steps += 1

    def _step(self, path: str, p: Array, g: Array, s: dict[str, Array]) -> Array:
        h, rule = self.hyper, self.hyper["factor_map"].get(path, ())
        over = tuple(axis for axis in range(p.ndim) if axis >= len(rule) or rule[axis] != "batch")
        b = 1 - (self.steps - h["step_offset"] + 1.0) ** -0.8
        scale: Any = h["learning_rate"]
        if h["multiply_by_parameter_scale"]:
            scale = scale * np.maximum(np.sqrt(np.mean(p * p, axis=over, keepdims=True)), 1e-3)
        q = g * g + 1e-30
        if axes := self._axes(path, p.shape):
            d1, d0 = axes
            s["v_row"] = b * s["v_row"] + (1 - b) * q.mean(d0)
            s["v_col"] = b * s["v_col"] + (1 - b) * q.mean(d1)
            rows = np.expand_dims(s["v_row"], d0)
            y = g / np.sqrt(rows / rows.mean(d1, keepdims=True)) / np.sqrt(np.expand_dims(s["v_col"], d1))
        else:
            s["v"] = b * s["v"] + (1 - b) * q
            y = g / np.sqrt(s["v"])
        if h["clipping_threshold"] is not None:
            y = y / np.maximum(1.0, np.sqrt(np.mean(y * y, axis=over, keepdims=True)) / h["clipping_threshold"])
        change = scale * y
        if h["beta1"] is not None:
            change = s["m"] = h["beta1"] * s["m"] + (1 - h["beta1"]) * change
        decay = h["weight_decay_rate"] or 0.0
        if exponent := h["weight_decay_rate_lr_exponent"]:
            decay = (h["weight_decay_rate"] or 1.0) * h["learning_rate"] ** exponent
        return np.asarray((1 - decay) * p - change)
