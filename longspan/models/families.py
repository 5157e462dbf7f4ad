"""The model families whose checkpoints Longspan loads."""

from longspan.models.decoders.gemma2 import GEMMA2
from longspan.models.decoders.gemma3 import GEMMA3
from longspan.models.decoders.llama import LLAMA
from longspan.models.decoders.mistral import MISTRAL
from longspan.models.decoders.phi3 import PHI3
from longspan.models.decoders.qwen2 import QWEN2
from longspan.models.decoders.qwen3 import QWEN3
from longspan.models.encoders.bert import BERT
from longspan.models.encoders.bigbird import BIG_BIRD
from longspan.models.encoders.eurobert import EUROBERT
from longspan.models.encoders.longformer import LONGFORMER
from longspan.models.encoders.modernbert import MODERNBERT
from longspan.models.encoders.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA
from longspan.models.encoders.rotary_bert import GTE, JINA_V3, NOMIC_BERT
from longspan.models.family import Family

FAMILIES: tuple[Family, ...] = (
    *(BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, LONGFORMER, BIG_BIRD),
    *(MODERNBERT, EUROBERT, NOMIC_BERT, GTE, JINA_V3),
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3),
)
