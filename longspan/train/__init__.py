"""Training: batches that are a pure function of (seed, step), losses, and readers of texts."""

from longspan.train.data import BucketedBatches as BucketedBatches
from longspan.train.data import MaskedBatches as MaskedBatches
from longspan.train.data import PackedBatches as PackedBatches
