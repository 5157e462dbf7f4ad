"""`Custom`: a user's function of two positions as a rule."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from longspan._types import no_type_check
from longspan.masks.base import BY_POSITION, Mask, rule
from longspan.masks.checks import check_custom, check_truth
from longspan.masks.pytree import short


@rule
class Custom(Mask):
    """Allows where `fn(q, k, *arrays)` is true; `q` and `k` are positions that broadcast against each other.

    Without `bounds` no tile can be skipped (`explain` says so).

    Args:
        fn: any traceable function of two int arrays and the `arrays`; it returns bool.
        arrays: data of the rule; new values do not retrace. Traced values belong here: a function that closes over one
            cannot be differentiated or mapped by `engine="xla"`.
        bounds: `bounds(q, kv, *arrays) -> (may_any, must_all)` for tiles whose positions lie in
            [q.first, q.last] x [kv.first, kv.last]; both must hold for every pair of positions in them.

    Example:
        >>> print(Custom(lambda q, k: (q + k) % 2 == 0).show(3, 3))
        #.#
        .#.
        #.#
    """

    reads = BY_POSITION

    fn: Callable
    arrays: tuple = ()
    bounds: Callable | None = None

    @no_type_check
    def __init__(self, fn: Callable, *arrays, bounds: Callable | None = None):
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "bounds", bounds)
        check_custom(fn, bounds)

    def allowed(self, q, kv):
        # The user's function may use jax.numpy, whatever namespace the caller plans in.
        q_pos, kv_pos = jnp.asarray(q.position), jnp.asarray(kv.position)
        arrays = [jnp.asarray(a) if hasattr(a, "shape") else a for a in self._arrays(q)]
        truth = jnp.asarray(self.fn(q_pos, kv_pos, *arrays))
        shape = np.broadcast_shapes(q_pos.shape, kv_pos.shape)
        check_truth(truth.shape, shape)
        truth = truth.astype(bool) & jnp.full(shape, True)
        return np.asarray(truth) if q.side.xp is np else truth

    def classify(self, q, kv):
        if self.bounds is None:
            return super().classify(q, kv)
        return self.bounds(q, kv, *self._arrays(q))

    def unbounded(self):
        return (self,) if self.bounds is None else ()

    def extents(self):
        yield from ()

    def _arrays(self, side):
        return [side.table(a) if hasattr(a, "shape") else a for a in self.arrays]

    def _arguments(self):
        name = getattr(self.fn, "__name__", repr(self.fn))
        bounds = [] if self.bounds is None else [f"bounds={getattr(self.bounds, '__name__', repr(self.bounds))}"]
        return [name, *map(short, self.arrays), *bounds]
