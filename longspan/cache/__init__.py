"""KV caches allocated from the mask: one rule decides what is attended, so it also decides what must be kept.

`plan` finds until when each key is seen and how many slots that takes, `init` makes a `Cache` of them, and
`Cache.append` gives a `View` of what the new tokens may see. `lifetimes` asks the mask, at the positions of an
`outline`, `slots` allocates, `store` holds, `files` saves and restores what `contents` checks.

Example:
    >>> mask = ls.Causal() & ls.Window(3, 0)
    >>> cache = ls.cache.init(ls.cache.plan(mask, 100), batch=1, kv_heads=2, head_dim=8, dtype=jnp.float32)
    >>> for token in range(6):
    ...     q, k, v = (jnp.ones((1, 1, heads, 8)) for heads in (4, 2, 2))
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
