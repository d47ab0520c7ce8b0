"""For the API reference: what the docstrings of this project say in ways that the renderer (griffe) does not know."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe


@cache
def defaults(path: Path) -> dict[str, str]:
    """The default of every setting as it is written: the first argument of its declaration."""
    text = path.read_text(encoding="utf-8")
    (settings,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    found = {node.target: node.value for node in settings.body if isinstance(node, ast.AnnAssign)}
    return {
        target.id: ast.get_source_segment(text, call.args[0]) or ""
        for target, call in found.items()
        if isinstance(target, ast.Name) and isinstance(call, ast.Call)
    }


class Docstrings(griffe.Extension):
    """Doctests under "Example:" become code, comments behind a dataclass's fields a table, `Settings.lr` its value."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe knows a section "Examples:" only."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """A reader wants to know the default, not where it is declared."""
        for parameter in func.parameters:
            if str(parameter.default).startswith("Settings.") and isinstance(func.filepath, Path):
                written = defaults(func.filepath.parent / "core" / "settings.py")
                parameter.default = written[str(parameter.default).removeprefix("Settings.")]

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """A comment behind a field is its description."""
        if cls.docstring is None or "dataclass" not in cls.labels or "\nAttributes:\n" in cls.docstring.value:
            return
        fields = [member for member in cls.members.values() if member.is_attribute and "property" not in member.labels]
        found = {field.name: re.search(r"  # (.*)", field.source) for field in fields}
        if any(found.values()):
            lines = [f"    {name}: {comment[1] if comment else '–'}" for name, comment in found.items()]
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)
