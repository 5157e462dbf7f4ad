"""The native library of the `cpu` engine: loads it, calls it, and gives the reason if it is missing."""

import contextlib
import ctypes
import functools
import os
from pathlib import Path

import jax
import numpy as np

LIBRARY = Path(__file__).with_name("_longspan.so")
# kAbi in native/program.h. Raise both whenever a call changes: the words of the mask program, roles, attributes,
# operands or results. A library with another number would misread its operands.
ABI = 9
TARGETS = ("longspan_forward", "longspan_backward", "longspan_bias_gradient", "longspan_product", "longspan_put")


def missing() -> str | None:
    """The reason why the native library cannot be used, and what to do; None if it can.

    A library of another ABI raises an error. A mere reason would let `engine="auto"` run on `xla`, and a developer who
    just changed the kernel would measure the wrong engine.
    """
    if os.environ.get("LONGSPAN_NATIVE") == "0":
        return "LONGSPAN_NATIVE=0 disables the native library; unset the variable to enable it"
    reason = _load()
    if reason is not None:
        return reason
    forced = os.environ.get("LONGSPAN_CPU_ISA")
    if forced and forced not in instruction_sets():
        return (
            f"LONGSPAN_CPU_ISA={forced} cannot run here; this machine and build support {', '.join(instruction_sets())}"
        )
    return None


def register() -> None:
    """Registers the handlers with XLA, so that programs from `jax.export` run wherever longspan is imported.

    Problems with the library are reported when it is used, not at the import.
    """
    with contextlib.suppress(ImportError):  # a stale library, which `missing` refuses
        missing()


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that this machine and build support; the first one is used."""
    names = ctypes.CDLL(str(LIBRARY)).longspan_isas
    names.restype = ctypes.c_char_p
    return tuple(names().decode().split(","))


def call(target: str, results, operands, *, in_place: dict[int, int] | None = None, **attributes):
    """One call of a native handler; `in_place` maps operands to the results that reuse their memory."""
    handler = jax.ffi.ffi_call(target, results, vmap_method="sequential", input_output_aliases=in_place)
    return handler(*operands, **attributes)


@functools.cache
def _load() -> str | None:
    """Opens the library and registers its handlers with XLA, once. Returns the reason if that fails."""
    if not LIBRARY.exists():
        return (
            "its native library was not built when longspan was installed (there was no C++ compiler, or the build "
            "failed). Install a compiler (for example g++) and then longspan from source again, with "
            "LONGSPAN_NATIVE=require to see what fails: "
            "`LONGSPAN_NATIVE=require pip install --force-reinstall --no-deps --no-binary longspan longspan`"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
        _refuse_stale(library)
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    except (OSError, AttributeError) as error:
        return f"its native library cannot be loaded ({error}). Reinstall longspan from source"
    return None


def _refuse_stale(library: ctypes.CDLL) -> None:
    found = f"ABI {library.longspan_abi()}" if hasattr(library, "longspan_abi") else "no ABI number"
    if found != f"ABI {ABI}":
        raise ImportError(
            f"{LIBRARY} was built from the sources of another version of longspan. It has {found}, but this version "
            f"calls ABI {ABI}. Run `make native` in a source checkout; otherwise reinstall longspan."
        )


def static_ints(values) -> np.ndarray:
    """Ints as an attribute that native handlers read as int32."""
    return np.asarray(values, np.int32).reshape(-1)
