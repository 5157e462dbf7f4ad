"""Attention patterns of papers, one paper per file: the pattern as a `Mask`, and the exact attention of the model.

The models differ slightly from a mask: BigBird counts a repeated block twice, and Longformer has separate projections
for global tokens.
"""

from longspan.patterns.bigbird import bigbird as bigbird
from longspan.patterns.bigbird import bigbird_attention as bigbird_attention
from longspan.patterns.bigbird import bigbird_random_blocks as bigbird_random_blocks
from longspan.patterns.longformer import longformer as longformer
from longspan.patterns.longformer import longformer_attention as longformer_attention
