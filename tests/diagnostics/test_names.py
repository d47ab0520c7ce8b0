"""Many parameters' names in few words."""

from __future__ import annotations

import pytest

from adafactor.diagnostics.naming import Named, common_prefix, grouped, select, shortened


def test_layers_that_differ_by_number_are_one_kind() -> None:
    named: list[Named] = [(f"h.{i}.{part}", (3,)) for i in range(12) for part in ("ln.weight", "attn.weight")]
    named += [("wte", (5, 3)), ("odd.0.weight", (2,)), ("odd.1.weight", (2,)), ("odd.2.weight", (4,))]
    assert list(grouped(named)) == ["h.*.ln.weight", "h.*.attn.weight", "wte", "odd.{0-1}.weight", "odd.2.weight"]
    chosen = ["wte", *(f"h.{i}.ln.weight" for i in range(12)), *(f"h.{i}.attn.weight" for i in (3, 5, 6, 7))]
    assert shortened(chosen, named) == "h.*.ln.weight (12), h.{3,5-7}.attn.weight (4), wte"
    many: list[Named] = [(f"part{chr(97 + i)}.weight", (i,)) for i in range(20)]
    assert shortened([name for name, _ in many], many).endswith("and 14 more kinds")
    assert common_prefix(["a.b.c", "a.b.d.e"]) == "a.b." and common_prefix(["a.b"]) == ""


def test_kinds_with_the_same_label_are_kept_apart_by_shape() -> None:
    named = [(f"a.{i}.{j}.w", (1 + (i + j) % 2,)) for i in range(2) for j in range(2)]
    assert list(grouped(named).values()) == [["a.0.0.w", "a.1.1.w"], ["a.0.1.w", "a.1.0.w"]]


def test_unnamed_parameters_are_not_taken_for_layers() -> None:
    assert len(grouped([("parameter 0", (3,)), ("parameter 1", (3,))])) == 2


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    assert select(["h.0.w", "h.1.w", "b"], ["h.*", "b"]) == ["h.0.w", "h.1.w", "b"]
    with pytest.raises(ValueError, match=r"no parameter is called 'x\.\*'; there are a, b"):
        select(["a", "b"], "x.*")
