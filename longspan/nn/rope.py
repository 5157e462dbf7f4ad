"""Rotary positions of the Flax modules: frequencies fixed in the constructor or given to a call."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from longspan.checks import is_abstract
from longspan.rope import frequencies, rotate


def hashable_rope(rope: Any) -> Any:
    """A constructor's `rope` in a form that hashes, since modules must hash under `jit`."""
    if rope is None or isinstance(rope, Mapping):
        return frozen(rope)
    inv_freq, factor = _check_pair(rope)
    if is_abstract(inv_freq) or is_abstract(factor) or np.ndim(inv_freq) != 1:
        raise ValueError(
            "The `rope` of a module must be static: frequencies [D/2] and a factor, with known values. Pass traced "
            "frequencies, or frequencies [B, D/2], to the call of the module instead, as `rope=`."
        )
    return tuple(map(float, np.asarray(inv_freq, np.float32))), float(factor)


def frozen(value: Any) -> Any:
    """The same parameters in a form that hashes: dicts become FrozenDicts, lists and arrays become tuples."""
    if isinstance(value, Mapping):
        return FrozenDict({name: frozen(inner) for name, inner in value.items()})
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(map(frozen, value))
    return value


def resolve_rope(of_module: Any, of_call: Any, head_dim: int) -> tuple[Any, Any] | None:
    """(inv_freq, attention_factor): the call's, or else the module's; None if nothing is rotated."""
    rope = of_call
    if rope is None:
        rope = of_module
    if rope is None:
        return None
    if isinstance(rope, Mapping):
        inv_freq, factor = frequencies(rope, head_dim)
    else:
        inv_freq, factor = _check_pair(rope)
    if isinstance(inv_freq, tuple | list):
        inv_freq = np.asarray(inv_freq, np.float32)
    return inv_freq, factor


def apply_rope(rope: tuple[Any, Any] | None, interleaved: bool, positions: Any, *arrays: Any) -> tuple[jax.Array, ...]:
    """Rotates queries or keys by their positions, by default 0, 1, 2, …; returns them unchanged without `rope`."""
    if rope is None:
        return arrays
    inv_freq, factor = rope
    if positions is None:
        positions = jnp.arange(arrays[0].shape[1])
    return tuple(rotate(x, positions, inv_freq, attention_factor=factor, interleaved=interleaved) for x in arrays)


def check_rope_positions(rope: Any, rope_positions: Any) -> None:
    """Refuses `rope_positions` without `rope`."""
    if rope is None and rope_positions is not None:
        raise ValueError(
            "`rope_positions` are used only with `rope`, which this module does not have. Give `rope`, or leave "
            "`rope_positions` out."
        )


def select_rope_positions(rope: Any, positions: Any, rope_positions: Any) -> Any:
    """The positions to rotate by, in modules whose masks compare slots: there both arguments mean the same."""
    check_rope_positions(rope, rope_positions)
    if rope is None and positions is not None:
        raise ValueError(
            "`positions` are used only with `rope`, which this module does not have. Its windows and blocks compare "
            "indices in the array, not positions. Give `rope`, or leave `positions` out."
        )
    if positions is not None and rope_positions is not None:
        raise ValueError(
            "`positions` and `rope_positions` were both given. In this module both set the positions for `rope`, "
            "because its windows and blocks compare indices in the array, not positions. Give one of them."
        )
    if rope_positions is None:
        return positions
    return rope_positions


def _check_pair(rope: Any) -> tuple[Any, Any]:
    if not isinstance(rope, tuple | list) or len(rope) != 2:
        raise TypeError(
            "`rope` must be parameters as in `ls.rope.frequencies`, or the pair (inv_freq, attention_factor) that it "
            f"returns, got {type(rope).__name__}."
        )
    return rope[0], rope[1]
