"""`Cache`: keys and values in the slots of a plan; `View`: the keys and values that new tokens attend to."""

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from longspan.array_types import FAR, Array, no_type_check
from longspan.axes import explicit_mesh, on_auto_axes, spec_entries
from longspan.cache.checks import (
    check_drawable,
    check_dtype,
    check_lengths,
    check_mask,
    check_new,
    check_order,
    check_rollback,
    check_rows,
)
from longspan.cache.lifetimes import sees_free_slots
from longspan.cache.picture import show_kept
from longspan.cache.plan import CachePlan
from longspan.checks import check_static_size, is_known
from longspan.masks import Mask, Prefix
from longspan.masks.base import SLOT
from longspan.masks.by_slot import kv_flags

FREE_SLOT = FAR  # the position of a slot that holds no key: it is after every query

if TYPE_CHECKING:
    Leaf = jax.Array
else:
    Leaf = Any  # without a shape: JAX rebuilds the object with placeholders, and `vmap` stacks the arrays


class AttentionArguments(TypedDict):
    """The keyword arguments that `View.of` returns for `ls.attention`."""

    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    mask: Mask
    q_positions: jax.Array  # int32 [B, T]
    kv_positions: jax.Array  # int32 [B, S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
    """The keys, values and positions that new tokens attend to.

    Example:
        >>> mask = ls.Causal() & ls.Window(3, 0)
        >>> cache = ls.cache.init(ls.cache.plan(mask, 100), 1, 2, 8, jnp.float32)
        >>> k = v = jnp.ones((1, 6, 2, 8))
        >>> cache, view = cache.append(k, v)
        >>> ls.attention(jnp.ones((1, 6, 4, 8)), **view.of(mask)).shape
        (1, 6, 4, 8)
    """

    k: Leaf  # [B, S, K, H]
    v: Leaf  # [B, S, K, Hv]
    q_positions: Leaf  # int32 [B, T]
    kv_positions: Leaf  # int32 [B, S]
    plan: CachePlan = field(metadata=dict(static=True))

    @no_type_check
    def of(self, mask: Mask) -> AttentionArguments:
        """The arguments of `ls.attention` other than q: k, v, positions, and the mask for these tokens.

        Args:
            mask: the mask that the cache was planned for, or one that allows no more.
        """
        return AttentionArguments(k=self.k, v=self.v, **_attention_arguments(self, mask, self.k.shape[0]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AppendStep:
    """An append of n tokens: the slots that it writes, and the keys that the tokens attend to.

    Caches with the same plan and positions, such as those of a model's layers, share it.
    """

    slots: Leaf  # int32 [B, n]: the slot of each new key; `capacity` or more: it is not stored
    q_positions: Leaf  # int32 [B, n]
    kv_positions: Leaf  # int32 [B, S]
    order: Any  # int32 [B, S]: sorts old and new keys by position; None: the cache holds all keys after the append
    plan: CachePlan = field(metadata=dict(static=True))
    heads_first: bool = field(default=False, metadata=dict(static=True))  # the order of the buffers of keys and values

    def write(self, buffer: Any, new: Any) -> tuple[Any, Any]:
        """The buffer [B, capacity, ...] with new entries [B, n, ...] in their slots, and the entries to attend to.

        With `heads_first` the buffer is [B, K, capacity, H]. The new entries and those to attend to are [B, n, K, H].
        """
        new, written = jnp.asarray(new).astype(buffer.dtype), buffer
        if self.plan.capacity:
            # One row at a time: indices that include the batch axis would gather sharded rows.
            written = jax.vmap(_write_heads if self.heads_first else _write_row)(buffer, new, self.slots)
        if self.order is None:
            return written, slots_first(written, self.heads_first)
        both = jnp.concatenate([slots_first(buffer, self.heads_first), new], axis=1)
        return written, jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(both, self.order)

    def of(self, mask: Mask) -> dict[str, Any]:
        """The mask for these tokens and their positions, as arguments of `ls.attention`."""
        return _attention_arguments(self, mask, self.q_positions.shape[0])


def _append(cache: "Cache", k, v, lengths) -> tuple["Cache", View]:
    after, step = cache.advance(k.shape[1], lengths)
    stored_k, view_k = step.write(cache.k, k)
    stored_v, view_v = step.write(cache.v, v)
    view = View(view_k, view_v, step.q_positions, step.kv_positions, cache.plan)
    return replace(after, k=stored_k, v=stored_v), view


def _specs(operands: tuple, results: tuple["Cache", View]) -> tuple["Cache", View]:
    """The specs of a cache and its view on explicit axes: rows and heads are sharded as the cache is, else as k is."""
    (cache, k, _, _), (after, view) = operands, results
    k_rows, _, k_heads, _ = spec_entries(k)
    of_buffer = spec_entries(cache.k)
    rows, heads = of_buffer[0] or k_rows, of_buffer[cache.heads_axis] or k_heads
    tables = jax.tree.map(lambda x: P(*spec_entries(x)), cache.tables)
    of_view = of_cache = P(rows, None, heads, None)
    if cache.heads_first:
        of_cache = P(rows, heads, None, None)

    def specs(found, of_keys):
        names = [f.name for f in fields(found) if f.name not in ("k", "v", "tables") and not f.metadata.get("static")]
        by_name = {name: P(rows, *[None] * (getattr(found, name).ndim - 1)) for name in names}
        return by_name | dict(k=of_keys, v=of_keys)

    return replace(after, **specs(after, of_cache), tables=tables), replace(view, **specs(view, of_view))


def _write_row(buffer, new, slots):
    return buffer.at[slots].set(new, mode="drop", unique_indices=True)


def _write_heads(buffer, new, slots):
    # Each head has its own copy of the slots. If `vmap` shared them, it would write [K, H] at once, and XLA for TPUs
    # would copy the buffer to put slots before heads in memory.
    by_head = jnp.broadcast_to(slots, (buffer.shape[0], *slots.shape))
    return jax.vmap(_write_row, (0, 1, 0))(buffer, new, by_head)


def slots_first(buffer: Any, heads_first: bool) -> Any:
    """The keys or values of a cache as [B, capacity, K, H]."""
    if heads_first:
        return buffer.swapaxes(1, 2)
    return buffer


def in_order(cache: "Cache", heads_first: bool) -> "Cache":
    """The same cache, with its keys and values in this order."""
    if cache.heads_first == heads_first:
        return cache
    return replace(cache, k=cache.k.swapaxes(1, 2), v=cache.v.swapaxes(1, 2), heads_first=heads_first)


def _attention_arguments(source: View | AppendStep, mask: Mask, batch: int) -> dict[str, Any]:
    """The mask and positions; a mask that reads slots is cut to the tokens, and free slots are hidden."""
    plan, q_positions, kv_positions = source.plan, source.q_positions, source.kv_positions
    check_mask(plan, mask, batch)
    rule = mask
    if SLOT in mask.reads:
        q_slots = jnp.clip(q_positions, 0, plan.length - 1)
        kv_slots = jnp.clip(kv_positions, 0, plan.length - 1)
        cut = mask.cut(q_slots, kv_slots, q_len=plan.length, kv_len=plan.length)
        rule = cut & kv_flags(kv_positions < plan.length)
    elif sees_free_slots(mask, plan.length):
        rule = mask & Prefix(FREE_SLOT)
    return dict(mask=rule, q_positions=q_positions, kv_positions=kv_positions)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values in the slots of a plan. `ls.cache.init` makes an empty one; every method returns a new cache.

    It is a pytree with static shapes, so one trace serves a whole generation. Donate it to `jit` to update it in place.

    Example:
        >>> mask = ls.Causal() & (ls.Window(1, 0) | ls.Prefix(1))
        >>> cache = ls.cache.init(ls.cache.plan(mask, 9), 1, 1, 2, jnp.float32)
        >>> for token in range(5):
        ...     x = jnp.full((1, 1, 1, 2), float(token))
        ...     cache, view = cache.append(x, x)
        >>> cache.positions.tolist()
        [[0, 4, 3]]
    """

    k: Leaf  # [B, capacity, K, H]; with `heads_first` [B, K, capacity, H]
    v: Leaf  # [B, capacity, K, Hv]; with `heads_first` [B, K, capacity, Hv]
    positions: Leaf  # int32 [B, capacity]: the position of the key in each slot; 2**30 - 1: the slot is free
    length: Leaf  # int32 [B]: tokens in each row
    furthest: Leaf  # int32 [B]: the largest length so far: these tokens overwrote keys that no rollback can restore
    overflowed: Leaf  # bool [B]: rows for which a call inside jit was ignored, because the plan does not allow it
    tables: Any  # the plan's `table`, `end` and `tied`, or None for each: arguments of programs, not constants
    plan: CachePlan = field(metadata=dict(static=True))
    heads_first: bool = field(default=False, metadata=dict(static=True))  # whether heads come before slots in k and v

    @property
    def heads_axis(self) -> int:
        """The axis of `k` and `v` that counts heads."""
        return 1 if self.heads_first else 2

    @no_type_check
    def append(
        self, k: Float[Array, "B n K H"], v: Float[Array, "B n K Hv"], lengths: Int[Array, "B"] | None = None
    ) -> tuple["Cache", View]:
        """The cache with new tokens, and a view of the keys that they attend to: their own and earlier ones.

        Args:
            k: the new keys [B, n, K, H], after RoPE if there is any.
            v: the new values [B, n, K, Hv].
            lengths: int [B]: the number of new tokens in each row; the rest is padding. By default n.
        """
        check_new(self, k, v)
        if explicit_mesh(self, k, v) is not None and is_known(self.length):
            # Errors are raised here, because the rest runs under `jit`, where values are not known.
            replace(self, length=np.asarray(self.length))._new_tokens(k.shape[1], lengths)
        return on_auto_axes(_append, _specs, (), (self, k, v, lengths))

    def advance(self, count: int, lengths: Any = None) -> tuple["Cache", AppendStep]:
        """The cache with the positions of new tokens, and the step that writes their keys and values.

        The first half of `append`, for many caches of one plan: it is computed once, and `AppendStep.write` is called
        for the keys and values of each.

        Args:
            count: the number of tokens.
            lengths: the number of new tokens in each row, as in `append`.
        """
        requested, bad = self._new_tokens(count, lengths)
        lengths = jnp.where(bad, 0, requested)
        places = jnp.arange(count, dtype=np.int32)[None]
        q_positions = self.length[:, None] + places
        if self.plan.length + count > FAR:  # positions of padding must stay in the range that engines accept
            q_positions = jnp.minimum(q_positions, np.int32(FAR))
        new = jnp.where(places < lengths[:, None], q_positions, np.int32(FREE_SLOT))
        slots, order = self._slots(new, self.length + lengths), None
        if count > self.plan.at_once:
            # Sorted by position, because engines skip tiles only if positions increase. Free slots come last.
            order = jnp.argsort(jnp.concatenate([self.positions, new], axis=1), axis=1)
        step = AppendStep(slots, q_positions, self.positions, order, self.plan)
        positions, kv_positions = step.write(self.positions, new)
        length = self.length + lengths
        furthest = jnp.maximum(self.furthest, length)
        cache = replace(self, positions=positions, length=length, furthest=furthest, overflowed=self.overflowed | bad)
        # Positions have no heads, so only now the step gets the order of the keys and values.
        return cache, replace(step, kv_positions=kv_positions, heads_first=self.heads_first)

    def _new_tokens(self, count: int, lengths: Any) -> tuple[jax.Array, jax.Array]:
        """The number of new tokens in each row, and the rows that cannot take them: outside jit, these are an error."""
        batch = self.length.shape[0]
        if lengths is None:
            requested = jnp.full((batch,), count, np.int32)
        else:
            requested = check_lengths(lengths, batch, count)
        return requested, self._cannot_take(requested) | (requested < 0) | (requested > count)

    def _cannot_take(self, lengths) -> jax.Array:
        """Rows that would exceed the plan's length, or end between tied positions: outside jit, these are an error."""
        total, tied = self.length + lengths, self.tables[2]
        beyond = total > self.plan.length
        torn = jnp.zeros_like(beyond)
        if tied is not None:
            is_tied = self.plan.outline.at(tied, jnp.clip(total, 0, self.plan.length - 1), jnp)
            torn = is_tied & (total < self.plan.length) & (lengths > 0)
        if is_known(beyond) and beyond.any():
            raise ValueError(
                f"This cache was planned for {self.plan.length} positions, but a row would have {int(total.max())}. "
                "Plan a longer one: `ls.cache.plan(mask, length)`."
            )
        if is_known(torn) and torn.any():
            row = int(np.argmax(np.asarray(torn)))
            raise ValueError(
                f"{self.plan.mask!r} lets position {int(total[row]) - 1} attend to position {int(total[row])}, so both "
                "must be appended together. Append whole chunks, and a prefix as a whole."
            )
        return beyond | torn

    def _slots(self, positions, total):
        """The slot of each new key; `capacity` or more, all different, for keys that are not stored.

        Keys that no query needs after this append are not stored.
        """
        plan, (table, end, _) = self.plan, self.tables
        inside = jnp.clip(positions, 0, plan.length - 1)
        if table is not None:
            slot = jnp.asarray(table)[inside]
        else:
            slot = len(plan.pinned) + inside % np.int32(max(plan.ring, 1))
            if plan.pinned:
                is_pinned = inside[..., None] == np.array(plan.pinned, np.int32)[None, None]
                slot = jnp.where(is_pinned.any(-1), jnp.argmax(is_pinned, -1).astype(np.int32), slot)
        kept = (positions < plan.length) & (slot >= 0)
        last = inside
        if positions.shape[1] > plan.at_once:
            # Two keys of one append may have the same slot: the one that is no longer needed at its end is not stored.
            last = (total - 1)[:, None]
        if end is not None:
            kept &= plan.outline.ends_at(end, inside, jnp) >= last
        else:
            kept &= (slot < len(plan.pinned)) | (inside > last - np.int32(plan.ring))
        not_stored = np.int32(plan.capacity) + jnp.arange(positions.shape[1], dtype=np.int32)[None]
        return jnp.where(kept, slot.astype(np.int32), not_stored)

    @no_type_check
    def rollback(self, n: int | Int[Array, "B"]) -> "Cache":
        """The cache without the last n tokens of each row: at most the plan's `slack` if the cache evicts keys.

        Example:
            >>> plan = ls.cache.plan(ls.Causal() & ls.Window(3, 0), 100, slack=2)
            >>> cache = ls.cache.init(plan, 1, 1, 2, jnp.float32)
            >>> cache, _ = cache.append(jnp.ones((1, 9, 1, 2)), jnp.ones((1, 9, 1, 2)))
            >>> cache.rollback(2).length.tolist()
            [7]
        """
        n, bad = check_rollback(self, n)
        length = jnp.where(bad, self.length, self.length - n)
        positions = jnp.where(self.positions < length[:, None], self.positions, np.int32(FREE_SLOT))
        return replace(self, positions=positions, length=length, overflowed=self.overflowed | bad)

    @no_type_check
    def fork(self, rows: Int[Array, "rows"]) -> "Cache":
        """A cache whose rows are copies of rows of this one, for beams or a shared prefix.

        Example:
            >>> plan = ls.cache.plan(ls.Causal(), 100)
            >>> ls.cache.init(plan, 1, 2, 8, jnp.float32).fork(jnp.zeros(3, int)).k.shape
            (3, 100, 2, 8)
        """
        batch = self.length.shape[0]
        rows = check_rows(rows, batch)
        inside = jnp.clip(rows, 0, batch - 1)
        taken = jax.tree.map(lambda x: jnp.take(x, inside, axis=0), replace(self, tables=None))
        # Tables are copied too, so that either cache can be donated.
        tables = jax.tree.map(jnp.copy, self.tables)
        return replace(taken, overflowed=taken.overflowed | (rows != inside), tables=tables)

    def show(self, step: int | None = None, *, batch: int = 0, max_cells: int = 64) -> str:
        """A text picture of the positions that a row holds, and of those that were evicted.

        Args:
            step: draws the cache after the token at this position; None draws it as it is now.
            batch: the row.
            max_cells: the largest number of cells (characters) across.

        Example:
            >>> cache = ls.cache.init(ls.cache.plan(ls.Causal() & ls.Window(3, 0), 16), 1, 1, 2, jnp.float32)
            >>> cache, _ = cache.append(jnp.ones((1, 10, 1, 2)), jnp.ones((1, 10, 1, 2)))
            >>> print(cache.show())
            10 of 16 positions: 4 kept, 6 evicted; 4 slots
            0   4   8   12
            ......####
            # kept, . evicted, blank if not yet appended
        """
        if step is not None:
            return self.plan.show(step, max_cells=max_cells)
        check_drawable(self, batch)
        positions, length = np.asarray(self.positions[batch]), int(self.length[batch])
        return show_kept(self.plan, np.sort(positions[positions < length]), length, max_cells)

    @no_type_check
    def save(self, path: Any) -> None:
        """Writes the cache to a safetensors file, which `ls.cache.restore(path, plan)` reads.

        The file holds keys and values as [B, slots, K, H], also with `heads_first`.

        If writing fails, an earlier file at `path` is unchanged.

        Example:
            >>> plan = ls.cache.plan(ls.Causal(), 8)
            >>> folder = tempfile.mkdtemp()
            >>> ls.cache.init(plan, 1, 2, 4, jnp.float32).save(f"{folder}/cache.safetensors")
            >>> ls.cache.restore(f"{folder}/cache.safetensors", plan).k.shape
            (1, 8, 2, 4)
        """
        from longspan.cache.files import save

        save(self, path)


@no_type_check
def init(
    plan: CachePlan,
    batch: int,
    kv_heads: int,
    head_dim: int,
    dtype: Any,
    *,
    v_head_dim: int | None = None,
    heads_first: bool = False,
) -> Cache:
    """An empty cache with the slots of a plan.

    Args:
        plan: the result of `ls.cache.plan`.
        batch: the number of rows, B.
        kv_heads: the number of key/value heads, K.
        head_dim: the head size of keys, H.
        dtype: the dtype of keys and values.
        v_head_dim: the head size of values; H by default.
        heads_first: whether `k` and `v` are stored as [B, K, slots, H], the order of TPU kernels, instead of
            [B, slots, K, H]. Arguments, views and files are [B, slots, K, H] in both cases.

    Example:
        >>> plan = ls.cache.plan(ls.Causal() & ls.Window(1023, 0), 10**6)
        >>> ls.cache.init(plan, 1, 2, 64, jnp.bfloat16).k.shape
        (1, 1024, 2, 64)
    """
    if not isinstance(plan, CachePlan):
        raise TypeError(f"`plan` must be a CachePlan from `ls.cache.plan(mask, length)`, got {type(plan).__name__}.")
    check_dtype(dtype)
    batch = check_static_size("batch", batch, 1)
    kv_heads = check_static_size("kv_heads", kv_heads, 1)
    head_dim = check_static_size("head_dim", head_dim, 1)
    if v_head_dim is None:
        v_head_dim = head_dim
    v_head_dim = check_static_size("v_head_dim", v_head_dim, 1)
    check_order(heads_first)
    shape = (kv_heads, plan.capacity) if heads_first else (plan.capacity, kv_heads)
    k = jnp.zeros((batch, *shape, head_dim), dtype)
    v = jnp.zeros((batch, *shape, v_head_dim), dtype)
    return replace(without_keys(plan, batch, heads_first), k=k, v=v)


def without_keys(plan: CachePlan, batch: int, heads_first: bool = False) -> Cache:
    """An empty cache that stores positions, but no keys and values."""
    nothing: Any = None
    return Cache(
        k=nothing,
        v=nothing,
        positions=jnp.full((batch, plan.capacity), FREE_SLOT, np.int32),
        length=jnp.zeros((batch,), np.int32),
        furthest=jnp.zeros((batch,), np.int32),
        overflowed=jnp.zeros((batch,), bool),
        tables=tables_of(plan),
        plan=plan,
        heads_first=heads_first,
    )


def tables_of(plan: CachePlan) -> tuple[Any, Any, Any]:
    """The arrays of a plan, on the device."""

    def on_device(array: np.ndarray | None) -> Any:
        return None if array is None else jnp.asarray(array)

    return on_device(plan.table), on_device(plan.end), on_device(plan.tied)
