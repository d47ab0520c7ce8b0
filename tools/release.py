"""`make release`: build the sdist and the wheel, check what is in them, and try the wheel as a stranger would.

Nothing is uploaded. It needs `build` and `twine`, and an index to install torch from.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
SMOKE = """
import pathlib, torch, adafactor
assert "site-packages" in adafactor.__file__, adafactor.__file__
assert adafactor.__version__ == "{version}", adafactor.__version__
assert (pathlib.Path(adafactor.__file__).parent / "py.typed").exists()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
x = torch.randn(64, 16)
for backend in ("eager", "cpu"):
    optimizer = adafactor.Adafactor(model.parameters(), backend=backend)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], (backend, losses)
    print(f"{{backend}}: the loss goes from {{losses[0]:.2f}} to {{losses[-1]:.2f}}")
"""


def main() -> int:
    """Build, check, install, try; the first thing that is wrong ends it."""
    [version] = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)  # 3.10 has no tomllib
    check_version(version)
    shutil.rmtree(DIST, ignore_errors=True)
    call(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
    call(sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))
    [wheel], [sdist] = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    check_wheel(wheel, version)
    check_sdist(sdist)
    with tempfile.TemporaryDirectory() as folder:
        try_out(wheel, version, Path(folder))
    print(f"{wheel.name} and {sdist.name} in {DIST} could be uploaded.")
    return 0


def call(*command: str, cwd: Path | None = None) -> None:
    """Run a command and show what it says."""
    print("$", *command, flush=True)
    subprocess.run(command, check=True, cwd=cwd)


def demand(condition: bool, message: str) -> None:
    """End the release with one line."""
    if not condition:
        raise SystemExit(f"no release: {message}")


def check_version(version: str) -> None:
    """The same version everywhere, and a dated heading in the changelog."""
    for name in ("src/adafactor/__init__.py", "CITATION.cff"):
        demand(version in (ROOT / name).read_text(), f"{name} does not have version {version}")
    dated = rf"^## \[{re.escape(version)}\] [–-] \d{{4}}-\d\d-\d\d$"
    demand(bool(re.search(dated, (ROOT / "CHANGELOG.md").read_text(), re.M)), f"CHANGELOG.md has no dated {version}")


def check_wheel(wheel: Path, version: str) -> None:
    """The package, its licence, and nothing else."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        metadata = Parser().parsestr(file.read(f"adafactor-{version}.dist-info/METADATA").decode())
    demand(wheel.name == f"adafactor-{version}-py3-none-any.whl", f"{wheel.name} is not for every machine")
    strange = [name for name in names if not name.startswith(("adafactor/", f"adafactor-{version}.dist-info/"))]
    strange += [name for name in names if not re.search(r"\.(py|typed|txt)$|METADATA|RECORD|WHEEL|LICENSE", name)]
    demand(not strange, f"the wheel holds {strange}")
    package = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    demand(package <= set(names), f"the wheel lacks {package - set(names)}")
    demand("adafactor/py.typed" in names, "the wheel lacks py.typed")
    demand(any("LICENSE" in name for name in names), "the wheel lacks the licence")
    demand(metadata["Version"] == version, f"the metadata have version {metadata['Version']}")
    demand(metadata["Requires-Python"] is not None, "the metadata do not say which Python is needed")
    dead = re.findall(r"\]\((?!https?://)([^)]*)\)", str(metadata.get_payload()))
    demand(not dead, f"the page of an index would have links that lead nowhere: {dead[:3]}")


def check_sdist(sdist: Path) -> None:
    """Sources and tests; no records, no caches."""
    with tarfile.open(sdist) as file:
        names = [name.split("/", 1)[-1] for name in file.getnames()]
    for needed in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "src/adafactor/py.typed",
        "tests/oracle.py",
    ):
        demand(needed in names, f"the sdist lacks {needed}")
    strange = [
        name for name in names if re.search(r"__pycache__|^(benchmarks|lab|studies|runs|docs|\.venv)/|\.o$", name)
    ]
    demand(not strange, f"the sdist holds {strange[:5]}")


def try_out(wheel: Path, version: str, folder: Path) -> None:
    """Install the wheel in a venv of its own; run the README's code and a small training there."""
    call(sys.executable, "-m", "venv", str(folder / "venv"))
    python = str(folder / "venv" / "bin" / "python")
    constraints = str(ROOT / "constraints.txt")
    call(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"{wheel}[cpu]", cwd=folder)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    demand(len(blocks) > 0, "the README has no code")
    for number, code in enumerate([*blocks, SMOKE.format(version=version)]):
        script = folder / f"block{number}.py"
        script.write_text(code)
        call(python, "-W", "error", script.name, cwd=folder)
    call(str(folder / "venv" / "bin" / "adafactor"), "--version", cwd=folder)


if __name__ == "__main__":
    sys.exit(main())
