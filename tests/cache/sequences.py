"""A cache and all tokens that were appended to it: attention with the cache is compared with dense attention."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume

import longspan as ls
from tests.cache.brute import HEADS, truth

BATCH, KV_HEADS, SIZE, V_SIZE = 2, 1, 3, 2
SPAN = 48  # positions from the first one on that are tested
FREE_SLOT = 2**30 - 1
MAX_SLOTS = 6000


@jax.jit
def appended(cache, k, v, lengths):
    return cache.append(k, v, lengths)


@jax.jit
def rolled_back(cache, n):
    return cache.rollback(n)


def _step(cache, q, k, v, lengths, mask):
    cache, view = cache.append(k, v, lengths)
    return cache, ls.attention(q, **view.of(mask))


stepped = jax.jit(_step)
stepped_in_place = jax.jit(_step, donate_argnums=0)


@jax.jit
def scanned(cache, q, k, v, mask):
    """Appends single tokens in a scan; q, k and v are [steps, B, 1, heads, size]."""

    def body(cache, token):
        return _step(cache, *token, jnp.ones(BATCH, np.int32), mask)

    return jax.lax.scan(body, cache, (q, k, v))


class Sequence:
    """One cache of a plan for `length` positions, from position `start` on, and the tokens of its rows."""

    def __init__(self, mask, length: int, start: int, slack: int, heads_first: bool, seed: int):
        try:
            self.plan = ls.cache.plan(mask, length, slack=slack)
        except ValueError as refused:
            assert "& Causal()" in str(refused) or "lists every position" in str(refused)
            assume(False)
            raise
        assume(self.plan.capacity <= MAX_SLOTS)  # larger plans are tested without allocating them
        self.mask, self.slack, self.rng = mask, slack, np.random.default_rng(seed)
        self.count, self.operations = min(SPAN, length - start), 0
        self.start, places = start, np.arange(start, start + self.count)
        self.tied = self._ties(places)
        assume(not self.tied[0])
        at = places[None].astype(np.int32)
        self.seen = truth(mask, self.count, self.count, at, at, batch=1)[0]
        self.tokens = [np.zeros((0, KV_HEADS, SIZE + V_SIZE), np.float32) for _ in range(BATCH)]
        self.furthest, self.marked = [0] * BATCH, [False] * BATCH
        sizes = dict(v_head_dim=V_SIZE, heads_first=heads_first)
        cache = ls.cache.init(self.plan, BATCH, KV_HEADS, SIZE, jnp.float32, **sizes)
        first = [jnp.full(BATCH, start, np.int32) for _ in range(2)]  # two arrays, because both are donated
        self.cache = self._poisoned(replace(cache, length=first[0], furthest=first[1]))

    def _ties(self, places) -> np.ndarray:
        """Bool [count + 1]: whether a row must not end before each place; the last is after the tested ones."""
        after = places + 1
        inside = np.minimum(np.append(places[:1], after), self.plan.length - 1)
        if self.plan.tied is None:
            return np.zeros(len(inside), bool)
        return self.plan.outline.at(self.plan.tied, inside) & (np.append(places[:1], after) < self.plan.length)

    def _poisoned(self, cache):
        """The cache with NaN in free slots, which must never reach an output."""
        held = np.asarray(cache.positions)
        dead = np.expand_dims(held == FREE_SLOT, (cache.heads_axis, 3))
        return replace(cache, k=self._nan(cache.k, dead), v=self._nan(cache.v, dead))

    def _nan(self, x, where):
        return jnp.where(where, np.float32(np.nan), x)

    # Valid arguments

    def lengths(self, count: int, wanted: list[int]) -> list[int]:
        """The number of tokens that each row can take: as many as wanted, or fewer if positions are tied."""
        found = []
        for row, want in enumerate(wanted):
            have = len(self.tokens[row])
            ends = [n for n in range(min(count, self.count - have) + 1) if n == 0 or not self.tied[have + n]]
            found.append(max((n for n in ends if n <= want), default=0))
        return found

    def back(self, wanted: list[int]) -> list[int]:
        """The number of tokens that each row can roll back."""
        found = []
        for row, want in enumerate(wanted):
            have = len(self.tokens[row])
            least = max(self.furthest[row] - self.slack, 0) if self.plan.evicts else 0
            found.append(max(n for n in range(want + 1) if n == 0 or (have - n >= least and not self.tied[have - n])))
        return found

    # Operations

    def append(self, count: int, wanted: list[int], how: str):
        """Appends rows of different lengths, inside or outside jit, in place or not, and compares their attention."""
        lengths = self.lengths(count, wanted)
        q, new = self._new(count, lengths)
        k, v = jnp.asarray(new[..., :SIZE]), jnp.asarray(new[..., SIZE:])
        given = np.array(lengths) if how == "eager" else jnp.array(lengths, np.int32)
        if how in ("eager", "jit"):
            self.cache, view = (type(self.cache).append if how == "eager" else appended)(self.cache, k, v, given)
            out = ls.attention(q, **view.of(self.mask), engine="reference")
        else:
            step = stepped if how == "step" else stepped_in_place
            old, (self.cache, out) = self.cache, step(self.cache, q, k, v, given, self.mask)
            assert how == "step" or old.k.is_deleted()
        self._took(new, lengths)
        self._compare(q, np.asarray(out), lengths)
        self._after()

    def scan(self, steps: int):
        """Appends single tokens in one compiled loop."""
        have = max(len(tokens) for tokens in self.tokens)
        steps = min(steps, self.count - have)
        ties = [self.tied[len(tokens) + 1 : len(tokens) + steps + 1].any() for tokens in self.tokens]
        if steps < 1 or any(ties):
            return
        q, new = self._new(steps, [steps] * BATCH)
        by_step = [jnp.swapaxes(x, 0, 1)[:, :, None] for x in (q, new[..., :SIZE], new[..., SIZE:])]
        self.cache, outs = scanned(self.cache, *map(jnp.asarray, by_step), self.mask)
        self._took(new, [steps] * BATCH)
        self._compare(q, np.asarray(outs)[:, :, 0].swapaxes(0, 1), [steps] * BATCH)
        self._after()

    def rollback(self, wanted: list[int], how: str):
        back = self.back(wanted)
        if how == "eager":
            self.cache = self.cache.rollback(back[0] if len(set(back)) == 1 else np.array(back))
        else:
            self.cache = rolled_back(self.cache, jnp.array(back, np.int32))
        self.tokens = [tokens[: len(tokens) - n] for tokens, n in zip(self.tokens, back, strict=True)]
        self._after()

    def fork(self, rows: list[int]):
        self.cache = self.cache.fork(np.array(rows))
        self.tokens = [self.tokens[row] for row in rows]
        self.furthest, self.marked = [self.furthest[row] for row in rows], [self.marked[row] for row in rows]
        self._after()

    def save(self, folder):
        """Saves the cache and restores it in the other order, unless it lacks keys because it starts late."""
        if self.start:
            return
        self.cache.save(folder / "cache")
        self.cache = ls.cache.restore(folder / "cache", self.plan, heads_first=not self.cache.heads_first)
        self._after()

    def refuse(self, row: int, kind: str):
        """An invalid call for a row: outside jit it raises, inside jit the row is marked and unchanged."""
        have = len(self.tokens[row])
        lengths = [1 if r != row and self.lengths(1, [1] * BATCH)[r] else 0 for r in range(BATCH)]
        if kind == "rollback":
            n = [0 if r != row else have + self.start + 1 for r in range(BATCH)]
            self._raises(lambda: self.cache.rollback(np.array(n)))
            self.cache = rolled_back(self.cache, jnp.array(n, np.int32))
            lengths = [0] * BATCH
        else:
            count = 1 if kind == "append" else self.count + 1
            lengths = [0] * BATCH if count > 1 else lengths
            beyond = [n if r != row else count + 1 for r, n in enumerate(lengths)]
            q, new = self._new(count, lengths)
            k, v = jnp.asarray(new[..., :SIZE]), jnp.asarray(new[..., SIZE:])
            if kind == "end" and self.start + have + count <= self.plan.length:
                return
            beyond = [n if r != row else count for r, n in enumerate(lengths)] if kind == "end" else beyond
            self._raises(lambda: self.cache.append(k, v, np.array(beyond)))
            self.cache, view = appended(self.cache, k, v, jnp.array(beyond, np.int32))
            self._took(new, lengths)
            self._compare(q, np.asarray(ls.attention(q, **view.of(self.mask), engine="reference")), lengths)
        self.marked[row] = True
        self._after()

    def _raises(self, call):
        try:
            call()
        except ValueError:
            return
        raise AssertionError("it should have been refused")

    # Comparison

    def _new(self, count: int, lengths: list[int]):
        """Queries, and keys concatenated with values; padding and a few tokens are NaN."""
        q = self.rng.normal(size=(BATCH, count, HEADS, SIZE)).astype(np.float32)
        new = self.rng.normal(size=(BATCH, count, KV_HEADS, SIZE + V_SIZE)).astype(np.float32)
        new[self.rng.random((BATCH, count)) < 0.03] = np.nan
        padding = np.arange(count)[None] >= np.array(lengths)[:, None]
        new[padding], q[padding] = np.nan, 0
        return q, new

    def _took(self, new, lengths):
        self.tokens = [np.concatenate([self.tokens[row], new[row, :n]]) for row, n in enumerate(lengths)]
        self.furthest = [max(most, len(tokens)) for most, tokens in zip(self.furthest, self.tokens, strict=True)]

    def _compare(self, q, out, lengths):
        """Compares the newest tokens' attention with dense attention over all tokens of their row.

        NaN must not change queries that do not attend to it. Padding has queries too, at later positions.
        """
        for row, n in enumerate(lengths):
            tokens = self.tokens[row].astype(np.float64)
            first = len(tokens) - n
            allowed = self.seen[:, first : len(tokens), : len(tokens)]
            bad = np.isnan(tokens).any((1, 2))
            last = first + q.shape[1]
            if bad.any() and (last > self.count or self.seen[:, first:last, : len(tokens)][..., bad].any()):
                continue
            tokens = np.nan_to_num(tokens)
            scores = np.einsum("tnh,sh->nts", q[row, :n].astype(np.float64), tokens[:, 0, :SIZE]) / np.sqrt(SIZE)
            weights = np.where(allowed, np.exp(scores), 0)
            weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
            wanted = np.einsum("nts,sh->tnh", weights, tokens[:, 0, SIZE:])
            np.testing.assert_allclose(out[row, :n], wanted, rtol=0, atol=2e-5)

    def _after(self):
        """Checks the contents of all slots, and the lengths and marks of all rows."""
        self.operations += 1
        assert self.cache.overflowed.tolist() == self.marked
        assert self.cache.length.tolist() == [self.start + len(tokens) for tokens in self.tokens]
        assert self.cache.furthest.tolist() == [self.start + most for most in self.furthest]
        held, kept = np.asarray(self.cache.positions), np.moveaxis(self.cache.k, self.cache.heads_axis, 2)
        for row, tokens in enumerate(self.tokens):
            slots = np.flatnonzero(held[row] != FREE_SLOT)
            at = held[row, slots] - self.start
            assert ((at >= 0) & (at < len(tokens))).all() and len(set(at)) == len(at)
            np.testing.assert_array_equal(kept[row, slots], tokens[at][..., :SIZE])
        self.cache = self._poisoned(self.cache)
