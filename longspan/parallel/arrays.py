"""Arrays along the sequence, as ids, flags and positions: they lie as the tokens do, and come along with the keys.

Rules read them by slot, so a device lays out what it has in an array of the whole sequence, in the order of the tokens.
What it has not got is 0 there, and never read: no rule is asked about tokens that do not come to the device. A ring,
and whatever depends on data, asks about all of them: then all are gathered, a few bytes per token.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.masks.pytree import axes_of
from longspan.parallel.collectives import Columns, Halo
from longspan.parallel.parts import Setting, place_of, slots_of
from longspan.parallel.plan import ParallelPlan


def lettered(known: Any, length: int) -> list[tuple[str, Any]]:
    """(axes, array) for each array of a mask, or of a mask and positions [B or 1, T].

    Where an array holds one entry per token, and nothing per pair of them, its last axis is "t".
    """
    return [_named(*each, length) for each in zip(axes_of(known, "BT"), jax.tree.leaves(known), strict=True)]


def _named(letters: str, array: Any, length: int) -> tuple[str, Any]:
    sequence = [letter in "TS" for letter in letters]
    by_token = sequence[-1:] == [True] and sum(sequence) == 1 and array.shape[-1] == length
    return (letters[:-1] + "t" if by_token else letters), array


def gathers(plan: ParallelPlan) -> bool:
    """Whether every device must know such arrays of all tokens."""
    return plan.ring is not None or plan.exchange is not None or any(plan.by_flags)


def laid_out(setting: Setting, device: Any, known: Any, letters: list[str]) -> Any:
    """A mask and positions, whose arrays by token are of the whole sequence, as far as this device needs them."""
    leaves, tree = jax.tree.flatten(known)
    pairs = zip(letters, leaves, strict=True)
    return tree.unflatten([_whole(setting, device, x) if axes[-1:] == "t" else x for axes, x in pairs])


def _whole(setting: Setting, device: Any, array: Any) -> Any:
    """An array [..., T] of the sequence, as far as this device needs it, from its own part [..., rows]."""
    plan = setting.plan
    if gathers(plan):
        stored = jax.lax.all_gather(array, setting.axis, axis=array.ndim - 1, tiled=True)
        owner, row = place_of(plan, jnp.arange(plan.length, dtype=np.int32))
        return jnp.take(stored, owner * np.int32(plan.rows) + row, axis=-1)
    rows = jnp.moveaxis(array, -1, 0)[None]
    laid = jnp.zeros((plan.length, *rows.shape[2:]), rows.dtype)
    for slots, entries in _pieces(setting, device, rows):
        inside = jnp.where(slots[0] < 0, np.int32(plan.length), slots[0])
        laid = laid.at[inside].set(entries[0], mode="drop")
    return jnp.moveaxis(laid, 0, -1)


def _pieces(setting: Setting, device: Any, rows: Any):
    """(slots [1, n], entries [1, n, ...]) of the tokens that are on this device, or that come to it."""
    plan = setting.plan
    yield slots_of(plan, device), rows
    if plan.halo:
        halo = Halo(setting, device)
        yield halo.slots(), *halo.bring(rows)
    tokens = sorted({*plan.columns, *plan.queries})
    if tokens and plan.shards > 1:
        slots = np.array([tokens], np.int32)
        wide = rows.astype(np.int32) if rows.dtype == bool else rows
        (found,) = Columns(setting, device, slots, np.ones_like(slots, bool)).bring(wide)
        yield slots, found.astype(rows.dtype)
