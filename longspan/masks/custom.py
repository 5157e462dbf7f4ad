"""`Custom`: a mask defined by a function of two positions, and optionally of batch row and head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import no_type_check
from longspan.constants import constant
from longspan.masks.base import BY_POSITION, Extent, Mask, rule
from longspan.masks.checks import check_bools, check_custom, check_truth, takes_rows_and_heads
from longspan.masks.pytree import short
from longspan.masks.search import search_spans


@rule
class Custom(Mask):
    """Allows pairs for which `fn(q, k, *arrays)` or `fn(b, h, q, k, *arrays)` is true.

    `q` and `k` are positions, `b` is the index of the batch row and `h` the index of the query head: int arrays that
    broadcast against each other. The number of parameters that `fn` requires decides between the two forms: two or four
    more than there are arrays. Both forms can fit if `fn` has `*args` or default values. Then Longspan calls
    `fn(q, k, *arrays)` if `fn` requires at most two parameters, and raises an error otherwise.

    `batch` and `heads` are the numbers of distinct rows and heads: 1, or all of the call's. With 1, all rows (or heads)
    share one mask, and `b` (or `h`) is 0. The indices are global over a batch that `jit` shards. Inside `shard_map`
    they are global if `batch` and `heads` count all rows and heads, and `batch_axes` and `head_axis` name
    the mesh axes. If `batch` and `heads` count the rows and heads of one shard, the indices start at 0 in each shard.
    Under `vmap` the indices start at 0 in each example. In both cases, pass the index of the first row as an array:
    `Custom(lambda b, h, q, k, first: rule(b + first, h, q, k), first, batch=B)`.

    Without `bounds` no tile is skipped (`explain` reports this).

    `fn` and `bounds` are part of the compiled program, and a function equals only itself. Define them once, outside of
    loops, and pass values that change as `arrays`: then nothing is compiled again. A new lambda per call compiles at
    every call; the programs of the last 32 functions are kept.

    Args:
        fn: any traceable function of these arrays. It returns bools, for example a comparison; numbers are an error
            (to add numbers to the scores, use `ScoreBias`).
        arrays: data of the function; new values do not retrace. Pass traced values here: `engine="xla"` cannot
            differentiate or map a function that closes over one.
        bounds: `bounds(q, kv, *arrays) -> (may_any, must_all)`, or `bounds(b, h, q, kv, *arrays)`, for tiles whose
            positions lie in [q.first, q.last] x [kv.first, kv.last]. `may_any` must be True if any pair of these
            positions is allowed in any row and head; `must_all` may be True only if all are allowed in every row and
            head. Tiles may have any size. Any traceable function.
        batch: the number of batch rows that `fn` distinguishes.
        heads: the number of query heads that `fn` distinguishes.

    Example:
        >>> print(Custom(lambda q, k: (q + k) % 2 == 0).show(3, 3))
        #.#
        .#.
        #.#
        >>> print(Custom(lambda b, h, q, k: abs(q - k) == h, heads=2).show(3, 3, head=0))
        #..
        .#.
        ..#
        >>> def near(q, k, width):  # defined once
        ...     return abs(q - k) <= width
        >>> x = jnp.ones((1, 8, 2, 4))
        >>> for width in (1, 2, 3):  # one program for all three
        ...     out = ls.attention(x, x, x, mask=Custom(near, jnp.asarray(width)))
    """

    reads = BY_POSITION

    fn: Callable
    arrays: tuple = ()
    bounds: Callable | None = None
    batch: int = 1
    heads: int = 1

    @no_type_check
    def __init__(self, fn: Callable, *arrays: Any, bounds: Callable | None = None, batch: int = 1, heads: int = 1):
        check_custom(fn, bounds, len(arrays), batch, heads)
        values = dict(fn=fn, arrays=arrays, bounds=bounds, batch=int(batch), heads=int(heads))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def allowed(self, q, kv):
        # JAX arrays, even if the caller plans in NumPy: the user's function may use jax.numpy.
        arrays = [constant(jnp, a) if hasattr(a, "shape") else a for a in self._arrays(q)]
        given = [constant(jnp, a) for a in (*self._row_and_head(self.fn, q), q.position, kv.position)]
        truth = jnp.asarray(self.fn(*given, *arrays))
        shape = np.broadcast_shapes(*(a.shape for a in given))
        check_bools(self, "the function", truth.dtype)
        check_truth(truth.shape, shape)
        shape = np.broadcast_shapes(truth.shape, shape)
        if q.side.xp is np:
            return np.broadcast_to(np.asarray(truth), shape)
        return jnp.broadcast_to(truth, shape)

    def classify(self, q, kv):
        if self.bounds is None:
            return super().classify(q, kv)
        xp, given = q.side.xp, (*self._row_and_head(self.bounds, q), q, kv, *self._arrays(q))
        if xp is not np:
            some, every = self.bounds(*given)
        else:  # planned in NumPy, perhaps while JAX is tracing: the user's function may use jax.numpy here too
            with jax.ensure_compile_time_eval():
                some, every = self.bounds(*given)
        some, every, no = xp.asarray(some), xp.asarray(every), xp.zeros((1, 1, 1, 1), bool)
        check_bools(self, "`bounds`", some.dtype, every.dtype)
        return some | no, every | no

    def kv_spans(self, q, kv):
        if self.bounds is None:
            return super().kv_spans(q, kv)
        return search_spans(lambda runs: self.classify(q, runs)[0], q, kv)

    def q_spans(self, kv, q):
        if self.bounds is None:
            return super().q_spans(kv, q)
        return search_spans(lambda runs: self.classify(runs, kv)[0], kv, q)

    def unbounded(self):
        if self.bounds is None:
            return (self,)
        return ()

    def extents(self):
        yield Extent("Custom.batch", "B", self.batch)
        yield Extent("Custom.heads", "N", self.heads)

    def _row_and_head(self, function: Callable, q):
        """The leading arguments (b, h) of a function; none for a function of positions only."""
        if not takes_rows_and_heads(function, len(self.arrays)):
            return ()
        row = head = np.zeros((1, 1, 1, 1), np.int32)
        if self.batch > 1:
            row = q.side.rows_among(self.batch)
        if self.heads > 1:
            head = q.side.heads_of(self.heads)
        return row, head

    def _arrays(self, side):
        return [side.table(a) if hasattr(a, "shape") else a for a in self.arrays]

    def _arguments(self):
        arguments = [getattr(self.fn, "__name__", repr(self.fn)), *map(short, self.arrays)]
        if self.bounds is not None:
            arguments.append(f"bounds={getattr(self.bounds, '__name__', repr(self.bounds))}")
        for axis, count in (("batch", self.batch), ("heads", self.heads)):
            if count > 1:
                arguments.append(f"{axis}={count}")
        return arguments
