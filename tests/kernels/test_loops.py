"""The innermost loops by themselves: the bits of torch's own roundings and of `core`, whatever the length."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adafactor.core import momentum
from adafactor.core.rounding import keys, random_words, roots, stochastic

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/adafactor/kernels/cpu/src"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
LENGTHS = [*range(68), 127, 128, 129, 500, 511, 512, 513, 1023, 1024, 1100]
KEYS = keys(roots(7, 1), 5)
SHORT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(scope="module", params=["baseline", "avx2"])
def loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """The loops, compiled as setup.py does it."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no compiler")
    if request.param == "avx2" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has no AVX2")
    library = tmp_path_factory.mktemp("loops") / "loops.so"
    flags = [*FLAGS, *(AVX2 if request.param == "avx2" else [])]
    source = ROOT / "tests/kernels/loops.cpp"
    subprocess.run([compiler, *flags, "-fPIC", "-shared", f"-I{SOURCES}", source, "-o", library], check=True)
    yield ctypes.CDLL(str(library))


def call(function: object, *arguments: Tensor | int | float) -> None:
    converted = [
        ctypes.c_void_p(a.data_ptr())
        if isinstance(a, Tensor)
        else (ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_float(a))
        for a in arguments
    ]
    function(*converted)  # type: ignore[operator]


def values_of(count: int, seed: int = 0) -> Tensor:
    """Floats of any bits but NaN's, and many of the sizes of weights."""
    draws = torch.Generator().manual_seed(seed)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=draws, dtype=torch.int32).view(torch.float32)
    usual = torch.randn(count, generator=draws) * 10.0 ** torch.randint(-9, 5, (count,), generator=draws)
    return torch.where(torch.arange(count) % 2 == 0, usual, any_bits.nan_to_num(1.5))


EDGES = [0.0, -0.0, 65504.0, 65519.9, 65520.0, -7e4, 2.0**-14, 2.0**-24, 2.0**-25, 1e-45, float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_kept_and_read_as_torch_does_it(dtype: torch.dtype, loops: ctypes.CDLL) -> None:
    everything = torch.cat([values_of(1100), torch.tensor(EDGES)])
    for n in (*LENGTHS, len(everything)):
        values = everything[-n:].clone() if n else everything[:0]
        stored, loaded = torch.empty(n + 1, dtype=dtype).fill_(3), torch.full((n + 1,), 3.0)
        call(loops[f"convert_{str(dtype)[6:]}"], values, stored, loaded, n)
        assert torch.equal(stored[:n], values.to(dtype)) and torch.equal(loaded[:n], values.to(dtype).float())
        assert stored[n] == loaded[n] == 3, "written beyond the end"


@SHORT
def test_every_16_bit_number_is_read_as_torch_reads_it_and_nan_stays(dtype: torch.dtype, loops: ctypes.CDLL) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    stored, loaded = torch.empty_like(every), torch.empty(2**16)
    call(loops[f"convert_{str(dtype)[6:]}"], every.float(), stored, loaded, 2**16)
    torch.testing.assert_close(loaded, every.float(), rtol=0, atol=0, equal_nan=True)


@SHORT
def test_numbers_are_rounded_at_random_as_core_does_it(dtype: torch.dtype, loops: ctypes.CDLL) -> None:
    pair = torch.tensor(KEYS, dtype=torch.int64).to(torch.uint32)
    for n in LENGTHS:
        values = values_of(n, seed=n)
        if dtype == torch.bfloat16:  # beyond its largest number nothing that is computed lies
            values = values.clamp(-3.3e38, 3.3e38)
        stored, first = torch.empty(n, dtype=dtype), 2**32 - 2000 if n % 2 else 0
        call(loops[f"draw_{str(dtype)[6:]}"], values, stored, first, pair, n)
        words = random_words(torch.arange(first, first + n), KEYS)
        assert torch.equal(stored, stochastic(values, dtype, words)), n


def test_blocks_of_int8_are_cores(loops: ctypes.CDLL) -> None:
    pair = torch.tensor(KEYS, dtype=torch.int64).to(torch.uint32)
    for n in [length for length in LENGTHS if 0 < length <= 512]:
        for size in (1.0, 2.0**-120):
            values = torch.randn(n, generator=torch.Generator().manual_seed(n)) * size
            stored, scale = torch.empty(n, dtype=torch.int8), torch.empty(1)
            call(loops.encode, values, stored, scale, 77, pair, n)
            words = random_words(torch.arange(77, 77 + n), KEYS)
            integers, scales = momentum.encode(values, momentum.Blocks(0, n), words)
            assert torch.equal(stored, integers) and torch.equal(scale, scales), n


def test_the_compiler_makes_vector_instructions_of_every_loop(tmp_path: Path) -> None:
    """It says nothing where it gives up, and the step then takes seven times as long."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("only g++ tells which loops it has vectorised")
    flags = [*FLAGS, *AVX2, "-fno-exceptions", "-fno-rtti", "-fopt-info-vec-missed", "-c"]
    command = [compiler, *flags, str(SOURCES / "step.cpp"), "-o", str(tmp_path / "step.o")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "couldn't vectorize loop" in told, "it says something about other loops"
    assert not re.findall(r"loops\.h:.*couldn't vectorize loop", told)
