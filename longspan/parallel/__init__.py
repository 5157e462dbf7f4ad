"""Attention over sequences that devices share: the mask decides which keys are sent.

`plan` finds the keys of other devices that a device needs, and `attention` sends only those; it is exact for every
mask. `explain(..., mesh=)` prints the bytes, `cost` estimates times. `order` and `shard_batch` order and shard the
tokens once for a whole model. Each pair of a query and a key is computed on one device, and partial results are
combined by their log-sum-exps.

Example:
    >>> mesh = ls.parallel.mesh(sp=4)
    >>> q = k = v = jnp.ones((1, 64, 2, 4))
    >>> mask = ls.Causal() & (ls.Window(7, 0) | ls.Prefix(2))
    >>> ls.parallel.attention(q, k, v, mask=mask, mesh=mesh).shape
    (1, 64, 2, 4)
    >>> print(ls.parallel.plan(mask, 64, 4))
    Causal() & (Window(7, 0) | Prefix(2)): 64 tokens on 4 devices, contiguous, load max/mean 1.06
      all-reduce: 2 rows, keys that every device needs
      shift +1: 7 rows, keys from the device before
      each device receives 10 rows forward and 10 backward; a row is the key and value of one token
      the mask requires at least 9 rows forward; an all-gather sends 48
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
