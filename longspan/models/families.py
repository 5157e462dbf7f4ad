"""The model families whose checkpoints Longspan loads."""

from collections.abc import Mapping

from longspan.models.decoders.gemma2 import GEMMA2
from longspan.models.decoders.gemma3 import GEMMA3
from longspan.models.decoders.llama import LLAMA
from longspan.models.decoders.mistral import MISTRAL
from longspan.models.decoders.phi3 import PHI3
from longspan.models.decoders.qwen2 import QWEN2
from longspan.models.decoders.qwen3 import QWEN3
from longspan.models.encoders.bert import BERT
from longspan.models.encoders.bigbird import BIG_BIRD
from longspan.models.encoders.embedding_gemma import EMBEDDING_GEMMA
from longspan.models.encoders.eurobert import EUROBERT
from longspan.models.encoders.longformer import LONGFORMER
from longspan.models.encoders.modernbert import MODERNBERT
from longspan.models.encoders.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA
from longspan.models.encoders.rotary_bert import GTE, JINA_V3, NOMIC_BERT
from longspan.models.family import Family

FAMILIES: tuple[Family, ...] = (
    *(BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, LONGFORMER, BIG_BIRD),
    *(MODERNBERT, EUROBERT, NOMIC_BERT, GTE, JINA_V3, EMBEDDING_GEMMA),
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3),
)

# Types of models that Longspan does not support, and what it lacks for them.
EMBEDDING_GEMMA_2 = (
    "the layers of Gemma 4: residual signals per layer (`hidden_size_per_layer_input`), a factor per layer "
    "(`layer_scalar`), normalised values, and full layers with other numbers and sizes of heads. Its `sliding_window` "
    "is the number of keys on each side of a query, not twice that number as in EmbeddingGemma"
)
UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("embedding_gemma2", "embedding_gemma2_text"), EMBEDDING_GEMMA_2),
}
