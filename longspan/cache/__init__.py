"""KV caches sized from the mask: a key is stored until the last query that may attend to it.

`plan` finds how long each key is needed and how many slots that takes, `init` allocates a `Cache` with these slots,
and `Cache.append` returns a `View`: the keys, values and positions that the new tokens attend to.

Example:
    >>> mask = ls.Causal() & ls.Window(3, 0)
    >>> cache = ls.cache.init(ls.cache.plan(mask, 100), batch=1, kv_heads=2, head_dim=8, dtype=jnp.float32)
    >>> q, k, v = jnp.ones((1, 1, 4, 8)), jnp.ones((1, 1, 2, 8)), jnp.ones((1, 1, 2, 8))
    >>> for token in range(6):
    ...     cache, view = cache.append(k, v)
    ...     out = ls.attention(q, **view.of(mask))
    >>> cache.positions.tolist()
    [[4, 5, 2, 3]]
"""

from longspan.cache.files import restore as restore
from longspan.cache.plan import CachePlan as CachePlan
from longspan.cache.plan import plan as plan
from longspan.cache.store import Cache as Cache
from longspan.cache.store import View as View
from longspan.cache.store import init as init
