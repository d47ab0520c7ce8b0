"""A record: rows of figures, and where, when and with what they were measured. Benchmarks and studies write it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass
class Record:
    """What a run found.

    Attributes:
        about: the command, the machine, versions, the date, how busy the machine was.
        rows: a dict of figures for each thing that was measured; some of its entries say what that is.
    """

    about: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def find(self, **key: Any) -> Iterator[Row]:
        """Yield the rows with these entries."""
        return (row for row in self.rows if all(row.get(name) == value for name, value in key.items()))

    def first(self, **key: Any) -> Row | None:
        """Return the first row with these entries; None if there is none."""
        return next(self.find(**key), None)

    def save(self, path: Path) -> None:
        """Write JSON, a row to a line, whole or not at all."""
        rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in self.rows)
        about = json.dumps(self.about, indent=1, ensure_ascii=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(f'{{"about": {about},\n"rows": [\n{rows}\n]}}\n', encoding="utf-8")
        part.replace(path)


def load(path: Path) -> Record:
    """Read JSON."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.keys() != asdict(Record()).keys():
        raise ValueError(f"{path} is not a record: it must have `about` and `rows`")
    return Record(**found)
