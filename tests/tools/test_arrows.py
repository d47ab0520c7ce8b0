"""Who may import whom: arrows point down. And how nobody may read a checkpoint."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / "src" / "adafactor"
SCRIPTS = ("benchmarks", "studies", "lab", "examples")  # not in the wheel
# From the bottom to the top: what is in a layer imports its own package and lower layers, and nothing beside it. A step
# of shards is a step with two reductions, so these two packages are one here.
WHOLE = {"distributed": "core"}
LAYERS = (
    ("core",),
    ("algorithm",),
    ("kernels",),
    ("optimizer", "recipes", "schedules"),
    ("backward",),
    ("trainers", "record", "equations"),
    ("diagnostics", "migration", "planning"),
    ("hf", "traffic"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(LAYERS) for room in rooms}
ASKED_FOR = ("diagnostics", "hf", "migration", "planning", "trainers")  # `__init__` loads these when they are asked for


def imported(path: Path) -> Iterator[str]:
    """The full names of all that a file imports: also inside functions and by `import_module`; not for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    only_types = {node for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            texts = (part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
            yield from (text.rstrip(".") for text in texts if isinstance(text, str))


def python(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def room_of(name: str) -> str | None:
    """The module or package of the first floor that a full name belongs to; None: it is not ours."""
    if not within(name, "adafactor"):
        return None
    room = f"{name}.".split(".")[1]
    room = WHOLE.get(room, room)
    return room if room in FLOOR else "__init__"


def test_every_import_points_down() -> None:
    for path in python("src/adafactor"):
        own = path.relative_to(HOME).parts[0].removesuffix(".py")
        own = WHOLE.get(own, own)
        for name in imported(path):
            other = room_of(name)
            if other in (None, own) or (own == "__init__" and other in ASKED_FOR):
                continue
            assert FLOOR[other] < FLOOR[own], f"{path}: {name} is beside or above it"


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
