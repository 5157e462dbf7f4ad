"""Attention over sequences that devices share: what is sent follows from the mask.

`plan` asks the mask which keys of its neighbours a device needs, `attention` brings just those and is exact for every
mask, `explain(..., mesh=)` shows it in bytes and `cost` in time. `order` and `shard_batch` lay tokens out once for a
whole model. Every pair is computed once, where it is cheapest to bring its query and key together; partial results
are joined by their log-sum-exps.

Example:
    >>> mesh = ls.parallel.mesh(sp=4)
    >>> q = k = v = jnp.ones((1, 64, 2, 4))
    >>> mask = ls.Causal() & (ls.Window(7, 0) | ls.Prefix(2))
    >>> ls.parallel.attention(q, k, v, mask=mask, mesh=mesh).shape
    (1, 64, 2, 4)
    >>> print(ls.parallel.plan(mask, 64, 4))
    Causal() & (Window(7, 0) | Prefix(2)): 64 tokens on 4 devices, contiguous, load 1.06
      all-reduce: 2 rows, keys that everybody sees
      shift +1: 7 rows, keys before
      a device receives 10 rows forward, 10 backward; bound 9, a gather 48
"""

from longspan.parallel.balance import order as order
from longspan.parallel.batches import shard_batch as shard_batch
from longspan.parallel.batches import unshard as unshard
from longspan.parallel.call import attention as attention
from longspan.parallel.cost import H100 as H100
from longspan.parallel.cost import V5E as V5E
from longspan.parallel.cost import V5P as V5P
from longspan.parallel.cost import Chip as Chip
from longspan.parallel.cost import Cost as Cost
from longspan.parallel.cost import cost as cost
from longspan.parallel.mesh import mesh as mesh
from longspan.parallel.plan import ParallelPlan as ParallelPlan
from longspan.parallel.plan import plan as plan
