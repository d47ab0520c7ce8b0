"""What the documents say is there and runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab import records
from studies import front, one_card
from tests.launch import python

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{path.name} {number}")
    for path in DOCUMENTS
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.S))
]


def test_every_test_that_the_paper_map_names_exists() -> None:
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = set(re.findall(r"`(test_\w+)", (ROOT / "docs" / "paper.md").read_text()))
    assert len(named) > 12 and named <= defined, named - defined


def test_every_function_that_the_paper_map_names_exists() -> None:
    from adafactor import algorithm
    from adafactor.core import equations

    text = (ROOT / "docs" / "paper.md").read_text().split("## Equations and claims")[1].split("## Tables")[0]
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(named) > 5 and all(hasattr(equations, name) or hasattr(algorithm, name) for name in named), named


def test_every_file_and_table_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = {path: path.read_text() for name in ("src", "tests") for path in (ROOT / name).rglob("*.py")}
    named, tables = re.findall(r"`([\w/]+\.py)`", text), re.findall(r"`([A-Z]{4,})`", text)
    assert "core/contract.py" in named and {"ADVICE", "AUTO", "BACKENDS"} <= set(tables)
    assert not [name for name in named if not any(path.as_posix().endswith(f"/{name}") for path in files)]
    assert not [name for name in tables if not any(f"\n{name} = " in content for content in files.values())]


@pytest.mark.parametrize("code", BLOCKS)
def test_every_code_block_runs(code: str) -> None:
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_between_documents_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_what_the_recipes_call_is_there_after_importing_the_package_alone() -> None:
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/recipes.md"))
    found = set(re.findall(r"`[^`\n]*?\b(adafactor(?:\.[A-Za-z_]\w*)+)", text))
    names = sorted(found)
    assert "adafactor.trainers.FromModel" in names
    code = f"import adafactor\n{'; '.join(names)}"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_figures_of_the_first_page_are_those_of_the_committed_records() -> None:
    page, step = (ROOT / "docs" / "index.md").read_text(), front.runs()["epyc"]
    state = {
        (row["contender"], row["dtype"]): row["state_bytes"] / 1e6
        for row in step.find(suite="gpt2")
        if "seconds" in row
    }
    float32, bfloat16 = state["adamw", "float32"], state["adamw", "bfloat16"]
    assert f"**{state['adafactor', 'float32']:.1f} MB**" in page
    assert f"AdamW keeps {float32:.0f} MB in float32, {bfloat16:.0f} MB in bfloat16." in page
    states = {record["name"]: record["state_bytes"] for record in records.read(records.RECORDS, "small")}
    for run, (label, _) in front.RUNS.items():
        kept = states[f"{run}-s0"]
        assert label.split(": ")[1].startswith((f"{kept / 1e6:.1f} MB", f"{kept / 1e3:.0f} kB"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other packages
def test_the_table_of_one_card_is_what_the_plan_says() -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    assert (
        "\n".join(f"| {' | '.join(cells)} |" for cells in list(one_card.rows())[1:])
        in (ROOT / "docs" / "backward.md").read_text()
    )
