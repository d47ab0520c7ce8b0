"""The compiled part: one library for each instruction set, from the same source. All else is in pyproject.toml.

The libraries know nothing of Python and are loaded by ctypes, so a wheel is for any Python. Each is optional: without a
compiler the package is installed without it, and steps in eager PyTorch.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = "src/adafactor/kernels/cpu/src"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"]
LINK = ["-s", "-static-libgcc", "-static-libstdc++"] if sys.platform.startswith("linux") else []
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
SETS: dict[str, list[str]] = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    SETS |= {"avx2": AVX2, "avx512": AVX512}


class BuildLibraries(build_ext):
    """Libraries that are no modules of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file's name without the tag of one Python."""
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Return none: the source says what is exported, and there is no PyInit."""
        return []


class WheelForAnyPython(bdist_wheel):
    """A wheel for one platform and any Python; where no library was built, for any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags in the wheel's name."""
        built = any(Path(self.get_finalized_command("build").build_lib).rglob("*.so"))
        return "py3", "none", super().get_tag()[2] if built else "any"


def library(name: str, flags: list[str]) -> Extension:
    """Describe one library."""
    return Extension(
        f"adafactor.kernels.cpu.libadafactor_{name}",
        [f"{SOURCES}/step.cpp"],
        depends=[str(path) for path in sorted(Path(SOURCES).glob("*.h"))],
        extra_compile_args=[*FLAGS, *flags],
        extra_link_args=LINK,
        language="c++",
        optional=True,
    )


def description() -> str:
    r"""Return the README as an index shows it, without the repository around it: of links into that, only their text.

    When the repository has an address, let them lead there instead: r"[\1](https://…/\2)".
    """
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n", "", text)
    return re.sub(r"\[((?:`[^`]*`|[^\]])*)\]\((?!https?:)([^)]*)\)", r"\1", text)


commands: dict[str, Any] = {"build_ext": BuildLibraries, "bdist_wheel": WheelForAnyPython}
setup(
    ext_modules=[library(*one) for one in SETS.items()],
    cmdclass=commands,
    long_description=description(),
    long_description_content_type="text/markdown",
)
