"""The native library of the `cpu` engine: finding it, saying why it is missing, calling into it."""

import ctypes
import functools
import os
from pathlib import Path

import jax
import numpy as np

LIBRARY = Path(__file__).parent.with_name("_longspan.so")
TARGETS = ("longspan_forward", "longspan_backward", "longspan_bias_gradient")


def missing() -> str | None:
    """Why the native library cannot be used and what to do about it; None if it can."""
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


def instruction_sets() -> tuple[str, ...]:
    """The kernels that can run on this machine, the one that is used first."""
    names = ctypes.CDLL(str(LIBRARY)).longspan_isas
    names.restype = ctypes.c_char_p
    return tuple(names().decode().split(","))


def call(target: str, results, operands, **attributes):
    """One call of a native handler."""
    return jax.ffi.ffi_call(target, results, vmap_method="sequential")(*operands, **attributes)


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
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    except (OSError, AttributeError) as error:
        return f"its native library cannot be loaded ({error}). Install longspan again, from source"
    return None


def static_ints(values) -> np.ndarray:
    """Ints as an attribute that handlers read as int32."""
    return np.asarray(values, np.int32).reshape(-1)
