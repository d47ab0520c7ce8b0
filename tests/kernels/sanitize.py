"""`make sanitize`: the core with the compiler's sanitizers, on tensors of odd shapes, with one and with three threads.

It starts itself again with the sanitizer's own library loaded first, as Python was built without.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/adafactor/kernels/cpu/src"
FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-fopenmp-simd", "-fno-exceptions", "-fno-rtti", "-fPIC"]
SHAPES = [(110, 300), (3, 100, 130), (7, 5), (1,), (513, 2049), (2, 1030), (5000,), (64, 4100), (30, 17, 3, 3)]


def steps(library: Path) -> None:
    """Take some steps with a library, on every kind of tensor."""
    import torch

    from adafactor import Adafactor
    from adafactor.kernels.cpu import library as module

    module.library.cache_clear()
    loaded = module.Library(library)
    module.library = lambda: loaded  # type: ignore[assignment]
    sys.modules["adafactor.kernels.cpu.executor"].library = module.library  # type: ignore[attr-defined]
    kinds = itertools.product(
        (torch.float32, torch.bfloat16, torch.float16),
        ("nearest", "stochastic", "kahan"),
        ({}, *({"beta1": 0.9, "momentum_dtype": d, "momentum_of": o} for d in ("float32", "bfloat16", "int8")
               for o in ("update", "gradient"))),
    )  # fmt: skip
    for dtype, rounding, keywords in kinds:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            params = [torch.randn(shape).to(dtype).requires_grad_() for shape in SHAPES]
            optimizer = Adafactor(params, rounding=rounding, **keywords)  # type: ignore[arg-type]
            for _ in range(2):
                for p in params:
                    p.grad = torch.randn_like(p)
                optimizer.step()
    print("clean")


def main() -> int:
    """Build the core with each sanitizer, and run it."""
    if len(sys.argv) > 1:
        steps(Path(sys.argv[1]))
        return 0
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, runtime in (("address", "libasan.so"), ("undefined", "libubsan.so")):
            library = Path(folder) / f"{name}.so"
            build = ["g++", *FLAGS, "-shared", f"-fsanitize={name}", "-fno-sanitize-recover=all"]
            subprocess.run([*build, str(SOURCES / "step.cpp"), "-o", str(library)], check=True)
            found = subprocess.run(["g++", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True)
            environment = {**os.environ, "LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
            print(name, end=": ", flush=True)
            worst |= subprocess.run([sys.executable, __file__, str(library)], env=environment).returncode
    return worst


if __name__ == "__main__":
    sys.exit(main())
