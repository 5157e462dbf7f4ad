"""How keys and queries that lie on different devices come together, and how gradients go home.

Each way brings some keys to a device (or some queries), and takes gradients back: `Halo` a few rows of neighbours,
`Columns` the keys that everybody sees, `Listed` blocks of any device; `ring` whole shards, one after the other.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.engines import Request
from longspan.layout import sides_of
from longspan.parallel.exchange import Exchange, Lists
from longspan.parallel.order import chunk_of, runs_of
from longspan.parallel.parts import Setting, place_of, slots_of
from longspan.parallel.plan import ParallelPlan


def shifted(tree: Any, setting: Setting, shift: int, *, around: bool = False) -> Any:
    """What the device `shift` before this one has; zeros where there is none, unless the ring is closed."""
    shards = setting.plan.shards
    pairs = [(j, (j + shift) % shards) for j in range(shards) if around or 0 <= j + shift < shards]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, setting.axis, pairs), tree)


def homeward(tree: Any, setting: Setting, distance: Any) -> Any:
    """What is `distance` devices behind its owner, at home: one leap, or one for each bit if the distance is data."""
    shards = setting.plan.shards
    if isinstance(distance, int):
        return tree if distance % shards == 0 else shifted(tree, setting, -distance, around=True)
    distance = distance % np.int32(shards)
    for bit in range((shards - 1).bit_length()):

        def leap(tree, bit=bit):
            return shifted(tree, setting, -(1 << bit), around=True)

        tree = jax.lax.cond((distance >> bit) & 1 == 1, leap, lambda tree: tree, tree)
    return tree


class Halo(NamedTuple):
    """A few rows of a few neighbours."""

    setting: Setting
    device: Any

    def bring(self, *arrays) -> tuple[Any, ...]:
        """Their rows of arrays [B, L, ...]."""
        plan = self.setting.plan
        size = plan.rows // runs_of(plan.order)
        found = []
        for step in plan.halo:
            start = step.run * size + step.start
            found.append([shifted(x[:, start : start + step.rows], self.setting, step.shift) for x in arrays])
        return tuple(jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True))

    def slots(self) -> Any:
        """Which tokens they are, int32 [1, n]."""
        plan = self.setting.plan
        size, found = plan.rows // runs_of(plan.order), []
        for step in plan.halo:
            source = self.device - np.int32(step.shift)
            chunk = chunk_of(plan.order, plan.shards, source, step.run)
            rows = chunk * np.int32(size) + jnp.arange(step.start, step.start + step.rows, dtype=np.int32)
            there = (source >= 0) & (source < plan.shards)
            # Beyond the ends there is nobody. In the order of tokens such rows lie outside, and stay in order.
            found.append(rows if plan.order == "contiguous" else jnp.where(there, rows, np.int32(-1)))
        return jnp.concatenate(found)[None]

    def take_home(self, grads, totals):
        plan, at = self.setting.plan, 0
        size = plan.rows // runs_of(plan.order)
        for step in plan.halo:
            part = jax.tree.map(lambda x, at=at, n=step.rows: x[:, at : at + n], grads)
            part = shifted(part, self.setting, -step.shift)
            begin = step.run * size + step.start
            totals = jax.tree.map(
                lambda total, x, begin=begin: total.at[:, begin : begin + x.shape[1]].add(x.astype(total.dtype)),
                totals,
                part,
            )
            at += step.rows
        return totals


class Columns(NamedTuple):
    """Keys that everybody sees: an all-reduce of their rows, to which each owner gives its own."""

    setting: Setting
    device: Any
    slots: Any  # int32 [B or 1, n]
    real: Any  # bool [B or 1, n]

    def bring(self, *arrays) -> tuple[Any, ...]:
        """Their rows of arrays [B, L, ...]."""
        mine, row = self._mine()
        return tuple(jax.lax.psum(_rows(x, row, mine), self.setting.axis) for x in arrays)

    def hidden(self) -> Any:
        """What is one's own is computed with the rest of one's own."""
        mine, _ = self._mine()
        return mine | ~self.real

    def take_home(self, grads, totals):
        mine, row = self._mine()
        whole = jax.tree.map(lambda x: jax.lax.psum(x.astype(statistics_dtype(x.dtype)), self.setting.axis), grads)
        return jax.tree.map(lambda total, x: _add_rows(total, x, row, mine), totals, whole)

    def _mine(self):
        device, row = place_of(self.setting.plan, self.slots)
        return (device == self.device) & self.real, row


class Listed(NamedTuple):
    """Blocks that a table lists: other ones for every head, of devices near and far."""

    setting: Setting
    lists: Lists

    @property
    def by_head(self) -> bool:
        return self.lists.sent.shape[0] > 1

    def of_head(self, head: Any) -> "Listed":
        """What comes for one head."""
        sent, received = (jax.lax.dynamic_slice_in_dim(x, head, 1) for x in self.lists[:2])
        return self._replace(lists=self.lists._replace(sent=sent, received=received))

    def bring(self, k, v) -> tuple[Any, ...]:
        rows = self._rows(self.lists.sent)
        rows = jnp.where(rows < k.shape[1], rows, 0).T[None, :, :, None]  # [1, n, heads, 1]
        return tuple(self._sent(jnp.take_along_axis(x, rows, axis=1)) for x in (k, v))

    def slots(self) -> Any:
        """Which tokens they are, int32 [heads, n]; they grow, so what lists none is its owner's last token."""
        shard = np.int32(self.setting.plan.rows)
        source = jnp.repeat(self.lists.source, self._of.unit)[None]
        return source * shard + jnp.minimum(self._rows(self.lists.received), shard - 1)

    def hidden(self) -> Any:
        """Places for more blocks than there are, bool [heads, n]."""
        return self._rows(self.lists.received) >= self.setting.plan.rows

    def take_home(self, grads, totals):
        rows = self._rows(self.lists.sent).T  # [n, heads]

        def added(total, x):
            heads = np.arange(total.shape[2], dtype=np.int32)[None]
            return total.at[:, rows, heads].add(self._sent(x, back=True).astype(total.dtype), mode="drop")

        return jax.tree.map(added, totals, grads)

    @property
    def _of(self) -> Exchange:
        assert self.setting.plan.exchange is not None
        return self.setting.plan.exchange

    def _rows(self, blocks):
        """The rows of some blocks [heads, n] in their shard; what is no block lies beyond it."""
        within = np.arange(self._of.unit, dtype=np.int32).reshape(1, 1, -1)
        return (blocks[:, :, None] * np.int32(self._of.unit) + within).reshape(blocks.shape[0], -1)

    def _sent(self, x, back: bool = False):
        """Rows [B, n, ...] that go to others, one after the other, and those that come."""
        of = self._of
        if not of.shifts:
            apart = x.reshape(x.shape[0], of.shards, -1, *x.shape[2:])
            return jax.lax.all_to_all(apart, self.setting.axis, 1, 1, tiled=True).reshape(x.shape)
        ends = np.cumsum([count * of.unit for _, count in of.shifts])
        parts = jnp.split(x, ends[:-1], axis=1)
        shifts = [-shift if back else shift for shift, _ in of.shifts]
        return jnp.concatenate(
            [shifted(part, self.setting, shift) for part, shift in zip(parts, shifts, strict=True)], 1
        )


def gathered(setting: Setting, device: Any, slots, real, tree) -> Any:
    """Rows [B, n, ...] of arrays [B, L, ...] that lie on several devices, on all of them."""
    owner, row = place_of(setting.plan, slots)
    mine = (owner == device) & real
    return jax.tree.map(lambda x: jax.lax.psum(_rows(x, row, mine), setting.axis), tree)


def scattered(setting: Setting, device: Any, slots, real, totals, rows) -> Any:
    """Arrays [B, L, ...] with those of some rows [B, n, ...] added that lie on this device."""
    owner, row = place_of(setting.plan, slots)
    mine = (owner == device) & real
    return jax.tree.map(lambda total, x: _add_rows(total, x, row, mine), totals, rows)


def reach(setting: Setting, device: Any, call: Request, rest: Any) -> tuple[Any, Any]:
    """How many shards before and after any device needs, as its mask's arrays say; the same number everywhere."""
    plan, length = setting.plan, setting.plan.length
    size = plan.rows // runs_of(plan.order)
    slots = jnp.clip(slots_of(plan, device), 0, length - 1)
    mask = rest.cut(slots, None, q_len=length, kv_len=length)
    q_positions = slots if call.q_positions is None else jnp.take(call.q_positions, slots[0], axis=1)
    numbers = None if call.rows is None else (call.rows, call.heads)
    places: dict[str, Any] = dict(q_positions=q_positions, kv_positions=call.kv_positions, numbers=numbers)
    q, kv = sides_of(mask, plan.rows, length, **places)
    spans = mask.kv_spans(q.tiles(size), kv.tiles(size))
    chunks = plan.shards * runs_of(plan.order)
    chunk = np.arange(chunks, dtype=np.int32)
    low, high = (
        jnp.broadcast_to(a, np.broadcast_shapes(spans.low.shape, spans.high.shape)).reshape(-1, 1) for a in spans[:2]
    )
    seen = ((low // size <= chunk[None]) & ((high - 1) // size >= chunk[None]) & (low < high)).any(0)
    if spans.common is not None:
        common = spans.common.any((0, 1, 2))
        seen = seen | jnp.pad(jnp.broadcast_to(common, (-(-length // size),)), (0, chunks - -(-length // size)))
    owner = np.where(chunk >= plan.shards, 2 * plan.shards - 1 - chunk, chunk).astype(np.int32)
    before = device - owner
    one_way = plan.order == "zigzag"  # there neighbours before and after are the same devices
    ends = jnp.stack([
        jnp.where(seen, before % np.int32(plan.shards) if one_way else before, 0).max(),
        jnp.zeros((), np.int32) if one_way else jnp.where(seen, -before, 0).max(),
    ])  # fmt: skip
    # All axes: programs of other rows and heads wait for each other too.
    left, right = jax.lax.pmax(jnp.maximum(ends, 0), setting.everybody)
    round_once = left + right >= plan.shards - 1
    return jnp.where(round_once, np.int32(plan.shards - 1), left), jnp.where(round_once, np.int32(0), right)


def ring(setting: Setting, shards, distances, visit, state):
    """Shard after shard, first those before, then those after: `visit(keys, distance, state)`, one's own first.

    While a shard is computed with, the next one is on its way.
    """
    before, after = distances

    def on_the_way(s, carry):
        here, state = carry
        following = shifted(here, setting, 1, around=True)
        return following, visit(here, s, state)

    def from_after(s, carry):
        here, state = carry
        here = shifted(here, setting, -1, around=True)
        return here, visit(here, -s, state)

    here = shards
    if not _is_zero(before):
        here, state = jax.lax.fori_loop(np.int32(0), _int32(before), on_the_way, (here, state))
    state = visit(here, before, state)
    if not _is_zero(after) and setting.plan.sees_after:
        _, state = jax.lax.fori_loop(np.int32(1), _int32(after + 1), from_after, (shards, state))
    return state


def ring_back(setting: Setting, shards, distances, visit, state, totals):
    """The ring once more: `visit(keys, distance, state) -> (their gradients, state)`; gradients travel with the keys.

    Returns the state, and the gradients of this device's own shard.
    """
    own, state = visit(shards, 0, state)
    totals = jax.tree.map(jnp.add, totals, _wide(own))
    for distance, way in zip(distances, (1, -1), strict=True):
        if _is_zero(distance) or (way < 0 and not setting.plan.sees_after):
            continue

        def step(s, carry, way=way):
            here, grads, state = carry
            here = shifted(here, setting, way, around=True)
            more, state = visit(here, way * s, state)
            grads = jax.tree.map(jnp.add, grads, _wide(more))
            return here, shifted(grads, setting, way, around=True), state

        zeros = jax.tree.map(jnp.zeros_like, totals)
        _, grads, state = jax.lax.fori_loop(np.int32(1), _int32(distance + 1), step, (shards, zeros, state))
        # They are one further than the last shard was.
        home = distance + 1 if isinstance(distance, int) else jnp.where(distance > 0, distance + 1, 0)
        totals = jax.tree.map(jnp.add, totals, homeward(grads, setting, home * way))
    return state, totals


def _is_zero(distance: Any) -> bool:
    return isinstance(distance, int) and distance == 0


def _int32(number: Any) -> Any:
    return np.int32(number) if isinstance(number, int) else number


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(statistics_dtype(x.dtype)), tree)


def _rows(x, row, mine):
    """Rows [B, n, ...] of an array [B, L, ...]; 0 where they are not here."""
    inside = jnp.where(mine, row, 0)
    inside = jnp.broadcast_to(inside, (x.shape[0], inside.shape[1]))
    found = jax.vmap(lambda a, at: a[at])(x, inside)
    mine = mine.reshape(*mine.shape, *[1] * (x.ndim - 2))
    return jnp.where(mine, found, 0)


def _add_rows(total, rows, row, mine):
    """An array [B, L, ...] with rows [B, n, ...] added where they are here."""
    nowhere = np.int32(total.shape[1])
    at = jnp.broadcast_to(jnp.where(mine, row, nowhere), rows.shape[:2])
    return jax.vmap(lambda a, x, i: a.at[i].add(x.astype(a.dtype), mode="drop"))(total, rows, at)


def tokens(plan: ParallelPlan, listed: tuple[int, ...], flags: tuple[Any, ...], by_flags: bool) -> tuple[Any, Any, Any]:
    """(slots, which are real, how many there are too many) of the tokens that are listed or flagged."""
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
    some = jax.vmap(lambda row: jnp.flatnonzero(row, size=plan.capacity, fill_value=0))(flagged).astype(np.int32)
    is_one = jnp.arange(plan.capacity, dtype=np.int32)[None] < count[:, None]
    both = [
        jnp.concatenate([jnp.broadcast_to(a, (rows, a.shape[1])), b], axis=1)
        for a, b in ((slots, some), (real, is_one))
    ]
    return both[0], both[1], jnp.maximum(count.max() - np.int32(plan.capacity), 0)
