"""Training: a loop for any NNX module, checkpoints to resume from, and batches that depend on (seed, step) alone.

Example:
    >>> from flax import nnx
    >>> from longspan import train
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> batches = lambda step: dict(x=np.ones((4, 2), np.float32), y=np.full((4, 1), 3, np.float32))
    >>> loss = lambda model, batch, key: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    >>> result = train.fit(model, batches, loss, train.adamw(0.1, steps=100), steps=100)
    >>> result.loss < 1e-2
    True
"""

# ruff: noqa: E402 - the checks come first: without these packages the imports below would fail with a worse error.

from longspan.optional import needs as _needs

for _package in ("flax", "optax", "orbax"):
    _needs(__name__, _package, extra="train")

from longspan.train.data import BucketedBatches as BucketedBatches
from longspan.train.data import MaskedBatches as MaskedBatches
from longspan.train.data import PackedBatches as PackedBatches
from longspan.train.disk import DiskFull as DiskFull
from longspan.train.interrupts import Interrupted as Interrupted
from longspan.train.loop import FitResult as FitResult
from longspan.train.loop import fit as fit
from longspan.train.optimizers import adamw as adamw
from longspan.train.processes import join as join
from longspan.train.report import Progress as Progress
from longspan.train.resume import restore as restore
from longspan.train.sources import read_examples as read_examples
from longspan.train.supervisor import supervise as supervise
from longspan.train.tasks import CausalLMTraining as CausalLMTraining
from longspan.train.tasks import ClassificationTraining as ClassificationTraining
from longspan.train.tasks import EmbeddingTraining as EmbeddingTraining
from longspan.train.tasks import MaskedLMTraining as MaskedLMTraining
from longspan.train.tokenizing import tokenized as tokenized
