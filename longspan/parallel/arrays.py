"""Arrays with one entry per token (ids, flags, positions): they are sharded like the tokens, and sent with the keys.

Rules read them by slot. So each device places the entries that it holds and receives in an array of the whole sequence,
in the order of the tokens. All other entries are 0 and never read, because no rule is evaluated for tokens that a
device does not receive. A ring, and plans that depend on data, evaluate rules for all tokens: then the arrays are
gathered, a few bytes per token.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.masks.pytree import axes_of
from longspan.parallel.collectives import GlobalKeys, Halo
from longspan.parallel.parts import ShardConfig, place_of, slots_of
from longspan.parallel.plan import ParallelPlan


def lettered(known: Any, length: int) -> list[tuple[str, Any]]:
    """(axes, array) for each array of a mask, or of a mask and positions [B or 1, T].

    The last axis is "t" for an array with one entry per token, and none per pair of tokens.
    """
    return [_named(*each, length) for each in zip(axes_of(known, "BT"), jax.tree.leaves(known), strict=True)]


def _named(letters: str, array: Any, length: int) -> tuple[str, Any]:
    sequence = [letter in "TS" for letter in letters]
    by_token = sequence[-1:] == [True] and sum(sequence) == 1 and array.shape[-1] == length
    if by_token:
        letters = letters[:-1] + "t"
    return letters, array


def gathers(plan: ParallelPlan) -> bool:
    """Whether every device needs the entries of all tokens."""
    return plan.ring is not None or plan.exchange is not None or any(plan.by_flags)


def place_arrays(config: ShardConfig, device: Any, known: Any, letters: list[str]) -> Any:
    """A mask and positions, whose arrays by token have the length of the sequence, filled where this device reads."""
    leaves, tree = jax.tree.flatten(known)
    placed = []
    for axes, leaf in zip(letters, leaves, strict=True):
        placed.append(_place(config, device, leaf) if axes[-1:] == "t" else leaf)
    return tree.unflatten(placed)


def _place(config: ShardConfig, device: Any, array: Any) -> Any:
    """An array [..., T], filled where this device reads it, from the device's part [..., rows]."""
    plan = config.plan
    if gathers(plan):
        stored = jax.lax.all_gather(array, config.axis, axis=array.ndim - 1, tiled=True)
        owner, row = place_of(plan, jnp.arange(plan.length, dtype=np.int32))
        return jnp.take(stored, owner * np.int32(plan.rows) + row, axis=-1)
    rows = jnp.moveaxis(array, -1, 0)[None]
    placed = jnp.zeros((plan.length, *rows.shape[2:]), rows.dtype)
    for slots, entries in _held_and_received(config, device, rows):
        inside = jnp.where(slots[0] < 0, np.int32(plan.length), slots[0])
        placed = placed.at[inside].set(entries[0], mode="drop")
    return jnp.moveaxis(placed, 0, -1)


def _held_and_received(config: ShardConfig, device: Any, rows: Any):
    """(slots [1, n], entries [1, n, ...]) of the tokens that this device holds, and of those that it receives."""
    plan = config.plan
    yield slots_of(plan, device), rows
    if plan.halo:
        halo = Halo(config, device)
        yield halo.slots(), *halo.bring(rows)
    tokens = sorted({*plan.columns, *plan.queries})
    if tokens and plan.shards > 1:
        slots = np.array([tokens], np.int32)
        wide = rows.astype(np.int32) if rows.dtype == bool else rows
        (found,) = GlobalKeys(config, device, slots, np.ones_like(slots, bool)).bring(wide)
        yield slots, found.astype(rows.dtype)
