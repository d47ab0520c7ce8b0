"""From a Python function to machine code, with everything that it calls.

Left to itself, Numba optimises every function and turns it into machine code together with all that it calls, so the
innermost loops are compiled once for each of their callers and callers' callers. Here the called functions stay LLVM's
intermediate code until the function at the top is linked, optimised and translated, once (first step with float32 on
one core: 15 s the one way, 8 s the other).

The machine code must stand alone: it is kept on disk and loaded without Numba (see `machine_code`). So it has an entry
of its own, which ignores Python, and nothing in it may raise or allocate.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import registry
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise RuntimeError("the compiled step needs Numba's compiler, which NUMBA_DISABLE_JIT=1 turns off")

# Not all of this is in Numba's manual. A Numba that has changed it is one that we cannot use: eager PyTorch steps then.
NEEDED = {
    JITCPUCodegen: ["_library_class", "create_library"],
    JITCodeLibrary: ["_optimize_functions", "_optimize_final_module", "_finalize_final_module", "add_linking_library",
                     "add_ir_module", "enable_object_caching", "serialize_using_object_code"],
}  # fmt: skip
for _owner, _names in NEEDED.items():
    if _missing := [name for name in _names if not hasattr(_owner, name)]:
        raise RuntimeError(f"Numba {numba.__version__} is not known yet: {_owner.__name__} has no {_missing[0]}")

# What the machine code may call: the system's, and what LLVM makes of loops that set or copy memory.
OUTSIDE = {"sched_yield", "memset", "memcpy", "memmove"}

# No entry points from Python or C, no memory to manage, no patterns to look for: each takes time to compile.
OPTIONS: Any = {
    "nogil": True, "error_model": "numpy",
    "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False, "no_rewrites": True,
}  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(fastmath: set[str]) -> Callable[[Function], Function]:
    """Make a decorator for functions that only other compiled functions call."""
    decorator: Callable[[Function], Function] = njit(fastmath=fastmath or False, **OPTIONS)
    return decorator


# Multiply-adds may be fused and sums reordered, but never products: G·r·c stays in range only from left to right.
# NaN, infinities and denormals keep their meaning.
exactly = _compiled({"contract", "nsz"})
summing = _compiled({"reassoc", "contract", "nsz"})
as_written = _compiled(set())  # each operation is rounded on its own


class Inner(JITCodeLibrary):
    """The code of one function and of those that it calls, linked but not optimised: only a larger one will be."""

    @property
    def codegen(self) -> Any:
        """Numba would write into the function's globals, which are in no memory yet."""
        return SimpleNamespace(set_env=lambda name, environment: None)

    def get_pointer_to_function(self, name: str) -> int:
        """Say that there is no machine code."""
        return 0

    def _optimize_functions(self, module: Any) -> None:
        pass

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


def machine_code(function: Callable[..., None], name: str, arguments: int) -> bytes:
    """Compile a function of so many integers, which returns nothing, to an object file with an entry of that name."""
    with global_compiler_lock:
        context = registry.cpu_target.target_context
        codegen, signature = context.codegen(), types.void(*[types.int64] * arguments)
        dispatcher: Any = njit(**OPTIONS)(function)
        codegen._library_class = Inner  # Numba asks for it with its compiler lock held, as we do
        try:
            dispatcher.compile(signature)
        finally:
            del codegen._library_class
        compiled = dispatcher.overloads[signature.args]
        library = codegen.create_library(name)
        library.enable_object_caching()
        library.add_linking_library(compiled.library)
        library.add_ir_module(_entry(context, compiled.fndesc, name))
        library.finalize()
        outside = {f.name for f in library._final_module.functions if f.is_declaration and f.name[:5] != "llvm."}
        assert outside <= OUTSIDE, f"{name} needs {outside - OUTSIDE}, so it cannot be loaded alone"
        _, _, (code, _) = library.serialize_using_object_code()
        return bytes(code)


def _entry(context: Any, described: Any, name: str) -> Any:
    """Make a function for C that calls one of Numba's."""
    module = context.create_module(f"{name}_entry")
    called = ir.Function(
        module, context.call_conv.get_function_type(described.restype, described.argtypes), described.llvm_func_name
    )
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(described.argtypes)), name)
    builder = ir.IRBuilder(entry.append_basic_block())
    context.call_conv.call_function(builder, called, described.restype, described.argtypes, entry.args)
    builder.ret_void()
    return module
