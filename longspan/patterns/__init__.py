"""Attention of named papers, one paper per file: the pattern as a `Mask`, and what the model computes, exactly.

What the models compute is slightly more than a mask says: BigBird counts a repeated block twice, Longformer has other
projections for global tokens.
"""

from longspan.patterns.bigbird import bigbird as bigbird
from longspan.patterns.bigbird import bigbird_attention as bigbird_attention
from longspan.patterns.bigbird import bigbird_random_blocks as bigbird_random_blocks
from longspan.patterns.longformer import longformer as longformer
from longspan.patterns.longformer import longformer_attention as longformer_attention
