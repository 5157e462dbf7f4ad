"""`Cache`: keys and values in the slots of a plan, a pytree of static shapes; `View`: what new tokens see of it."""

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from longspan.array_types import FAR, Array, no_type_check
from longspan.axes import entries, explicit_mesh, on_auto_axes
from longspan.cache.checks import (
    check_drawable,
    check_dtype,
    check_lengths,
    check_mask,
    check_new,
    check_rollback,
    check_rows,
)
from longspan.cache.lifetimes import sees_free
from longspan.cache.picture import show_held
from longspan.cache.plan import CachePlan
from longspan.checks import check_static_size, is_known
from longspan.masks import Mask, Prefix
from longspan.masks.base import SLOT
from longspan.masks.by_slot import kv_flags

FREE = FAR  # the position of a slot without a key: after every query

if TYPE_CHECKING:
    Leaf = jax.Array
else:
    Leaf = Any  # not a shape: JAX rebuilds the object with placeholders, and `vmap` stacks them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
    """Keys, values and positions that some new tokens may see.

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
    def of(self, mask: Mask) -> dict[str, Any]:
        """What `ls.attention` takes besides q: k, v, positions, and the mask, cut to these tokens where it reads slots.

        Args:
            mask: the mask that the cache was planned for, or one that sees no more.
        """
        return dict(k=self.k, v=self.v) | _seen(self, mask, self.k.shape[0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AppendStep:
    """New tokens of a plan: where their keys and values go, and what they will see. Caches of one plan share it."""

    slots: Leaf  # int32 [B, n]: where each is written; the capacity and beyond: nowhere
    q_positions: Leaf  # int32 [B, n]
    kv_positions: Leaf  # int32 [B, S]
    order: Any  # int32 [B, S] of what was kept and what is new, by position; None: the cache itself shows it all
    plan: CachePlan = field(metadata=dict(static=True))

    def write(self, buffer: Any, new: Any) -> tuple[Any, Any]:
        """The buffer [B, capacity, ...] with what is new [B, n, ...] in its slots, and what is seen [B, S, ...]."""
        new, written = jnp.asarray(new).astype(buffer.dtype), buffer
        if self.plan.capacity:
            # By batch row: indices over the batch would make sharded rows be gathered.
            written = jax.vmap(_put)(buffer, new, self.slots)
        if self.order is None:
            return written, written
        both = jnp.concatenate([buffer, new], axis=1)
        return written, jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(both, self.order)

    def of(self, mask: Mask) -> dict[str, Any]:
        """The mask, cut to these tokens where it reads slots, and the positions: what `attention` takes besides."""
        return _seen(self, mask, self.q_positions.shape[0])


def _append(cache: "Cache", k, v, lengths) -> tuple["Cache", View]:
    after, step = cache.advance(k.shape[1], lengths)
    (k, seen_k), (v, seen_v) = step.write(cache.k, k), step.write(cache.v, v)
    return replace(after, k=k, v=v), View(seen_k, seen_v, step.q_positions, step.kv_positions, cache.plan)


def _specs(operands: tuple, results: tuple["Cache", View]) -> tuple["Cache", View]:
    """How a cache and what is seen of it lie on explicit axes: by rows and heads, as it did before or as k does."""
    (cache, k, _, _), (after, view) = operands, results
    (rows, _, heads, _), (own_rows, _, own_heads, _) = entries(k), entries(cache.k)
    both = P(own_rows or rows, None, own_heads or heads, None)
    tables = jax.tree.map(lambda x: P(*entries(x)), cache.tables)

    def specs(found):
        names = [field.name for field in fields(found) if field.name not in ("k", "v", "plan", "tables")]
        return {name: P(both[0], *[None] * (getattr(found, name).ndim - 1)) for name in names} | dict(k=both, v=both)

    return replace(after, **specs(after), tables=tables), replace(view, **specs(view))


def _put(buffer, rows, where):
    return buffer.at[where].set(rows, mode="drop", unique_indices=True)


def _seen(what: View | AppendStep, mask: Mask, batch: int) -> dict[str, Any]:
    plan, q_positions, kv_positions = what.plan, what.q_positions, what.kv_positions
    check_mask(plan, mask, batch)
    rule = mask
    if SLOT in mask.reads:
        held = kv_positions < plan.length
        slots = [jnp.clip(p, 0, plan.length - 1) for p in (q_positions, kv_positions)]
        rule = mask.cut(*slots, q_len=plan.length, kv_len=plan.length) & kv_flags(held)
    elif sees_free(mask, plan.length):
        rule = mask & Prefix(FREE)
    return dict(mask=rule, q_positions=q_positions, kv_positions=kv_positions)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The keys and values of a plan's slots. Made by `ls.cache.init`; every method gives a new one.

    A pytree of static shapes, so a whole generation is one trace; donate it to `jit` to have it updated in place.

    Example:
        >>> mask = ls.Causal() & (ls.Window(1, 0) | ls.Prefix(1))
        >>> cache = ls.cache.init(ls.cache.plan(mask, 9), 1, 1, 2, jnp.float32)
        >>> for token in range(5):
        ...     x = jnp.full((1, 1, 1, 2), float(token))
        ...     cache, view = cache.append(x, x)
        >>> cache.positions.tolist()
        [[0, 4, 3]]
    """

    k: Leaf  # [B, capacity, K, H]
    v: Leaf  # [B, capacity, K, Hv]
    positions: Leaf  # int32 [B, capacity]: of the key in each slot; 2**30 - 1: none
    length: Leaf  # int32 [B]: tokens that each row has
    furthest: Leaf  # int32 [B]: the most that it had before a rollback; what they overwrote is gone
    overflowed: Leaf  # bool [B]: rows that were asked, inside jit, for what the plan does not have
    tables: Any  # the plan's table, end and tied where it has them: data, not constants
    plan: CachePlan = field(metadata=dict(static=True))

    @no_type_check
    def append(
        self, k: Float[Array, "B n K H"], v: Float[Array, "B n K Hv"], lengths: Int[Array, "B"] | None = None
    ) -> tuple["Cache", View]:
        """The cache with new tokens, and what they may see: themselves and what came before.

        Args:
            k: their keys [B, n, K, H], rotated if there is RoPE.
            v: their values [B, n, K, Hv].
            lengths: int [B]: how many of the n tokens each row has; the rest is padding. By default n.
        """
        check_new(self, k, v)
        if explicit_mesh(self, k, v) is not None and is_known(self.length):
            # Said here: the rest runs under `jit`, where nothing is known.
            replace(self, length=np.asarray(self.length))._given(k.shape[1], lengths)
        return on_auto_axes(_append, _specs, (), (self, k, v, lengths))

    def advance(self, count: int, lengths: Any = None) -> tuple["Cache", AppendStep]:
        """The cache with the positions of new tokens, and where their keys and values are to be written.

        `append` in two parts, for many caches of one plan: what they hold where is the same, and computed once.

        Args:
            count: how many tokens.
            lengths: how many of them each row has, as in `append`.
        """
        given, bad = self._given(count, lengths)
        lengths = jnp.where(bad, 0, given)
        places = jnp.arange(count, dtype=np.int32)[None]
        q_positions = self.length[:, None] + places
        if self.plan.length + count > FAR:  # padding, which stays among the positions that engines take
            q_positions = jnp.minimum(q_positions, np.int32(FAR))
        new = jnp.where(places < lengths[:, None], q_positions, np.int32(FREE))
        slots, order = self._slots(new, self.length + lengths), None
        if count > self.plan.at_once:
            # By position: engines skip only where positions grow. Free slots are last.
            order = jnp.argsort(jnp.concatenate([self.positions, new], axis=1), axis=1)
        step = AppendStep(slots, q_positions, self.positions, order, self.plan)
        positions, seen = step.write(self.positions, new)
        length = self.length + lengths
        furthest = jnp.maximum(self.furthest, length)
        cache = replace(self, positions=positions, length=length, furthest=furthest, overflowed=self.overflowed | bad)
        return cache, replace(step, kv_positions=seen)

    def _given(self, count: int, lengths: Any) -> tuple[jax.Array, jax.Array]:
        """How many tokens each row is given, and which rows cannot take them; outside jit those are an error."""
        batch = self.length.shape[0]
        given = jnp.full((batch,), count, np.int32) if lengths is None else check_lengths(lengths, batch, count)
        return given, self._cannot_take(given) | (given < 0) | (given > count)

    def _cannot_take(self, lengths) -> jax.Array:
        """Rows that would pass the end, or leave tokens that belong together apart. Outside jit that is an error."""
        total, tied = self.length + lengths, self.tables[2]
        beyond = total > self.plan.length
        torn = jnp.zeros_like(beyond)
        if tied is not None:
            ties = self.plan.outline.at(tied, jnp.clip(total, 0, self.plan.length - 1), jnp)
            torn = ties & (total < self.plan.length) & (lengths > 0)
        if is_known(beyond) and beyond.any():
            raise ValueError(
                f"This cache was planned for {self.plan.length} positions, and {int(total.max())} are asked for. "
                "Plan a longer one: `ls.cache.plan(mask, length)`."
            )
        if is_known(torn) and torn.any():
            row = int(np.argmax(np.asarray(torn)))
            raise ValueError(
                f"{self.plan.mask!r} lets position {int(total[row]) - 1} see position {int(total[row])}, so they must "
                "be appended together: append whole chunks, and a prefix at once."
            )
        return beyond | torn

    def _slots(self, positions, total):
        """Where to write each new key; `capacity` and beyond: nowhere, all different.

        Those of one append that are dead by its end leave no trace.
        """
        plan, (table, end, _) = self.plan, self.tables
        inside = jnp.clip(positions, 0, plan.length - 1)
        if table is not None:
            slot = jnp.asarray(table)[inside]
        else:
            slot = len(plan.pinned) + inside % np.int32(max(plan.ring, 1))
            if plan.pinned:
                mine = inside[..., None] == np.array(plan.pinned, np.int32)[None, None]
                slot = jnp.where(mine.any(-1), jnp.argmax(mine, -1).astype(np.int32), slot)
        kept = (positions < plan.length) & (slot >= 0)
        # Dead by the end of the append: another of its keys may have the slot.
        last = (total - 1)[:, None] if positions.shape[1] > plan.at_once else inside
        if end is not None:
            kept &= plan.outline.ends_at(end, inside, jnp) >= last
        else:
            kept &= (slot < len(plan.pinned)) | (inside > last - np.int32(plan.ring))
        nowhere = np.int32(plan.capacity) + jnp.arange(positions.shape[1], dtype=np.int32)[None]
        return jnp.where(kept, slot.astype(np.int32), nowhere)

    @no_type_check
    def rollback(self, n: int | Int[Array, "B"]) -> "Cache":
        """The cache without the last n tokens of each row; at most the plan's `slack`, after a wrap too.

        Example:
            >>> plan = ls.cache.plan(ls.Causal() & ls.Window(3, 0), 100, slack=2)
            >>> cache = ls.cache.init(plan, 1, 1, 2, jnp.float32)
            >>> cache, _ = cache.append(jnp.ones((1, 9, 1, 2)), jnp.ones((1, 9, 1, 2)))
            >>> cache.rollback(2).length.tolist()
            [7]
        """
        n, bad = check_rollback(self, n)
        length = jnp.where(bad, self.length, self.length - n)
        positions = jnp.where(self.positions < length[:, None], self.positions, np.int32(FREE))
        return replace(self, positions=positions, length=length, overflowed=self.overflowed | bad)

    @no_type_check
    def fork(self, rows: Int[Array, "rows"]) -> "Cache":
        """A cache whose rows are copies of some rows of this one: beams, or a shared prefix.

        Example:
            >>> plan = ls.cache.plan(ls.Causal(), 100)
            >>> ls.cache.init(plan, 1, 2, 8, jnp.float32).fork(jnp.zeros(3, int)).k.shape
            (3, 100, 2, 8)
        """
        batch = self.length.shape[0]
        rows = check_rows(rows, batch)
        inside = jnp.clip(rows, 0, batch - 1)
        taken = jax.tree.map(lambda x: jnp.take(x, inside, axis=0), replace(self, tables=None))
        # The tables, too: either of the two caches can be donated.
        tables = jax.tree.map(jnp.copy, self.tables)
        return replace(taken, overflowed=taken.overflowed | (rows != inside), tables=tables)

    def show(self, step: int | None = None, *, batch: int = 0, max_cells: int = 64) -> str:
        """A picture in characters of the positions that a row holds, and of those that were evicted.

        Args:
            step: what it will hold after the token at this position; None: what it holds now.
            batch: which row.
            max_cells: width of the picture in characters.

        Example:
            >>> cache = ls.cache.init(ls.cache.plan(ls.Causal() & ls.Window(3, 0), 16), 1, 1, 2, jnp.float32)
            >>> cache, _ = cache.append(jnp.ones((1, 10, 1, 2)), jnp.ones((1, 10, 1, 2)))
            >>> print(cache.show())
            10 of 16 positions: 4 kept, 6 evicted; 4 slots
            0   4   8   12
            ......####
            # kept, . evicted, blank to come
        """
        if step is not None:
            return self.plan.show(step, max_cells=max_cells)
        check_drawable(self, batch)
        positions, length = np.asarray(self.positions[batch]), int(self.length[batch])
        return show_held(self.plan, np.sort(positions[positions < length]), length, max_cells)

    @no_type_check
    def save(self, path: Any) -> None:
        """Writes the cache to a safetensors file, whole or not at all; `ls.cache.restore(path, plan)` reads it.

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
    plan: CachePlan, batch: int, kv_heads: int, head_dim: int, dtype: Any, *, v_head_dim: int | None = None
) -> Cache:
    """An empty cache of a plan's slots.

    Args:
        plan: what `ls.cache.plan` gave.
        batch: rows, B.
        kv_heads: key/value heads, K.
        head_dim: head size of keys, H.
        dtype: of keys and values.
        v_head_dim: head size of values; H by default.

    Example:
        >>> plan = ls.cache.plan(ls.Causal() & ls.Window(1023, 0), 10**6)
        >>> ls.cache.init(plan, 1, 2, 64, jnp.bfloat16).k.shape
        (1, 1024, 2, 64)
    """
    if not isinstance(plan, CachePlan):
        raise TypeError(f"`plan` must be what `ls.cache.plan(mask, length)` gives, got {type(plan).__name__}.")
    names = ("batch", "kv_heads", "head_dim")
    check_dtype(dtype)
    sizes = [check_static_size(n, x, 1) for n, x in zip(names, (batch, kv_heads, head_dim), strict=True)]
    v_size = sizes[2] if v_head_dim is None else check_static_size("v_head_dim", v_head_dim, 1)
    batch, kv_heads, size = sizes
    k, v = (jnp.zeros((batch, plan.capacity, kv_heads, n), dtype) for n in (size, v_size))
    return replace(without_keys(plan, batch), k=k, v=v)


def without_keys(plan: CachePlan, batch: int) -> Cache:
    """An empty cache of a plan's slots that stores positions, but no keys and values."""
    nothing: Any = None
    return Cache(
        k=nothing,
        v=nothing,
        positions=jnp.full((batch, plan.capacity), FREE, np.int32),
        length=jnp.zeros((batch,), np.int32),
        furthest=jnp.zeros((batch,), np.int32),
        overflowed=jnp.zeros((batch,), bool),
        tables=tables_of(plan),
        plan=plan,
    )


def tables_of(plan: CachePlan) -> tuple[Any, Any, Any]:
    """The arrays of a plan, on the device."""
    table, end, tied = (None if x is None else jnp.asarray(x) for x in (plan.table, plan.end, plan.tied))
    return table, end, tied
