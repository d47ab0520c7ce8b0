"""optax and T5X: trees of arrays, one per statistic or one per parameter, and no arguments beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adafactor.migration import arguments as common
from adafactor.migration.arguments import HALF_MOMENTUM
from adafactor.migration.form import Arguments, Axes, Moments, Peer, Shape, Translation, check, count, factors, whole

SLICES = (
    "T5X clips and scales each slice of a 'batch' axis by its own RMS, ours the whole tensor: 20 steps on slices whose "
    "RMS differ 10 times end 67 % of the distance travelled apart"
)
LEFT_OUT = "T5X's {argument} has no counterpart and is left out: {instead}"


def optax(theirs: Arguments, step: int | None) -> Translation:
    """optax.adafactor's arguments in our words: no learning rate is a learning rate of 1."""
    if theirs["weight_decay_mask"] is not None:
        raise ValueError("weight_decay_mask has no counterpart: make a group of the parameters that it masks")
    told = _translate(theirs, theirs["learning_rate"], "decay_offset", "optax.adafactor")
    told.keywords |= {"beta1": theirs["momentum"] or 0.0, "eps": (theirs["eps"], 1e-3)}
    told.keywords["weight_decay"] = common.raw_decay(
        theirs["weight_decay_rate"], told.keywords["lr"], "optax.adafactor", told.notes
    )
    return told


def t5x(theirs: Arguments, step: int | None) -> Translation:
    """T5X's arguments in our words."""
    if theirs["learning_rate"] is None:
        raise ValueError("T5X's Adafactor takes no step without a learning_rate: pass it in the arguments")
    if theirs["logical_factor_rules"] is not None:
        raise ValueError("logical_factor_rules name axes of the model: pass the rule of each path in factor_map")
    if not isinstance(theirs["multiply_by_parameter_scale"], bool):
        raise ValueError("multiply_by_parameter_scale must be True or False: make a group of each kind of parameter")
    told = _translate(theirs, theirs["learning_rate"], "step_offset", "T5X's Adafactor")
    lr, rate, exponent = told.keywords["lr"], theirs["weight_decay_rate"], theirs["weight_decay_rate_lr_exponent"]
    if exponent:
        rate = (rate or 1.0) * lr**exponent
    decay = rate / lr if exponent == 1 else common.raw_decay(rate, lr, "T5X's Adafactor", told.notes)
    told.keywords |= {
        "beta1": theirs["beta1"] or 0.0,
        "eps": (theirs["epsilon1"], theirs["epsilon2"]),
        "weight_decay": decay,
    }
    for argument, instead in (
        ("max_parameter_scale", "parameters of a larger RMS take larger steps, in proportion"),
        ("global_norm_clip_threshold", "call torch.nn.utils.clip_grad_norm_ before each step"),
    ):
        if theirs[argument]:
            told.notes.append(LEFT_OUT.format(argument=argument, instead=instead))
    if any("batch" in rule for rule in (theirs["factor_map"] or {}).values()):
        told.notes.append(SLICES)
    return told


def _translate(theirs: Arguments, lr: Any, offset: str, peer: str) -> Translation:
    if callable(lr):
        raise ValueError(f"{peer}'s learning_rate is a schedule: pass its value and schedule lr with torch")
    keywords = {
        "lr": 1.0 if lr is None else lr,
        "lr_decay": None,
        "relative": theirs["multiply_by_parameter_scale"],
        "decay_rate": theirs["decay_rate"],
        "clip": common.clip(theirs["clipping_threshold"]),
    }
    told = Translation(keywords, step_offset=theirs[offset])
    if "float16" in str(theirs["dtype_momentum"]):
        told.notes.append(HALF_MOMENTUM.format(peer=peer, dtype="half precision"))
    return told


def factored(theirs: Arguments, shape: Shape, path: str) -> Axes | None:
    """The two largest axes, of equals the later ones, if both reach the bound."""
    if not theirs["factored"] or len(shape) < 2:
        return None
    first, second = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
    return (first, second) if shape[first] >= theirs["min_dim_size_to_factor"] else None


def factored_t5x(theirs: Arguments, shape: Shape, path: str) -> Axes | None:
    """The same up to two axes; for more, the rule of the parameter's path: "row", "column", "batch" or "none"."""
    rule = (theirs["factor_map"] or {}).get(path.replace(".", "/"))
    if not theirs["factored"] or len(shape) < 2 or (len(shape) == 2 and (rule is None or "batch" not in rule)):
        return factored(theirs, shape, path)
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


def leaf(name: str, shape: Shape, paths: Mapping[str, Any]) -> Leaf:
    """Find the path, and the order of axes if one is given beside it."""
    given = paths.get(name, name)
    path, order = (given, None) if isinstance(given, str) else given
    order = tuple(range(len(shape))) if order is None else tuple(order)
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"{name} of shape {shape} cannot have its axes in the order {order}")
    return Leaf(name, path.replace(".", "/"), order, tuple(shape[order.index(axis)] for axis in range(len(shape))))


FIELDS = {"optax": ("count", "v_row", "v_col", "v"), "t5x": ("step", "param_states")}  # by which a state is known


def read_optax(tree: Any, theirs: Arguments, leaves: Sequence[Leaf]) -> list[tuple[Moments, Axes | None]]:
    """From `FactoredState(count, v_row, v_col, v)` and `EmaState(count, ema)`, wherever in the chain they are."""
    state = _only(tree, FIELDS["optax"], "optax.adafactor")
    slots = {key: dict(_flat(state[key])) for key in ("v_row", "v_col", "v")}
    average = list(_nodes(tree, ("count", "ema")))
    if theirs["momentum"]:
        slots["m"] = dict(_flat(_only(tree, ("count", "ema"), "optax.ema")["ema"]))
    elif average:
        raise ValueError("the state has an average of updates (ema), but arguments['momentum'] is not given")
    return _read(theirs, leaves, slots, count({"count": _tensor(state["count"])}, "count", "the state"), factored)


def read_t5x(tree: Any, theirs: Arguments, leaves: Sequence[Leaf]) -> list[tuple[Moments, Axes | None]]:
    """From `{"step", "param_states": {path: {v_row, v_col, v, m}}}`."""
    state = _only(tree, FIELDS["t5x"], "T5X's Adafactor")
    flat = dict(_flat(state["param_states"]))
    slots: dict[str, dict[str, Any]] = {key: {} for key in ("v_row", "v_col", "v", "m")}
    for path, value in flat.items():
        parent, _, key = path.rpartition("/")
        if key not in slots:
            raise ValueError(f"the state has {path!r}, which T5X's Adafactor does not keep")
        slots[key][parent] = value
    if theirs["beta1"] is None:
        if extra := [path for path, m in slots["m"].items() if tuple(m.shape) != (1,)]:
            raise ValueError(f"the state has a momentum for {extra[0]!r}, but arguments['beta1'] is not given")
        del slots["m"]
    return _read(theirs, leaves, slots, count({"step": _tensor(state["step"])}, "step", "the state"), factored_t5x)


def _read(
    theirs: Arguments, leaves: Sequence[Leaf], slots: Mapping[str, Mapping[str, Any]], step: int, rule: Rule
) -> list[tuple[Moments, Axes | None]]:
    held = slots["v"].keys()
    if missing := [item.path for item in leaves if item.path not in held]:
        raise ValueError(f"the state has nothing under {missing[0]!r}; it has {', '.join(map(repr, sorted(held)))}")
    if extra := sorted(held - {item.path for item in leaves}):
        raise ValueError(f"the state has {extra[0]!r}, which is none of the parameters")
    result = []
    for item in leaves:
        axes = rule(theirs, item.shape, item.path)
        tensors = {key: _tensor(values[item.path]) for key, values in slots.items() if item.path in values}
        moments = Moments(item.shape, step, momentum=tensors.get("m"))
        if axes is None:
            moments.whole = tensors["v"]
            if tuple(moments.whole.shape) != item.shape:
                raise ValueError(f"{item.path!r} has a 'v' of shape {tuple(moments.whole.shape)}, not {item.shape}")
        else:
            moments.over = factors(item.shape, axes, tensors["v_row"], tensors["v_col"], repr(item.path))
        check(moments, half=False, where=repr(item.path))
        ours = None if axes is None else (item.order.index(axes[0]), item.order.index(axes[1]))
        result.append((moments.permuted(item.order), ours))
    return result


def _nodes(tree: Any, fields: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Every mapping or named tuple in the tree that has these fields."""
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
    """Whose tree it is."""
    return next((source for source, fields in FIELDS.items() if next(_nodes(tree, fields), None)), None)


def _only(tree: Any, fields: Sequence[str], peer: str) -> Mapping[str, Any]:
    found = list(_nodes(tree, fields))
    if len(found) != 1:
        raise ValueError(f"{len(found)} states of {peer} (with {', '.join(fields)}) found where one is needed")
    return found[0]


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every array with its path, "/" between names and numbers."""
    if hasattr(tree, "_fields"):
        tree = tree._asdict()
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, f"{path}/{key}" if path else str(key).replace(".", "/"))
    elif isinstance(tree, (list, tuple)):
        for key, value in enumerate(tree):
            yield from _flat(value, f"{path}/{key}" if path else str(key))
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
    found: Tensor = whole(value, "a leaf of the tree")
    return found.float() if found.dtype in (torch.float16, torch.bfloat16) else found


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
    optax,
    factored=factored,
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
    t5x,
    factored=factored_t5x,
)
