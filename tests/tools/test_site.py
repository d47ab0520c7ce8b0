"""The documentation site builds without a warning, holds together, and fetches nothing."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import adafactor
from adafactor import diagnostics
from studies import learning_rate

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


class Page(HTMLParser):
    """The links of a page, what it loads, and the names of its places."""

    def __init__(self, path: Path):
        """Read the file."""
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Sort an element into one of the three."""
        found = {name: value for name, value in attrs if value is not None}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        target = found.get("href", found.get("src"))
        if target is not None:
            (self.links if tag == "a" else self.loads).append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that `make docs` builds, in a copy of all that it is made of."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", folder)
    (folder / "src").symlink_to(ROOT / "src")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    output = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout + run.stderr)
    assert run.returncode == 0 and "No issues found" in output, output
    return folder / "site"


def test_every_page_is_in_the_navigation_and_in_the_site(site: Path) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1].split("\ntheme:")[0]
    assert sorted(re.findall(r": ([\w-]+\.md)$", navigation, flags=re.M)) == [page.name for page in PAGES]
    assert all((site / page.with_suffix(".html").name).exists() for page in PAGES)


def test_every_link_of_the_site_leads_to_a_page_and_a_place_of_it(site: Path) -> None:
    read = cache(Page)
    dead = []
    for page in PAGES:
        path = site / page.with_suffix(".html").name
        for link in read(path).links:
            target, _, place = link.partition("#")
            if re.match(r"\w+:", link):  # the web, which no test asks
                continue
            at = (path.parent / unquote(target)).resolve() if target else path
            if not at.is_file() or not at.is_relative_to(site):
                dead.append(f"{page.name}: {link} is not in the site; name files outside docs/ without a link")
            elif at.suffix == ".html" and unquote(place) not in read(at).places:
                dead.append(f"{page.name}: {link} has no such place")
    assert not dead, "\n".join(dead)


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for path in site.glob("*.html"):
        foreign = [target for target in Page(path).loads if re.match(r"(https?:)?//", target)]
        assert not foreign, f"{path.name}: {foreign}"


def test_the_api_reference_has_every_public_name(site: Path) -> None:
    places = Page(site / "api.html").places
    names = {f"adafactor.{name}" for name in adafactor.__all__ if name not in ("recipes", "schedules")}
    schedules = ("beta2_from_half_life", "warmup", "with_warmup", "without_warmup")
    names |= {f"adafactor.schedules.{name}" for name in schedules}
    names |= {f"adafactor.recipes.{name}" for name in adafactor.recipes.__all__}
    names |= {f"adafactor.diagnostics.{name}" for name in diagnostics.__all__ if name != "Record"}
    names |= {f"adafactor.Adafactor.{name}" for name in ("step", "report", "load_state_dict", "add_param_group")}
    assert names <= places, names - places


def test_the_api_reference_describes_every_keyword(site: Path) -> None:
    text = (site / "api.html").read_text().split('id="adafactor.Adafactor.step"')[0]
    described = set(re.findall(r"<tr class=\"doc-section-item\">\s*<td>\s*<code>(\w+)</code>", text))
    assert described == set(inspect.signature(adafactor.Adafactor).parameters)


def test_the_tables_of_the_settings_page_are_those_of_the_committed_record() -> None:
    page, record = (ROOT / "docs" / "settings.md").read_text(), json.loads(learning_rate.RECORD.read_text())
    tables = re.findall(r"<!-- (\w+) (\w+) -->\n\n((?:\|.*\n)+)", page)
    assert [(title, figure) for title, figure, _ in tables] == learning_rate.TABLES
    for title, figure, table in tables:
        assert table.strip() == learning_rate.table(record[title], figure)
