"""The native library of the `cpu` engine: finding it, saying why it is missing, calling into it."""

import contextlib
import ctypes
import functools
import os
from pathlib import Path

import jax
import numpy as np

LIBRARY = Path(__file__).with_name("_longspan.so")
# kAbi in native/program.h. Raise both whenever a call changes: the words of the mask program, roles, attributes,
# operands or results. A library with another number would misread what it is given.
ABI = 8
TARGETS = ("longspan_forward", "longspan_backward", "longspan_bias_gradient", "longspan_product", "longspan_put")


def missing() -> str | None:
    """Why the native library cannot be used and what to do about it; None if it can.

    A library of another longspan is an error instead: with a reason, `engine="auto"` would run on `xla`, and whoever
    measures a kernel just changed would measure that.
    """
    if os.environ.get("LONGSPAN_NATIVE") == "0":
        return "LONGSPAN_NATIVE=0 switches the native library off; unset it to use it"
    reason = _load()
    if reason is not None:
        return reason
    forced = os.environ.get("LONGSPAN_CPU_ISA")
    if forced and forced not in instruction_sets():
        return (
            f"LONGSPAN_CPU_ISA={forced} cannot run here; this machine and build have: {', '.join(instruction_sets())}"
        )
    return None


def register() -> None:
    """Makes the handlers known to XLA, so that a program that `jax.export` wrote runs wherever longspan is imported.

    What is wrong with the library is said where it is used, not where longspan is imported.
    """
    with contextlib.suppress(ImportError):  # a stale library, which `missing` refuses
        missing()


def instruction_sets() -> tuple[str, ...]:
    """The kernels that can run on this machine, the one that is used first."""
    names = ctypes.CDLL(str(LIBRARY)).longspan_isas
    names.restype = ctypes.c_char_p
    return tuple(names().decode().split(","))


def call(target: str, results, operands, *, in_place: dict[int, int] | None = None, **attributes):
    """One call of a native handler; `in_place`: operands whose memory is that of results."""
    handler = jax.ffi.ffi_call(target, results, vmap_method="sequential", input_output_aliases=in_place)
    return handler(*operands, **attributes)


@functools.cache
def _load() -> str | None:
    """Opens the library and registers its handlers with XLA, once; the reason if that fails."""
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
        return f"its native library cannot be loaded ({error}). Install longspan again, from source"
    return None


def _refuse_stale(library: ctypes.CDLL) -> None:
    found = f"ABI {library.longspan_abi()}" if hasattr(library, "longspan_abi") else "no ABI number"
    if found != f"ABI {ABI}":
        raise ImportError(
            f"{LIBRARY} has {found}, but this longspan calls ABI {ABI}: it was built from other sources. "
            "Run `make native` in a source checkout; otherwise install longspan again."
        )


def static_ints(values) -> np.ndarray:
    """Ints as an attribute that handlers read as int32."""
    return np.asarray(values, np.int32).reshape(-1)
