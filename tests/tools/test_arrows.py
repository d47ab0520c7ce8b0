"""Who may import whom: what stands round the optimizer imports the core, and never the other way round.

And how nobody may read a checkpoint.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AROUND = ("diagnostics", "migration", "planning")  # each a package that the core can do without
SCRIPTS = ("benchmarks", "studies", "lab", "examples")  # not in the wheel
FACE = ("__init__.py", "cli.py", "traffic.py")  # load the others when they are asked for


def imported(path: Path) -> Iterator[str]:
    """The full names of all that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def python(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


@pytest.mark.parametrize("package", AROUND)
def test_each_package_round_the_optimizer_is_imported_by_itself_alone(package: str) -> None:
    home = ROOT / "src" / "adafactor"
    for path in python("src"):
        if path.is_relative_to(home / package) or (path.parent == home and path.name in FACE):
            continue
        assert not [name for name in imported(path) if within(name, f"adafactor.{package}")], path


def test_neither_the_kernels_nor_their_self_test_import_the_optimizer() -> None:
    for path in python("src/adafactor/core", "src/adafactor/kernels", "src/adafactor/check"):
        names = [name for name in imported(path) if within(name, "adafactor.optimizer") or name.count(".") == 0]
        assert not [name for name in names if name.startswith("adafactor")], path
        assert "adafactor.Adafactor" not in imported(path), path


def test_only_tests_import_tests_and_the_package_imports_no_script() -> None:
    for path in python("src", *SCRIPTS):
        assert not [name for name in imported(path) if within(name, "tests")], path
    for path in python("src"):
        assert not [name for name in imported(path) if any(within(name, script) for script in SCRIPTS)], path


def test_nobody_imports_a_private_name_of_another_package() -> None:
    for path in python("src", *SCRIPTS):
        for name in imported(path):
            if name.partition(".")[0] in ("adafactor", *SCRIPTS):
                assert not name.rpartition(".")[2].startswith("_") or name.endswith("__"), (path, name)


def test_no_checkpoint_is_read_in_a_way_that_could_run_code() -> None:
    loads = []
    for path in python("src", *SCRIPTS):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
                loads.append(ast.unparse(node))
    assert loads and all(load.startswith("torch.load(") and "weights_only=True" in load for load in loads), loads
