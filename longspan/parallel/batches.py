"""`shard_batch` and `unshard`: tokens, labels and ids in the order and on the devices that attention wants them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspan.array_types import no_type_check
from longspan.axes import BATCH_AXES, on_auto_axes, spec_entries
from longspan.checks import check_static_size
from longspan.parallel.order import Order, check_order, padded, stored
from longspan.parallel.specs import Axes

FILL = {"labels": -100, "segment_ids": -1}  # what padding is where 0 means something
POSITIONS = "positions"


@no_type_check
def shard_batch(
    batch: Mapping[str, Any],
    mesh: Any,
    *,
    order: Order = "contiguous",
    axis: str = "sp",
    batch_axes: Any = BATCH_AXES,
    fill: Mapping[str, int] | None = None,
) -> dict[str, jax.Array]:
    """A batch padded, put in order and placed on a mesh, once for all layers; with the tokens' positions.

    Arrays [B, T, ...] are padded along T to what the axis divides, permuted and split over batch and sequence; arrays
    [B] are split over the batch. "positions" int32 [B, T] says which token lies in each slot: RoPE reads it, and so may
    masks, which take it for granted if it is not given.

    Args:
        batch: arrays by name, with one T. Under several processes, each gives the whole batch.
        mesh: a mesh that has `axis`.
        order: "contiguous" or "zigzag", as `ls.parallel.order` says.
        axis: the mesh axis that shares the sequence.
        batch_axes: those that share the batch; names that the mesh lacks are skipped.
        fill: what padding holds, by name; by default -100 for "labels", -1 for "segment_ids", 0 for all others.

    Example:
        >>> mesh = ls.parallel.mesh(sp=4)
        >>> batch = ls.parallel.shard_batch(dict(tokens=np.arange(15)[None]), mesh, order="zigzag")
        >>> batch["positions"].tolist()
        [[0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]]
        >>> ls.parallel.unshard(batch["tokens"], mesh, length=15, order="zigzag").tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]
    """
    check_order(order)
    axes = Axes.of(mesh, axis, batch_axes, None)
    _check_names(batch, fill or {})
    known = {**FILL, **(fill or {})}
    arrays = {name: x if isinstance(x, jax.Array) else np.asarray(x) for name, x in batch.items()}
    length, rows = _check_arrays(arrays, axes)
    whole = padded(length, axes.shards, order)
    at = stored(whole, axes.shards, order)
    placed = {}
    for name, x in arrays.items():
        if x.ndim > 1:
            padding = known.get(name, 0)
            if whole > length:
                _check_fill(name, x.dtype, padding)
            x = on_auto_axes(_ordered, _first_axis, (whole, axes.shards, order, padding), (x,))
        placed[name] = jax.device_put(x, _sharding(axes, x.ndim))
    positions = np.broadcast_to(at[None], (rows, whole))
    return placed | {POSITIONS: jax.device_put(positions, _sharding(axes, 2))}


@no_type_check
def unshard(
    x: Any, mesh: Any, *, length: int | None = None, order: Order = "contiguous", axis: str = "sp"
) -> jax.Array:
    """An array [B, T, ...] in the order of the tokens, without padding: what `shard_batch` did, undone.

    Args:
        x: what was computed from a sharded batch.
        mesh: the mesh it lies on.
        length: how many tokens there were before padding; by default all.
        order: the order that the batch was put in.
        axis: the mesh axis that shares the sequence.

    Example:
        >>> mesh = ls.parallel.mesh(sp=2)
        >>> ls.parallel.unshard(jnp.array([[0, 3, 1, 2]]), mesh, order="zigzag").tolist()
        [[0, 1, 2, 3]]
    """
    check_order(order)
    axes = Axes.of(mesh, axis, (), None)
    if np.ndim(x) < 2:
        raise ValueError(f"`x` must be an array [B, T, ...], got {type(x).__name__} {np.shape(x)}.")
    x = jnp.asarray(x)
    whole = x.shape[1]
    if padded(whole, axes.shards, order) != whole:
        raise ValueError(f"{whole} tokens are not what `shard_batch` makes for {axes.shards} devices, {order}.")
    length = whole if length is None else check_static_size("length", length, 0)
    if length > whole:
        raise ValueError(f"length={length} is more than the {whole} tokens of the array.")
    return on_auto_axes(_by_token, _first_axis, (length, axes.shards, order), (x,))


def _ordered(whole: int, shards: int, order: str, padding: Any, x: Any) -> Any:
    """An array [B, T, ...], padded to a whole number of chunks and in the order that devices hold."""
    more = [(0, whole - x.shape[1] if i == 1 else 0) for i in range(x.ndim)]
    xp = jnp if isinstance(x, jax.Array) else np
    return xp.pad(x, more, constant_values=padding)[:, stored(whole, shards, order)]


def _by_token(length: int, shards: int, order: str, x: Any) -> Any:
    return x[:, np.argsort(stored(x.shape[1], shards, order))[:length]]


def _first_axis(*given: Any) -> P:
    """How a result lies on explicit axes: by batch rows, as the array that was given."""
    *_, (x,), result = given
    return P(spec_entries(x)[0], *[None] * (result.ndim - 1))


def _check_fill(name: str, dtype: Any, padding: Any) -> None:
    """Whole numbers and bools hold what padding is filled with as it is."""
    if np.dtype(dtype).kind in "biu" and np.asarray(padding).astype(dtype) != padding:
        raise ValueError(
            f"{name!r} is {np.dtype(dtype).name}, which cannot hold {padding}, what padding is filled with: give "
            f"another type, or `fill={{{name!r}: ...}}`."
        )


def _check_names(batch: Any, fill: Mapping[str, int]) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(f"`batch` must be arrays by name, got {type(batch).__name__}.")
    missing = next((name for name, x in batch.items() if x is None), None)
    if missing is not None:
        raise TypeError(f"`batch` must be arrays by name, but {missing!r} is None: leave it out.")
    unknown = next((name for name in fill if name not in batch), None)
    if unknown is not None:
        there = ", ".join(map(repr, batch))
        raise ValueError(f"`fill` names {unknown!r}, which is not in the batch: {there}.")


def _check_arrays(arrays: dict[str, Any], axes: Axes) -> tuple[int, int]:
    """The length and the batch rows that all arrays share."""
    if POSITIONS in arrays:
        raise ValueError(f"The batch has {POSITIONS!r} already. Drop them, or rename them if they mean something else.")
    lengths = {name: x.shape[1] for name, x in arrays.items() if x.ndim > 1}
    rows = {name: x.shape[0] for name, x in arrays.items() if x.ndim > 0}
    if not lengths:
        raise ValueError(f"The batch has no array [B, T, ...], but {', '.join(map(repr, arrays)) or 'nothing'}.")
    for what, sizes in (("tokens", lengths), ("batch rows", rows)):
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{name!r} has {size}" for name, size in sizes.items())
            raise ValueError(f"All arrays of a batch must have as many {what}: {told}.")
    length, batch = next(iter(lengths.values())), next(iter(rows.values()))
    if length < axes.shards:
        raise ValueError(f"{length} tokens cannot be shared by {axes.shards} devices: give each at least one.")
    if batch % axes.count(axes.batch):
        raise ValueError(f"{batch} batch rows cannot be split over {axes.count(axes.batch)} devices.")
    return length, batch


def _sharding(axes: Axes, rank: int) -> NamedSharding:
    batch = axes.batch or None
    return NamedSharding(axes.mesh, P(*(batch, axes.sequence)[:rank]))
