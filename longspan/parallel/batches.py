"""`shard_batch` and `unshard`: put a batch in the order and on the devices that `ls.parallel.attention` expects."""

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

FILL = {"labels": -100, "segment_ids": -1}  # values of padding other than 0
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
    """Pads a batch, puts its tokens in order and places it on a mesh, once for all layers; adds the positions.

    Arrays [B, T, ...] are padded along T to a multiple of the axis size, permuted, and sharded over batch and sequence.
    Arrays [B] are sharded over the batch. "positions", int32 [B, T], has the index of the token in each slot, for RoPE;
    `ls.parallel.attention` assumes these positions by default.

    Args:
        batch: arrays by name, all with the same T. With several processes, each passes the whole batch.
        mesh: a mesh that has `axis`.
        order: "contiguous" or "zigzag", for example from `ls.parallel.order`.
        axis: the mesh axis that shards the sequence.
        batch_axes: the mesh axes that shard the batch; names that the mesh lacks are ignored.
        fill: the value of padding, by name; by default -100 for "labels", -1 for "segment_ids" and 0 for all others.

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
    fill_values = {**FILL, **(fill or {})}
    arrays = {name: x if isinstance(x, jax.Array) else np.asarray(x) for name, x in batch.items()}
    length, rows = _check_arrays(arrays, axes)
    whole = padded(length, axes.shards, order)
    at = stored(whole, axes.shards, order)
    placed = {}
    for name, x in arrays.items():
        if x.ndim > 1:
            padding = fill_values.get(name, 0)
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
    """An array [B, T, ...] in the order of the tokens, without padding: the inverse of `shard_batch`.

    Args:
        x: an array that was computed from a sharded batch.
        mesh: the mesh on which it is placed.
        length: the number of tokens before padding; by default all tokens are kept.
        order: the order of the batch.
        axis: the mesh axis that shards the sequence.

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
        raise ValueError(
            f"`x` has {whole} tokens, but `shard_batch` pads to a multiple of {padded(1, axes.shards, order)} for "
            f"{axes.shards} devices and order={order!r}. Pass an array whose tokens are padded and ordered as by "
            "`shard_batch` with the same `mesh` and `order`."
        )
    if length is None:
        length = whole
    length = check_static_size("length", length, 0)
    if length > whole:
        raise ValueError(f"`length` must be at most the {whole} tokens of the array, got {length}.")
    return on_auto_axes(_by_token, _first_axis, (length, axes.shards, order), (x,))


def _ordered(whole: int, shards: int, order: str, padding: Any, x: Any) -> Any:
    """An array [B, T, ...], padded to `whole` tokens and in the order of the devices."""
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, whole - x.shape[1])
    xp = jnp if isinstance(x, jax.Array) else np
    return xp.pad(x, widths, constant_values=padding)[:, stored(whole, shards, order)]


def _by_token(length: int, shards: int, order: str, x: Any) -> Any:
    return x[:, np.argsort(stored(x.shape[1], shards, order))[:length]]


def _first_axis(*given: Any) -> P:
    """The spec of the result on explicit axes: batch rows as in the argument."""
    *_, (x,), result = given
    return P(spec_entries(x)[0], *[None] * (result.ndim - 1))


def _check_fill(name: str, dtype: Any, padding: Any) -> None:
    """Ints and bools can hold the value of padding."""
    if np.dtype(dtype).kind in "biu" and np.asarray(padding).astype(dtype) != padding:
        raise ValueError(
            f"{name!r} is {np.dtype(dtype).name}, which cannot hold {padding}, the value of its padding. Convert it to "
            f"another dtype, or pass `fill={{{name!r}: ...}}`."
        )


def _check_names(batch: Any, fill: Mapping[str, int]) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(f"`batch` must be a dict from names to arrays, got {type(batch).__name__}.")
    missing = next((name for name, x in batch.items() if x is None), None)
    if missing is not None:
        raise TypeError(f"`batch` must be a dict from names to arrays, but {missing!r} is None. Leave {missing!r} out.")
    unknown = next((name for name in fill if name not in batch), None)
    if unknown is not None:
        names = ", ".join(map(repr, batch))
        raise ValueError(f"`fill` names {unknown!r}, which is not in the batch. The batch has {names}.")


def _check_arrays(arrays: dict[str, Any], axes: Axes) -> tuple[int, int]:
    """The length and the batch rows that all arrays share."""
    if POSITIONS in arrays:
        raise ValueError(f"The batch already has {POSITIONS!r}, which `shard_batch` adds. Remove or rename that array.")
    lengths = {name: x.shape[1] for name, x in arrays.items() if x.ndim > 1}
    rows = {name: x.shape[0] for name, x in arrays.items() if x.ndim > 0}
    if not lengths:
        raise ValueError(
            "`shard_batch` needs at least one array of shape [B, T, ...]. The batch has "
            f"{', '.join(map(repr, arrays)) or 'no arrays'}."
        )
    for what, sizes in (("tokens", lengths), ("batch rows", rows)):
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name!r} has {size}" for name, size in sizes.items())
            raise ValueError(f"All arrays of a batch must have the same number of {what}, but {listed}.")
    length, batch = next(iter(lengths.values())), next(iter(rows.values()))
    if length < axes.shards:
        raise ValueError(
            f"{length} tokens cannot be shared by {axes.shards} devices. Pad to at least one token per device."
        )
    if batch % axes.count(axes.batch):
        raise ValueError(
            f"{batch} batch rows cannot be split over {axes.count(axes.batch)} devices. Use a multiple of "
            f"{axes.count(axes.batch)} rows."
        )
    return length, batch


def _sharding(axes: Axes, rank: int) -> NamedSharding:
    batch = axes.batch or None
    return NamedSharding(axes.mesh, P(*(batch, axes.sequence)[:rank]))
