"""optax and T5X: trees of arrays, one per statistic or one per parameter, and no arguments beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adafactor.migration.state import HALF, Arguments, Axes, Moments, Shape, count_steps, find_means, require_elements
from adafactor.migration.translate import HALF_MOMENTUM, Peer, Translation, clip, two_largest

SLICES = (
    "T5X clips and scales each slice of a 'batch' axis by its own RMS, ours the whole tensor: 20 steps on slices whose "
    "RMS differ 10 times end 67 % of the distance travelled apart"
)


def _express_optax(translation: Translation, args: Arguments, step: int | None) -> None:
    if args["weight_decay_mask"] is not None:
        raise ValueError("weight_decay_mask has no counterpart: make a group of the parameters that it masks")
    _express(translation, args, "decay_offset")
    translation.keywords |= {"beta1": args["momentum"] or 0.0, "eps": (args["eps"], 1e-3)}
    translation.set_raw_decay(args["weight_decay_rate"])


def _express_t5x(translation: Translation, args: Arguments, step: int | None) -> None:
    if args["learning_rate"] is None:
        raise ValueError("T5X's Adafactor takes no step without a learning_rate: pass it in the arguments")
    if args["logical_factor_rules"] is not None:
        raise ValueError("logical_factor_rules name axes of the model: pass the rule of each path in factor_map")
    if not isinstance(args["multiply_by_parameter_scale"], bool):
        raise ValueError("multiply_by_parameter_scale must be True or False: make a group of each kind of parameter")
    _express(translation, args, "step_offset")
    translation.keywords |= {"beta1": args["beta1"] or 0.0, "eps": (args["epsilon1"], args["epsilon2"])}
    rate, exponent = args["weight_decay_rate"], args["weight_decay_rate_lr_exponent"]
    if exponent == 1:
        translation.keywords["weight_decay"] = rate or 1.0
    else:
        translation.set_raw_decay((rate or 1.0) * translation.keywords["lr"] ** exponent if exponent else rate)
    for argument, instead in (
        ("max_parameter_scale", "parameters of a larger RMS take larger steps, in proportion"),
        ("global_norm_clip_threshold", "call torch.nn.utils.clip_grad_norm_ before each step"),
    ):
        if args[argument]:
            translation.leave_out(f"T5X's {argument}", instead)
    if any("batch" in rule for rule in (args["factor_map"] or {}).values()):
        translation.note(SLICES)


def _express(translation: Translation, args: Arguments, offset: str) -> None:
    """What both have in common; no learning rate is a learning rate of 1."""
    lr = args["learning_rate"]
    if callable(lr):
        raise ValueError(f"{translation.peer}'s learning_rate is a schedule: pass its value and schedule lr with torch")
    translation.step_offset = args[offset]
    translation.keywords |= {
        "lr": 1.0 if lr is None else lr,
        "lr_decay": None,
        "relative": args["multiply_by_parameter_scale"],
        "decay_rate": args["decay_rate"],
        "clip": clip(args["clipping_threshold"]),
    }
    if "float16" in str(args["dtype_momentum"]):
        translation.note(HALF_MOMENTUM, dtype="half precision")


def _factored_t5x(args: Arguments, shape: Shape, path: str) -> Axes | None:
    """Up to two axes: as optax. For more: by the rule of the path, of "row", "column", "batch" and "none"."""
    rule = (args["factor_map"] or {}).get(path.replace(".", "/"))
    if not args["factored"] or len(shape) < 2 or (len(shape) == 2 and (rule is None or "batch" not in rule)):
        return two_largest(args, shape, path)
    if rule is None or len(rule) != len(shape):
        raise ValueError(
            f"{path!r} of shape {shape} needs a rule of {len(shape)} words in arguments['factor_map'], as in T5X: "
            "'row', 'column', 'batch' or 'none' for each axis"
        )
    rows, columns = ([axis for axis, word in enumerate(rule) if word == kind] for kind in ("row", "column"))
    if not rows or not columns:
        return None
    if len(rows) > 1 or len(columns) > 1:
        raise ValueError(
            f"the rule {tuple(rule)} of {path!r} joins axes, which ours keeps apart: reshape the parameter"
        )
    return rows[0], columns[0]


Rule = Callable[[Arguments, Shape, str], Axes | None]


@dataclass(frozen=True)
class Leaf:
    """A parameter of ours and where the tree has it: axis i of ours is axis `order[i]` of theirs."""

    name: str
    path: str
    order: tuple[int, ...]
    shape: Shape  # theirs


def find_leaf(name: str, shape: Shape, paths: Mapping[str, Any]) -> Leaf:
    """Find the path, and the order of axes if one is given beside it."""
    place = paths.get(name, name)
    path, order = (place, None) if isinstance(place, str) else place
    order = tuple(range(len(shape))) if order is None else tuple(order)
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"{name} of shape {shape} cannot have its axes in the order {order}")
    return Leaf(name, path.replace(".", "/"), order, tuple(shape[order.index(axis)] for axis in range(len(shape))))


FIELDS = {"optax": ("count", "v_row", "v_col", "v"), "t5x": ("step", "param_states")}  # by which a state is known


def read_optax(tree: Any, args: Arguments, leaves: Sequence[Leaf]) -> list[Moments]:
    """Read `FactoredState(count, v_row, v_col, v)` and `EmaState(count, ema)`, wherever in the chain they are."""
    state = _only(tree, FIELDS["optax"], "optax.adafactor")
    slots = {key: dict(_flatten(state[key])) for key in ("v_row", "v_col", "v")}
    if args["momentum"]:
        slots["m"] = dict(_flatten(_only(tree, ("count", "ema"), "optax.ema")["ema"]))
    elif next(_nodes(tree, ("count", "ema")), None):
        raise ValueError("the state has an average of updates (ema), but arguments['momentum'] is not given")
    return _read(args, leaves, slots, count_steps(_tensor(state["count"]), "'count' of the state"), two_largest)


def read_t5x(tree: Any, args: Arguments, leaves: Sequence[Leaf]) -> list[Moments]:
    """Read `{"step", "param_states": {path: {v_row, v_col, v, m}}}`."""
    state = _only(tree, FIELDS["t5x"], "T5X's Adafactor")
    slots: dict[str, dict[str, Any]] = {key: {} for key in ("v_row", "v_col", "v", "m")}
    for path, value in _flatten(state["param_states"]):
        parent, _, key = path.rpartition("/")
        if key not in slots:
            raise ValueError(f"the state has {path!r}, which T5X's Adafactor does not keep")
        slots[key][parent] = value
    if args["beta1"] is None:
        if extra := [path for path, m in slots["m"].items() if tuple(m.shape) != (1,)]:
            raise ValueError(f"the state has a momentum for {extra[0]!r}, but arguments['beta1'] is not given")
        del slots["m"]
    return _read(args, leaves, slots, count_steps(_tensor(state["step"]), "'step' of the state"), _factored_t5x)


def _read(
    args: Arguments, leaves: Sequence[Leaf], slots: Mapping[str, Mapping[str, Any]], step: int, rule: Rule
) -> list[Moments]:
    """Return the moments of each leaf in our order of axes."""
    paths = slots["v"].keys()
    if missing := [leaf.path for leaf in leaves if leaf.path not in paths]:
        raise ValueError(f"the state has nothing under {missing[0]!r}; it has {', '.join(map(repr, sorted(paths)))}")
    if extra := sorted(paths - {leaf.path for leaf in leaves}):
        raise ValueError(f"the state has {extra[0]!r}, which is none of the parameters")
    result = []
    for leaf in leaves:
        name, axes = repr(leaf.path), rule(args, leaf.shape, leaf.path)
        tensors = {key: _tensor(values[leaf.path]) for key, values in slots.items() if leaf.path in values}
        moments = Moments(leaf.shape, step, momentum=tensors.get("m"))
        if axes is None:
            moments.full = tensors["v"]
            if tuple(moments.full.shape) != leaf.shape:
                raise ValueError(f"{name} has a 'v' of shape {tuple(moments.full.shape)}, not {leaf.shape}")
        else:
            moments.means = find_means(leaf.shape, axes, tensors["v_row"], tensors["v_col"], name)
        result.append(moments.check(half=False, name=name).permute(leaf.order))
    return result


def _nodes(tree: Any, fields: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Find every mapping or named tuple in the tree that has these fields."""
    if hasattr(tree, "_fields"):
        tree = tree._asdict()
    if isinstance(tree, Mapping):
        if all(name in tree for name in fields):
            yield tree
            return
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for node in tree:
            yield from _nodes(node, fields)


def recognise(tree: Any) -> str | None:
    """Return whose tree it is."""
    return next((source for source, fields in FIELDS.items() if next(_nodes(tree, fields), None)), None)


def _only(tree: Any, fields: Sequence[str], peer: str) -> Mapping[str, Any]:
    nodes = list(_nodes(tree, fields))
    if len(nodes) != 1:
        raise ValueError(f"{len(nodes)} states of {peer} (with {', '.join(fields)}) found where one is needed")
    return nodes[0]


def _flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every array with its path, "/" between names and numbers."""
    if hasattr(tree, "_fields"):
        tree = tree._asdict()
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, f"{path}/{key}" if path else str(key).replace(".", "/"))
    elif isinstance(tree, (list, tuple)):
        for key, value in enumerate(tree):
            yield from _flatten(value, f"{path}/{key}" if path else str(key))
    elif tree is not None:
        yield path, tree


def _tensor(value: Any) -> Tensor:
    """A leaf as a tensor of our own, float32 unless it is float64 or a number of steps."""
    if not isinstance(value, Tensor):
        import numpy as np  # JAX arrays come with it; the package itself needs only torch

        array = np.asarray(value)
        exact = array.dtype.kind in "iu" or array.dtype == np.float64
        # bfloat16, which NumPy lends from ml_dtypes, is unknown to torch
        value = torch.tensor(array if exact else array.astype(np.float32))
    tensor: Tensor = require_elements(value, "a leaf of the tree")
    return tensor.float() if tensor.dtype in HALF else tensor


OPTAX = Peer(
    "optax.adafactor",
    {
        "learning_rate": None,
        "min_dim_size_to_factor": 128,
        "decay_rate": 0.8,
        "decay_offset": 0,
        "multiply_by_parameter_scale": True,
        "clipping_threshold": 1.0,
        "momentum": None,
        "dtype_momentum": None,
        "weight_decay_rate": None,
        "eps": 1e-30,
        "factored": True,
        "weight_decay_mask": None,
    },
    _express_optax,
    factored=two_largest,
)
T5X = Peer(
    "T5X's Adafactor",
    {
        "learning_rate": None,
        "factored": True,
        "multiply_by_parameter_scale": True,
        "beta1": None,
        "decay_rate": 0.8,
        "step_offset": 0,
        "clipping_threshold": 1.0,
        "weight_decay_rate": None,
        "min_dim_size_to_factor": 128,
        "epsilon1": 1e-30,
        "epsilon2": 1e-3,
        "dtype_momentum": None,
        "factor_map": None,
        "logical_factor_rules": None,
        "weight_decay_rate_lr_exponent": None,
        "global_norm_clip_threshold": None,
        "max_parameter_scale": None,
        "skip_nan_updates": False,
    },
    _express_t5x,
    factored=_factored_t5x,
)
