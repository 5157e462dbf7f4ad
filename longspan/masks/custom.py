"""`Custom`: a user's function of two positions, perhaps by batch row and head, as a rule."""

from collections.abc import Callable

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
    """Allows where `fn(q, k, *arrays)` or `fn(b, h, q, k, *arrays)` is true.

    `q` and `k` are positions, `b` and `h` the numbers of the batch row and of the query head; all are int arrays that
    broadcast against each other. Which of the two is meant is told by how many parameters `fn` requires: two or four
    more than there are arrays. Where both would fit, as with `*args` or defaults, it is `fn(q, k, *arrays)` if `fn`
    requires no more than two, and an error otherwise.

    `batch` and `heads` say how many rows and heads the rule tells apart: 1, or all of a call's. Where it is 1, one mask
    serves them all, and `b` (or `h`) is 0. Rows and heads are numbered as the call sees them: over a batch that `jit`
    shards they are the global ones, inside `shard_map` and `vmap` those of one shard or example. Add what is missing
    as data there: `Custom(lambda b, h, q, k, first: rule(b + first, h, q, k), first, batch=B)`.

    Without `bounds` no tile can be skipped (`explain` says so).

    `fn` and `bounds` are part of the compiled program, and a function equals only itself. Define them once, outside of
    loops, and pass what changes as `arrays`: then nothing is compiled again. A new lambda per call compiles at every
    call; the programs of the 32 functions used last are kept.

    Args:
        fn: any traceable function of these arrays; it returns bools, by a comparison for example. Numbers are an error:
            what is added to scores is a `ScoreBias`.
        arrays: data of the rule; new values do not retrace. Traced values belong here: a function that closes over one
            cannot be differentiated or mapped by `engine="xla"`.
        bounds: `bounds(q, kv, *arrays) -> (may_any, must_all)` for tiles whose positions lie in
            [q.first, q.last] x [kv.first, kv.last]; both must hold for every pair of positions in them, and for every
            row and head; or `bounds(b, h, q, kv, *arrays)`. Tiles may be of any size. Any traceable function.
        batch: how many batch rows `fn` tells apart.
        heads: how many query heads `fn` tells apart.

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
    def __init__(self, fn: Callable, *arrays, bounds: Callable | None = None, batch: int = 1, heads: int = 1):
        check_custom(fn, bounds, len(arrays), batch, heads)
        values = dict(fn=fn, arrays=arrays, bounds=bounds, batch=int(batch), heads=int(heads))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def allowed(self, q, kv):
        # The user's function may use jax.numpy, whatever namespace the caller plans in.
        arrays = [constant(jnp, a) if hasattr(a, "shape") else a for a in self._arrays(q)]
        given = [constant(jnp, a) for a in (*self._row_and_head(self.fn, q), q.position, kv.position)]
        truth = jnp.asarray(self.fn(*given, *arrays))
        shape = np.broadcast_shapes(*(a.shape for a in given))
        check_bools(self, "the function", truth.dtype)
        check_truth(truth.shape, shape)
        shape = np.broadcast_shapes(truth.shape, shape)
        return np.broadcast_to(np.asarray(truth), shape) if q.side.xp is np else jnp.broadcast_to(truth, shape)

    def classify(self, q, kv):
        if self.bounds is None:
            return super().classify(q, kv)
        xp, given = q.side.xp, (*self._row_and_head(self.bounds, q), q, kv, *self._arrays(q))
        if xp is not np:
            some, every = self.bounds(*given)
        else:  # static parts are planned while a program is traced: the user's function may use jax.numpy there too
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
        return (self,) if self.bounds is None else ()

    def extents(self):
        yield Extent("Custom.batch", "B", self.batch)
        yield Extent("Custom.heads", "N", self.heads)

    def _row_and_head(self, function: Callable, q):
        """What a function of rows and heads is given first: nothing, if it is none."""
        if not takes_rows_and_heads(function, len(self.arrays)):
            return ()
        numbers = ((q.side.rows_among(self.batch), self.batch), (q.side.heads_of(self.heads), self.heads))
        return tuple(number if apart > 1 else np.zeros((1, 1, 1, 1), np.int32) for number, apart in numbers)

    def _arrays(self, side):
        return [side.table(a) if hasattr(a, "shape") else a for a in self.arrays]

    def _arguments(self):
        name = getattr(self.fn, "__name__", repr(self.fn))
        bounds = [] if self.bounds is None else [f"bounds={getattr(self.bounds, '__name__', repr(self.bounds))}"]
        apart = [f"{axis}={n}" for axis, n in (("batch", self.batch), ("heads", self.heads)) if n > 1]
        return [name, *map(short, self.arrays), *bounds, *apart]
