"""`make release`: build what an index would hold, check what is in it, and try each as a stranger would.

An sdist; a wheel with the compiled core, for this platform and any Python; and one without, for every platform. Each
is installed in a venv of its own where there is no compiler. Nothing is uploaded. It needs `build`, `twine`, a C++
compiler, and an index to install torch from.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PURE = "py3-none-any"
NO_COMPILER = {"CC": "no-compiler", "CXX": "no-compiler"}
SMOKE = """
import pathlib, torch, adafactor
assert "site-packages" in adafactor.__file__, adafactor.__file__
assert adafactor.__version__ == "{version}", adafactor.__version__
assert (pathlib.Path(adafactor.__file__).parent / "py.typed").exists()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
x = torch.randn(64, 16)
for backend in {backends}:
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
    [sdist], [compiled] = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:  # here, build/ has what was compiled before
        with tarfile.open(sdist) as file:
            file.extractall(folder, filter="data")
        [source] = Path(folder).iterdir()
        call(sys.executable, "-m", "build", "--wheel", "--outdir", str(DIST), str(source), environment=NO_COMPILER)
    [pure] = set(DIST.glob("*.whl")) - {compiled}
    call(sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))
    check_wheel(compiled, version, is_pure=False)
    check_wheel(pure, version, is_pure=True)
    check_sdist(sdist)
    with tempfile.TemporaryDirectory() as folder:
        for name, package, backends in (
            ("compiled", compiled, ("eager", "cpu", "auto")),
            ("pure", pure, ("eager",)),
            ("sdist", sdist, ("eager",)),
        ):
            try_out(package, version, backends, Path(folder) / name)
    print(f"{', '.join(path.name for path in (sdist, compiled, pure))} in {DIST} could be uploaded.")
    return 0


def call(*command: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
    """Run a command and show what it says."""
    print("$", *command, flush=True)
    subprocess.run(command, check=True, cwd=cwd, env={**os.environ, **(environment or {})})


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


def check_wheel(wheel: Path, version: str, is_pure: bool) -> None:
    """The package, its libraries unless it is pure, its licence, and nothing else."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        metadata = Parser().parsestr(file.read(f"adafactor-{version}.dist-info/METADATA").decode())
    for_all = wheel.name == f"adafactor-{version}-{PURE}.whl"
    demand(for_all == is_pure, f"{wheel.name} is {'' if for_all else 'not '}for every machine")
    demand(wheel.name.startswith(f"adafactor-{version}-py3-none-"), f"{wheel.name} is not for every Python")
    libraries = [
        name for name in names if re.fullmatch(r"adafactor/kernels/cpu/libadafactor_\w+\.(so|dylib|dll)", name)
    ]
    demand(bool(libraries) != is_pure, f"{wheel.name} holds the libraries {libraries}")
    strange = [name for name in names if not name.startswith(("adafactor/", f"adafactor-{version}.dist-info/"))]
    known = r"\.(py|typed|txt|h|cpp)$|METADATA|RECORD|WHEEL|LICENSE"
    strange += [name for name in names if name not in libraries and not re.search(known, name)]
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


def try_out(package: Path, version: str, backends: tuple[str, ...], folder: Path) -> None:
    """Install it in a venv of its own without a compiler; run the README's code and a small training there."""
    call(sys.executable, "-m", "venv", str(folder))
    alone = {"PATH": str(folder / "bin"), **NO_COMPILER}
    constraints = str(ROOT / "constraints.txt")
    call(
        *(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", constraints, str(package)),
        cwd=folder,
        environment=alone,
    )
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    demand(len(blocks) > 0, "the README has no code")
    for number, code in enumerate([*blocks, SMOKE.format(version=version, backends=backends)]):
        script = folder / f"block{number}.py"
        script.write_text(code)
        # without its compiled part `auto` says once that it steps in eager PyTorch
        errors = ("-W", "error") if "cpu" in backends else ()
        call(str(folder / "bin" / "python"), *errors, script.name, cwd=folder, environment=alone)
    call(str(folder / "bin" / "adafactor"), "--version", cwd=folder, environment=alone)


if __name__ == "__main__":
    sys.exit(main())
