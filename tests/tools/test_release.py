"""What the scripts in tools/ refuse and say; building and installing is for `make release` itself."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from adafactor import __version__
from tools import mutations, release

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


def test_a_version_needs_a_dated_heading_and_this_one_has_it() -> None:
    release.check_version(__version__)
    with pytest.raises(SystemExit, match="9.9.9"):
        release.check_version(VERSION)


@pytest.mark.parametrize("backend", mutations.WRITTEN)
def test_every_mutation_still_finds_the_text_that_it_breaks(backend: str) -> None:
    assert len(mutations.mutations_of(backend)) >= 20
