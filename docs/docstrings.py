"""For the API reference: what the docstrings of this project say in ways that the renderer (griffe) does not know."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Doctests under "Example:" become code, comments behind a dataclass's fields a table of its attributes."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe knows a section "Examples:" only."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """A comment behind a field is its description."""
        if cls.docstring is None or "dataclass" not in cls.labels or "\nAttributes:\n" in cls.docstring.value:
            return
        fields = [member for member in cls.members.values() if member.is_attribute and "property" not in member.labels]
        found = {field.name: re.search(r"  # (.*)", field.source) for field in fields}
        if any(found.values()):
            lines = [f"    {name}: {comment[1] if comment else '–'}" for name, comment in found.items()]
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)
