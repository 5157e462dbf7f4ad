"""Communication of keys, queries and gradients between devices.

Each class brings some keys to a device (`bring`), names their tokens (`slots`), and returns the gradients of these keys
to their owners (`take_home`, the transpose of `bring`):

- `Halo`: rows of neighbours, one permute for each shift of the plan.
- `GlobalKeys`: keys that every device needs. Each owner contributes its rows, all others zeros, to an all-reduce.
- `ListedBlocks`: the blocks of an `Exchange`, by an all-to-all or by permutes.

`ring` visits whole shards one after the other. Gradients of a shard travel along with it in `ring_back`, one device per
step, and are sent home at the end.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.engines import Request
from longspan.layout import sides_of
from longspan.parallel.exchange import BlockLists, Exchange
from longspan.parallel.order import chunk_of, runs_of
from longspan.parallel.parts import ShardConfig, place_of, slots_of
from longspan.parallel.plan import ParallelPlan


def shifted(tree: Any, config: ShardConfig, shift: int, *, around: bool = False) -> Any:
    """The arrays of the device `shift` before this one; zeros if there is none. `around` closes the ring."""
    shards = config.plan.shards
    pairs = [(j, (j + shift) % shards) for j in range(shards) if around or 0 <= j + shift < shards]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, config.axis, pairs), tree)


def send_home(tree: Any, config: ShardConfig, distance: Any) -> Any:
    """Returns arrays that are `distance` devices after their owner.

    A static distance takes one permute. For a traced one, each bit of it takes a permute by a power of two, or none.
    """
    shards = config.plan.shards
    if isinstance(distance, int):
        if distance % shards == 0:
            return tree
        return shifted(tree, config, -distance, around=True)
    distance = distance % np.int32(shards)
    for bit in range((shards - 1).bit_length()):

        def jump(tree, bit=bit):
            return shifted(tree, config, -(1 << bit), around=True)

        tree = jax.lax.cond((distance >> bit) & 1 == 1, jump, lambda tree: tree, tree)
    return tree


class Halo(NamedTuple):
    """Rows of neighbouring devices."""

    config: ShardConfig
    device: Any

    def bring(self, *arrays) -> tuple[Any, ...]:
        """The received rows of arrays [B, L, ...]."""
        plan = self.config.plan
        size = plan.rows // runs_of(plan.order)
        found = []
        for step in plan.halo:
            start = step.run * size + step.start
            found.append([shifted(x[:, start : start + step.rows], self.config, step.shift) for x in arrays])
        return tuple(jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True))

    def slots(self) -> Any:
        """The tokens of the received rows, int32 [1, n]."""
        plan = self.config.plan
        size, found = plan.rows // runs_of(plan.order), []
        for step in plan.halo:
            source = self.device - np.int32(step.shift)
            chunk = chunk_of(plan.order, plan.shards, source, step.run)
            slots = chunk * np.int32(size) + jnp.arange(step.start, step.start + step.rows, dtype=np.int32)
            if plan.order != "contiguous":
                # If there is no such device, -1 hides the rows. In contiguous order they lie outside the sequence
                # anyway, and slots that increase let engines skip tiles.
                exists = (source >= 0) & (source < plan.shards)
                slots = jnp.where(exists, slots, np.int32(-1))
            found.append(slots)
        return jnp.concatenate(found)[None]

    def take_home(self, grads, totals):
        plan, at = self.config.plan, 0
        size = plan.rows // runs_of(plan.order)
        for step in plan.halo:
            part = jax.tree.map(lambda x, at=at, n=step.rows: x[:, at : at + n], grads)
            part = shifted(part, self.config, -step.shift)
            begin = step.run * size + step.start
            totals = jax.tree.map(
                lambda total, x, begin=begin: total.at[:, begin : begin + x.shape[1]].add(x.astype(total.dtype)),
                totals,
                part,
            )
            at += step.rows
        return totals


class GlobalKeys(NamedTuple):
    """Keys that every device needs, by an all-reduce to which each owner contributes its rows."""

    config: ShardConfig
    device: Any
    slots: Any  # int32 [B or 1, n]
    real: Any  # bool [B or 1, n]: False for unused entries

    def bring(self, *arrays) -> tuple[Any, ...]:
        """The received rows of arrays [B, L, ...]."""
        mine, row = self._mine()
        return tuple(jax.lax.psum(_rows(x, row, mine), self.config.axis) for x in arrays)

    def hidden(self) -> Any:
        """Unused entries, and the device's own keys, which it attends to with the rest of its shard."""
        mine, _ = self._mine()
        return mine | ~self.real

    def take_home(self, grads, totals):
        mine, row = self._mine()
        whole = jax.tree.map(lambda x: jax.lax.psum(x.astype(statistics_dtype(x.dtype)), self.config.axis), grads)
        return jax.tree.map(lambda total, x: _add_rows(total, x, row, mine), totals, whole)

    def _mine(self):
        device, row = place_of(self.config.plan, self.slots)
        return (device == self.device) & self.real, row


class ListedBlocks(NamedTuple):
    """Blocks that a table lists, possibly different ones for each head, from any device."""

    config: ShardConfig
    lists: BlockLists

    @property
    def by_head(self) -> bool:
        return self.lists.sent.shape[0] > 1

    def of_head(self, head: Any) -> "ListedBlocks":
        """The blocks of one head."""
        sent = jax.lax.dynamic_slice_in_dim(self.lists.sent, head, 1)
        received = jax.lax.dynamic_slice_in_dim(self.lists.received, head, 1)
        return self._replace(lists=self.lists._replace(sent=sent, received=received))

    def bring(self, k, v) -> tuple[Any, ...]:
        rows = self._rows(self.lists.sent)
        rows = jnp.where(rows < k.shape[1], rows, 0).T[None, :, :, None]  # [1, n, heads, 1]
        return tuple(self._sent(jnp.take_along_axis(x, rows, axis=1)) for x in (k, v))

    def slots(self) -> Any:
        """The tokens of the received rows, int32 [heads, n], increasing: no block is its source's last token."""
        shard = np.int32(self.config.plan.rows)
        source = jnp.repeat(self.lists.source, self._exchange.unit)[None]
        return source * shard + jnp.minimum(self._rows(self.lists.received), shard - 1)

    def hidden(self) -> Any:
        """Unused entries, bool [heads, n]."""
        return self._rows(self.lists.received) >= self.config.plan.rows

    def take_home(self, grads, totals):
        rows = self._rows(self.lists.sent).T  # [n, heads]

        def added(total, x):
            heads = np.arange(total.shape[2], dtype=np.int32)[None]
            return total.at[:, rows, heads].add(self._sent(x, back=True).astype(total.dtype), mode="drop")

        return jax.tree.map(added, totals, grads)

    @property
    def _exchange(self) -> Exchange:
        assert self.config.plan.exchange is not None
        return self.config.plan.exchange

    def _rows(self, blocks):
        """The rows of blocks [heads, n] in their shard; unused entries lie beyond it."""
        unit = self._exchange.unit
        within = np.arange(unit, dtype=np.int32).reshape(1, 1, -1)
        return (blocks[:, :, None] * np.int32(unit) + within).reshape(blocks.shape[0], -1)

    def _sent(self, x, back: bool = False):
        """Sends x [B, n, ...], the rows for all other devices in order, and returns those that it receives."""
        exchange = self._exchange
        if not exchange.shifts:
            by_device = x.reshape(x.shape[0], exchange.shards, -1, *x.shape[2:])
            return jax.lax.all_to_all(by_device, self.config.axis, 1, 1, tiled=True).reshape(x.shape)
        ends = np.cumsum([count * exchange.unit for _, count in exchange.shifts])
        parts = jnp.split(x, ends[:-1], axis=1)
        direction = -1 if back else 1
        received = [
            shifted(part, self.config, direction * shift)
            for part, (shift, _) in zip(parts, exchange.shifts, strict=True)
        ]
        return jnp.concatenate(received, 1)


def gathered(config: ShardConfig, device: Any, slots, real, tree) -> Any:
    """The rows [B, n, ...] of tokens `slots`, from arrays [B, L, ...] on several devices, on every device."""
    owner, row = place_of(config.plan, slots)
    mine = (owner == device) & real
    return jax.tree.map(lambda x: jax.lax.psum(_rows(x, row, mine), config.axis), tree)


def scattered(config: ShardConfig, device: Any, slots, real, totals, rows) -> Any:
    """Arrays [B, L, ...] to which those of the rows [B, n, ...] are added that belong to this device."""
    owner, row = place_of(config.plan, slots)
    mine = (owner == device) & real
    return jax.tree.map(lambda total, x: _add_rows(total, x, row, mine), totals, rows)


def reach(config: ShardConfig, device: Any, call: Request, rest: Any) -> tuple[Any, Any]:
    """The number of shards before and after that any device needs, from the mask's arrays; equal on all devices."""
    plan, length = config.plan, config.plan.length
    size = plan.rows // runs_of(plan.order)
    slots = jnp.clip(slots_of(plan, device), 0, length - 1)
    mask = rest.cut(slots, None, q_len=length, kv_len=length)
    q_positions = slots if call.q_positions is None else jnp.take(call.q_positions, slots[0], axis=1)
    numbers = None if call.rows is None else (call.rows, call.heads)
    q, kv = sides_of(mask, plan.rows, length, q_positions=q_positions, kv_positions=call.kv_positions, numbers=numbers)
    seen = _chunks_needed(plan, mask.kv_spans(q.tiles(size), kv.tiles(size)), size)
    chunk = np.arange(plan.shards * runs_of(plan.order), dtype=np.int32)
    owner = np.where(chunk >= plan.shards, 2 * plan.shards - 1 - chunk, chunk).astype(np.int32)
    before = device - owner
    if plan.order == "zigzag":  # devices before and after are the same ones there: the ring goes one way
        distances = [jnp.where(seen, before % np.int32(plan.shards), 0).max(), jnp.zeros((), np.int32)]
    else:
        distances = [jnp.where(seen, before, 0).max(), jnp.where(seen, -before, 0).max()]
    # Over all mesh axes, because devices with other rows and heads take part in the same collectives.
    left, right = jax.lax.pmax(jnp.maximum(jnp.stack(distances), 0), config.all_axes)
    all_shards = left + right >= plan.shards - 1
    return jnp.where(all_shards, np.int32(plan.shards - 1), left), jnp.where(all_shards, np.int32(0), right)


def _chunks_needed(plan: ParallelPlan, spans: Any, size: int) -> Any:
    """Which chunks of the sequence a device needs, bool [chunks], from the spans of its queries."""
    chunks = plan.shards * runs_of(plan.order)
    chunk = np.arange(chunks, dtype=np.int32)
    shape = np.broadcast_shapes(spans.low.shape, spans.high.shape)
    low = jnp.broadcast_to(spans.low, shape).reshape(-1, 1)
    high = jnp.broadcast_to(spans.high, shape).reshape(-1, 1)
    seen = ((low // size <= chunk[None]) & ((high - 1) // size >= chunk[None]) & (low < high)).any(0)
    if spans.common is not None:
        tiles = -(-plan.length // size)
        common = jnp.broadcast_to(spans.common.any((0, 1, 2)), (tiles,))
        seen = seen | jnp.pad(common, (0, chunks - tiles))
    return seen


def ring(config: ShardConfig, shards, distances, visit, state):
    """Visits shards one after the other: the own one, those before, those after, by `visit(keys, distance, state)`.

    The next shard is sent while the current one is computed with.
    """
    before, after = distances

    def from_before(s, carry):
        here, state = carry
        following = shifted(here, config, 1, around=True)
        return following, visit(here, s, state)

    def from_after(s, carry):
        here, state = carry
        here = shifted(here, config, -1, around=True)
        return here, visit(here, -s, state)

    here = shards
    if not _is_zero(before):
        here, state = jax.lax.fori_loop(np.int32(0), _int32(before), from_before, (here, state))
    state = visit(here, before, state)
    if not _is_zero(after) and config.plan.sees_after:
        _, state = jax.lax.fori_loop(np.int32(1), _int32(after + 1), from_after, (shards, state))
    return state


def ring_back(config: ShardConfig, shards, distances, visit, state, totals):
    """The backward pass of `ring`, by `visit(keys, distance, state) -> (gradients of the keys, state)`.

    Gradients travel with their keys. Returns the state, and the gradients of this device's own shard.
    """
    own, state = visit(shards, 0, state)
    totals = jax.tree.map(jnp.add, totals, _wide(own))
    for distance, direction in zip(distances, (1, -1), strict=True):
        if _is_zero(distance) or (direction < 0 and not config.plan.sees_after):
            continue

        def step(s, carry, direction=direction):
            here, grads, state = carry
            here = shifted(here, config, direction, around=True)
            more, state = visit(here, direction * s, state)
            grads = jax.tree.map(jnp.add, grads, _wide(more))
            return here, shifted(grads, config, direction, around=True), state

        zeros = jax.tree.map(jnp.zeros_like, totals)
        _, grads, state = jax.lax.fori_loop(np.int32(1), _int32(distance + 1), step, (shards, zeros, state))
        # After the loop, gradients are one device further than the last shard was visited.
        home = distance + 1 if isinstance(distance, int) else jnp.where(distance > 0, distance + 1, 0)
        totals = jax.tree.map(jnp.add, totals, send_home(grads, config, home * direction))
    return state, totals


def _is_zero(distance: Any) -> bool:
    return isinstance(distance, int) and distance == 0


def _int32(number: Any) -> Any:
    return np.int32(number) if isinstance(number, int) else number


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(statistics_dtype(x.dtype)), tree)


def _rows(x, row, mine):
    """Rows [B, n, ...] of an array [B, L, ...]; 0 for rows of other devices."""
    inside = jnp.where(mine, row, 0)
    inside = jnp.broadcast_to(inside, (x.shape[0], inside.shape[1]))
    found = jax.vmap(lambda a, at: a[at])(x, inside)
    mine = mine.reshape(*mine.shape, *[1] * (x.ndim - 2))
    return jnp.where(mine, found, 0)


def _add_rows(total, rows, row, mine):
    """An array [B, L, ...] to which rows [B, n, ...] are added, except those of other devices."""
    nowhere = np.int32(total.shape[1])
    at = jnp.broadcast_to(jnp.where(mine, row, nowhere), rows.shape[:2])
    return jax.vmap(lambda a, x, i: a.at[i].add(x.astype(a.dtype), mode="drop"))(total, rows, at)


def global_tokens(
    plan: ParallelPlan, listed: tuple[int, ...], flags: tuple[Any, ...], by_flags: bool
) -> tuple[Any, Any, Any]:
    """The tokens that are listed or flagged: (slots, which of these are real, the number beyond the capacity)."""
    slots, real = jnp.asarray(listed, np.int32).reshape(1, -1), jnp.ones((1, len(listed)), bool)
    if not by_flags:
        return slots, real, jnp.zeros((), np.int32)
    rows = max(array.shape[0] for array in flags)
    flagged = jnp.zeros((rows, plan.length), bool)
    for array in flags:
        flagged = flagged | array
    if listed:
        flagged = flagged.at[:, np.asarray(listed)].set(False)
    count = flagged.sum(1, dtype=np.int32)
    found = jax.vmap(lambda row: jnp.flatnonzero(row, size=plan.capacity, fill_value=0))(flagged).astype(np.int32)
    is_real = jnp.arange(plan.capacity, dtype=np.int32)[None] < count[:, None]

    def both(of_listed, of_flagged):
        return jnp.concatenate([jnp.broadcast_to(of_listed, (rows, of_listed.shape[1])), of_flagged], axis=1)

    return both(slots, found), both(real, is_real), jnp.maximum(count.max() - np.int32(plan.capacity), 0)
