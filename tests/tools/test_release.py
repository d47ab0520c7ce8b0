"""What the scripts in tools/ refuse and say; building and installing is for `make release` itself."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools import matrix, mutations, release

VERSION = "9.9.9"
METADATA = f"adafactor-{VERSION}.dist-info/METADATA"
FILES = {
    **{path.relative_to(release.ROOT / "src").as_posix(): "" for path in (release.ROOT / "src").rglob("*.py")},
    "adafactor/py.typed": "",
    METADATA: f"Name: adafactor\nVersion: {VERSION}\nRequires-Python: >=3.10\n",
    f"adafactor-{VERSION}.dist-info/licenses/LICENSE": "",
}


LIBRARY = {"adafactor/kernels/cpu/libadafactor_baseline.so": ""}


def check(folder: Path, files: dict[str, str], tags: str, is_pure: bool) -> None:
    """What `make release` does with a wheel of these files and tags."""
    path = folder / f"adafactor-{VERSION}-{tags}.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    release.check_wheel(path, VERSION, is_pure)


def test_wheels_with_all_of_the_package_and_nothing_else_are_accepted(tmp_path: Path) -> None:
    check(tmp_path, FILES, "py3-none-any", is_pure=True)
    check(tmp_path, FILES | LIBRARY, "py3-none-linux_x86_64", is_pure=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tests/oracle.py": ""}, "tests/oracle.py"),
        ({"adafactor/runs/table.json": ""}, "table.json"),
        ({"adafactor/py.typed": None}, "py.typed"),
        ({"adafactor/optimizer.py": None}, "adafactor/optimizer.py"),
        ({METADATA: "Name: adafactor\nVersion: 1.0\n"}, "1.0"),
        ({METADATA: f"{FILES[METADATA]}\n[there](https://a.b) [here](docs/here.md)"}, "docs/here.md"),
        (LIBRARY, "libadafactor_baseline"),
    ],
)
def test_a_pure_wheel_with_too_much_or_too_little_is_not(tmp_path: Path, change: dict[str, str], named: str) -> None:
    files = {name: content for name, content in {**FILES, **change}.items() if content is not None}
    with pytest.raises(SystemExit, match="no release") as refused:
        check(tmp_path, files, "py3-none-any", is_pure=True)
    assert named in str(refused.value)


def test_a_wheel_that_lost_its_libraries_or_is_for_one_python_is_not(tmp_path: Path) -> None:
    for files, tags in ((FILES, "py3-none-linux_x86_64"), (FILES | LIBRARY, "cp312-cp312-linux_x86_64")):
        with pytest.raises(SystemExit, match="no release"):
            check(tmp_path, files, tags, is_pure=False)


def test_a_version_without_a_dated_heading_is_not_released() -> None:
    with pytest.raises(SystemExit, match="9.9.9"):
        release.check_version(VERSION)


def test_this_version_has_one() -> None:
    from adafactor import __version__

    release.check_version(__version__)


def test_a_cell_that_failed_shows_in_the_table() -> None:
    rows = matrix.table(
        [{"python": "3.10.13", "torch": "2.6.0", "result": "3 failed, 900 passed", "date": "2026-01-01"}]
    )
    assert rows.splitlines()[-1] == "| 3.10.13 | 2.6.0 | – | 3 failed, 900 passed | 2026-01-01 |"


def test_cells_have_names_of_their_own_and_say_what_pip_shall_install() -> None:
    assert len({cell.name for cell in matrix.CELLS}) == len(matrix.CELLS)
    assert matrix.Cell("3.12", "2.8.0").packages == ["torch==2.8.0", "numpy"]


@pytest.mark.parametrize("backend", mutations.WRITTEN)
def test_every_mutation_still_finds_the_text_that_it_breaks(backend: str) -> None:
    assert len(mutations.mutations_of(backend)) >= 20
