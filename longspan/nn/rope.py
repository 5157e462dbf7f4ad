"""Rotary positions of both kinds of Flax modules: numbers settled when a module is made, applied when it is called."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from longspan.checks import is_abstract
from longspan.rope import frequencies, rotate


def settled(rope: Any) -> Any:
    """A constructor's `rope` as a module keeps it: parameters or frequencies that hash, as modules must under jit."""
    if rope is None or isinstance(rope, Mapping):
        return frozen(rope)
    inv_freq, factor = _pair(rope)
    if is_abstract(inv_freq) or is_abstract(factor) or np.ndim(inv_freq) != 1:
        raise ValueError(
            "The `rope` of a module is part of the program: frequencies [D/2] and a factor, known numbers. Give traced "
            "ones, or frequencies [B, D/2], to the call."
        )
    return tuple(map(float, np.asarray(inv_freq, np.float32))), float(factor)


def frozen(value: Any) -> Any:
    """The same parameters as a module or a config keeps them, which hashes."""
    if isinstance(value, Mapping):
        return FrozenDict({name: frozen(inner) for name, inner in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list | tuple | np.ndarray) else value


def resolved(of_module: Any, of_call: Any, head_dim: int) -> tuple[Any, Any] | None:
    """(inv_freq, attention_factor) of a call: its own, or else the module's; None: nothing is rotated."""
    rope = of_module if of_call is None else of_call
    if rope is None:
        return None
    inv_freq, factor = frequencies(rope, head_dim) if isinstance(rope, Mapping) else _pair(rope)
    return np.asarray(inv_freq, np.float32) if isinstance(inv_freq, tuple | list) else inv_freq, factor


def turned(rope: tuple[Any, Any] | None, interleaved: bool, positions: Any, *arrays: Any) -> tuple[jax.Array, ...]:
    """Queries or keys of one side, rotated by their positions; as they are without `rope`."""
    if rope is None:
        return arrays
    inv_freq, factor = rope
    at = jnp.arange(arrays[0].shape[1]) if positions is None else positions
    return tuple(rotate(x, at, inv_freq, attention_factor=factor, interleaved=interleaved) for x in arrays)


def check_rope(rope: Any, rope_positions: Any) -> None:
    """That there is something to rotate by positions that are for that alone."""
    if rope is None and rope_positions is not None:
        raise ValueError(
            "`rope_positions` are for `rope`, which this module does not have. Give `rope`, or leave `rope_positions` "
            "out."
        )


def rope_places(rope: Any, positions: Any, rope_positions: Any) -> Any:
    """The positions to rotate by, in modules whose masks go by slots: there both names mean the same."""
    check_rope(rope, rope_positions)
    if rope is None and positions is not None:
        raise ValueError(
            "`positions` are for `rope`, which this module does not have: its windows and blocks go by slots. Give "
            "`rope`, or leave `positions` out."
        )
    if positions is not None and rope_positions is not None:
        raise ValueError(
            "`positions` and `rope_positions` were both given, and both are for `rope` here: windows and blocks go by "
            "slots. Give one of them."
        )
    return positions if rope_positions is None else rope_positions


def _pair(rope: Any) -> tuple[Any, Any]:
    if not isinstance(rope, tuple | list) or len(rope) != 2:
        raise TypeError(
            "`rope` must be parameters as in `ls.rope.frequencies`, or what it returns, (inv_freq, attention_factor), "
            f"got {type(rope).__name__}."
        )
    return rope[0], rope[1]
