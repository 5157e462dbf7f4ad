"""The families whose checkpoints Longspan knows."""

from longspan.models._family import Family
from longspan.models.decoders.llama import LLAMA
from longspan.models.encoders.bert import BERT
from longspan.models.encoders.bigbird import BIG_BIRD
from longspan.models.encoders.longformer import LONGFORMER
from longspan.models.encoders.roberta import ROBERTA

FAMILIES: tuple[Family, ...] = (BERT, ROBERTA, LONGFORMER, BIG_BIRD, LLAMA)
