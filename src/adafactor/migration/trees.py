"""optax and T5X: trees of arrays, one per statistic or one per parameter, and no arguments beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adafactor.migration.peer import Argument, Group, Keywords, Peer, bound, other, same, two_largest
from adafactor.migration.state import Arguments, Axes, Format, Member, Shape, count_steps, require_elements

ROUNDED_DECAY = (
    "{peer} rounds β₁ and β₁·M to half precision before it adds to them (0.9 to 0.8984 in bfloat16); ours averages in "
    "float32 and rounds what it keeps: 20 steps end 2 % of the distance travelled apart (0.1 % in float16)"
)
LARGEST = "parameters of a larger RMS take larger steps, in proportion"
GLOBAL_NORM = "call torch.nn.utils.clip_grad_norm_ before each step"


FIELDS = {"optax": ("count", "v_row", "v_col", "v"), "t5x": ("step", "param_states")}  # by which a state is known
EMA = ("count", "ema")  # the momentum of optax
FORMAT = Format("v", "v_row", "v_col", "m")
COMMON = {
    **same(decay_rate=0.8),
    "learning_rate": Argument(None, "lr", lambda lr: 1.0 if lr is None else lr),
    "multiply_by_parameter_scale": Argument(True, "relative"),
    "clipping_threshold": bound(1.0, "clip"),
    "weight_decay_rate": Argument(None, "weight_decay", lambda decay: decay or 0.0),
    "factored": Argument(True, "factored", {True: "outer", False: False}.get),
    "min_dim_size_to_factor": Argument(128, "min_factored"),
    **other(dtype_momentum=None),
}
FIXED = {"lr_decay": None, "weight_decay_by": "constant"}
EXPONENTS = {1: "rho", 2: 1.0}  # of lr in T5X's weight decay; 1.0 is the lr₀ of ρ²/lr₀


def _adjust(group: Group, beta1: float | None) -> Keywords:
    """Translate the momentum, and refuse a schedule."""
    if callable(group.args["learning_rate"]):
        raise ValueError(f"{group.peer.name}'s learning_rate is a schedule: pass its value and schedule lr with torch")
    return group.momentum(beta1, group.args["dtype_momentum"], ROUNDED_DECAY)


def _adjust_optax(group: Group) -> Keywords:
    if group.args["weight_decay_mask"] is not None:
        raise ValueError("weight_decay_mask has no counterpart: make a group of the parameters that it masks")
    return _adjust(group, group.args["momentum"])


OPTAX = Peer(
    "optax.adafactor",
    {
        **COMMON,
        "eps": Argument(1e-30, "eps", lambda eps1: (eps1, 1e-3)),
        **other(decay_offset=0, momentum=None, weight_decay_mask=None),
    },
    fixed=FIXED,
    adjust=_adjust_optax,
    format=FORMAT,
    rule=two_largest,
    step_offset="decay_offset",
)


def _adjust_t5x(group: Group) -> Keywords:
    args = group.args
    if args["learning_rate"] is None:
        raise ValueError("T5X's Adafactor takes no step without a learning_rate: pass it in the arguments")
    if args["logical_factor_rules"] is not None:
        raise ValueError("logical_factor_rules name axes of the model: pass the rule of each path in factor_map")
    if not isinstance(args["multiply_by_parameter_scale"], bool):
        raise ValueError("multiply_by_parameter_scale must be True or False: make a group of each kind of parameter")
    keywords = {**_adjust(group, args["beta1"]), "eps": (args["epsilon1"], args["epsilon2"])}
    if exponent := args["weight_decay_rate_lr_exponent"]:
        if exponent not in EXPONENTS:
            raise ValueError(f"weight_decay_rate_lr_exponent={exponent!r} must be None, 0, 1 or 2 to be expressed")
        keywords |= {"weight_decay": args["weight_decay_rate"] or 1.0, "weight_decay_by": EXPONENTS[exponent]}
    group.leave_out("max_parameter_scale", args["max_parameter_scale"], LARGEST)
    group.leave_out("global_norm_clip_threshold", args["global_norm_clip_threshold"], GLOBAL_NORM)
    return keywords


def _rule(args: Arguments, path: str) -> Sequence[str] | None:
    """Return the words of T5X's rule for a path, one for each axis: "row", "column", "batch" or "none"."""
    return (args["factor_map"] or {}).get(path.replace(".", "/"))


def _axes_t5x(args: Arguments, path: str, shape: Shape) -> Axes | None:
    """Up to two axes: as optax. For more: by the rule of the path, of "row", "column", "batch" and "none"."""
    rule = _rule(args, path)
    if not args["factored"] or len(shape) < 2 or (len(shape) == 2 and (rule is None or "batch" not in rule)):
        return two_largest(args, path, shape)
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


T5X = Peer(
    "T5X's Adafactor",
    {
        **COMMON,
        **other(step_offset=0, beta1=None, epsilon1=1e-30, epsilon2=1e-3, weight_decay_rate_lr_exponent=None),
        **other(factor_map=None, logical_factor_rules=None, max_parameter_scale=None),
        **other(global_norm_clip_threshold=None, skip_nan_updates=None),
    },
    fixed=FIXED,
    adjust=_adjust_t5x,
    format=FORMAT,
    rule=_axes_t5x,
    varies=True,
    slices=lambda args, path: tuple(axis for axis, word in enumerate(_rule(args, path) or ()) if word == "batch"),
    step_offset="step_offset",
)


def recognise(tree: Any) -> str | None:
    """Return whose tree it is."""
    return next((source for source, fields in FIELDS.items() if next(_nodes(tree, fields), None)), None)


def read(tree: Any, peer: Peer, args: Arguments, params: list[Member] | None, paths: Mapping[str, Any]) -> list[Member]:
    """Read the state of every parameter, in our order of its axes."""
    if params is None or not all(param.is_named for param in params):
        raise ValueError(f"{peer.name} does not say which shape a state is of: pass params with names")
    places = {param.name: _place(param, paths) for param in params}
    if unknown := paths.keys() - places:
        raise ValueError(f"paths has {min(unknown)!r}, which is none of the parameters")
    step, entries = _read_slots(tree, peer, args)
    if missing := [path for path, _ in places.values() if path not in entries]:
        raise ValueError(f"the state has nothing under {missing[0]!r}; it has {', '.join(map(repr, sorted(entries)))}")
    if extra := sorted(entries.keys() - {path for path, _ in places.values()}):
        raise ValueError(f"the state has {extra[0]!r}, which is none of the parameters")
    for param in params:
        (path, order), shape = places[param.name], param.shape or ()
        theirs = tuple(shape[order.index(axis)] for axis in range(len(shape)))
        unused = ("v_row", "v_col") if peer.rule(args, path, theirs) is None else ("v",)  # of one element each
        entry = {key: _tensor(value) for key, value in entries[path].items() if key not in unused}
        param.moments = peer.read(args, Member(path, path, True, theirs, entry), step).permute(order)
        param.slices = tuple(order.index(axis) for axis in peer.slices(args, path))
    return params


def _place(param: Member, paths: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return where the tree has a parameter, and the order of axes: axis i of ours is axis `order[i]` of theirs."""
    name, shape = param.name, param.shape or ()
    place = paths.get(name, name)
    path, order = (place, range(len(shape))) if isinstance(place, str) else place
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"{name} of shape {shape} cannot have its axes in the order {tuple(order)}")
    return path.replace(".", "/"), tuple(order)


def _read_slots(tree: Any, peer: Peer, args: Arguments) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the number of steps, and the state by the paths of parameters, wherever in a chain it is.

    optax has `FactoredState(count, v_row, v_col, v)` and `EmaState(count, ema)`, with all parameters in each slot; T5X
    `{"step", "param_states": {path: {v_row, v_col, v, m}}}`.
    """
    entries: dict[str, dict[str, Any]] = {}
    if peer is OPTAX:
        state, count = _only(tree, FIELDS["optax"], "optax.adafactor"), "count"
        slots = {key: state[key] for key in ("v", "v_row", "v_col")}
        if args["momentum"]:
            slots["m"] = _only(tree, EMA, "optax.ema")["ema"]
        elif next(_nodes(tree, EMA), None):
            raise ValueError("the state has an average of updates (ema), but arguments['momentum'] is not given")
        for key, slot in slots.items():
            for path, value in flatten(slot):
                entries.setdefault(path, {})[key] = value
    else:
        state, count = _only(tree, FIELDS["t5x"], "T5X's Adafactor"), "step"
        for path, value in flatten(state["param_states"]):
            parent, _, key = path.rpartition("/")
            if key not in ("v", "v_row", "v_col", "m"):
                raise ValueError(f"the state has {path!r}, which T5X's Adafactor does not keep")
            entries.setdefault(parent, {})[key] = value
            if key == "m" and args["beta1"] is None and tuple(entries[parent].pop("m").shape) != (1,):
                raise ValueError(f"the state has a momentum for {parent!r}, but arguments['beta1'] is not given")
    return count_steps(_tensor(state[count]), f"{count!r} of the state"), entries


def _children(node: Any) -> Mapping[Any, Any] | None:
    """Return what a mapping, a named tuple, a list or a tuple holds, by its keys or places; None for a leaf."""
    if hasattr(node, "_fields"):
        node = node._asdict()
    if isinstance(node, (list, tuple)):
        node = dict(enumerate(node))
    return node if isinstance(node, Mapping) else None


def _nodes(tree: Any, fields: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Find every mapping or named tuple in the tree that has these fields."""
    inner = _children(tree) or {}
    if all(name in inner for name in fields):
        yield inner
        return
    for node in inner.values():
        yield from _nodes(node, fields)


def _only(tree: Any, fields: Sequence[str], peer: str) -> Mapping[str, Any]:
    nodes = list(_nodes(tree, fields))
    if len(nodes) != 1:
        raise ValueError(f"{len(nodes)} states of {peer} (with {', '.join(fields)}) found where one is needed")
    return nodes[0]


def flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, "/" between names and numbers."""
    inner = _children(tree)
    if inner is None and tree is not None:
        yield path, tree
    for key, value in (inner or {}).items():
        yield from flatten(value, f"{path}/{key}" if path else str(key).replace(".", "/"))


def _tensor(value: Any) -> Tensor:
    """Return a leaf as a tensor of our own."""
    if not isinstance(value, Tensor):
        import numpy as np  # JAX arrays come with it; the package itself needs only torch

        array = np.asarray(value)
        exact = array.dtype.kind in "iu" or array.dtype == np.float64
        # bfloat16, which NumPy lends from ml_dtypes, is unknown to torch
        value = torch.tensor(array if exact else array.astype(np.float32))
    return require_elements(value, "a leaf of the tree")
