"""Many parameters' names in few words."""

from __future__ import annotations

import pytest

from adafactor import Record
from adafactor.diagnostics.naming import group_by_kind, group_with_title, select, shorten


def named(name: str, *shape: int) -> Record:
    return Record(name, shape, 1.0, 0.0, 1e-2, 1.0, 1e-2, 0.9, 1, 0, 100)


def test_layers_that_differ_by_number_are_one_kind() -> None:
    records = [named(f"h.{i}.{part}", 3) for i in range(12) for part in ("ln.weight", "attn.weight")]
    records += [named("wte", 5, 3), named("odd.0.weight", 2), named("odd.1.weight", 2), named("odd.2.weight", 4)]
    assert list(group_by_kind(records)) == [
        "h.*.ln.weight",
        "h.*.attn.weight",
        "wte",
        "odd.{0-1}.weight",
        "odd.2.weight",
    ]
    chosen = ["wte", *(f"h.{i}.ln.weight" for i in range(12)), *(f"h.{i}.attn.weight" for i in (3, 5, 6, 7))]
    assert shorten(chosen, records) == "h.*.ln.weight (12), h.{3,5-7}.attn.weight (4), wte"
    many = [named(f"part{chr(97 + i)}.weight", i) for i in range(20)]
    assert shorten([record.name for record in many], many).endswith("and 14 more kinds")


def test_what_all_names_begin_with_is_said_once() -> None:
    title, kinds = group_with_title([named("a.b.c"), named("a.b.d.e")])
    assert title == "2 tensors of a.b" and list(kinds) == ["c", "d.e"]
    title, kinds = group_with_title([named("a.b")])
    assert title == "1 tensors" and list(kinds) == ["a.b"]


def test_kinds_with_the_same_label_are_kept_apart_by_shape() -> None:
    records = [named(f"a.{i}.{j}.w", 1 + (i + j) % 2) for i in range(2) for j in range(2)]
    kinds = [[record.name for record in kind] for kind in group_by_kind(records).values()]
    assert kinds == [["a.0.0.w", "a.1.1.w"], ["a.0.1.w", "a.1.0.w"]]


def test_unnamed_parameters_are_not_taken_for_layers() -> None:
    assert len(group_by_kind([named("parameter 0", 3), named("parameter 1", 3)])) == 2


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    assert select(["h.0.w", "h.1.w", "b"], ["h.*", "b"]) == ["h.0.w", "h.1.w", "b"]
    with pytest.raises(ValueError, match=r"no parameter is called 'x\.\*'; there are a, b"):
        select(["a", "b"], "x.*")
