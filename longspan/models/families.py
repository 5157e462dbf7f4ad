"""The model families whose checkpoints Longspan loads."""

from collections.abc import Mapping

from longspan.models.decoders.gemma2 import GEMMA2
from longspan.models.decoders.gemma3 import GEMMA3
from longspan.models.decoders.gpt_oss import GPT_OSS
from longspan.models.decoders.granite import GRANITE
from longspan.models.decoders.llama import LLAMA
from longspan.models.decoders.ministral import MINISTRAL
from longspan.models.decoders.ministral3 import MINISTRAL3
from longspan.models.decoders.mistral import MISTRAL
from longspan.models.decoders.mixtral import MIXTRAL
from longspan.models.decoders.olmo2 import OLMO2
from longspan.models.decoders.olmo3 import OLMO3
from longspan.models.decoders.phi3 import PHI3
from longspan.models.decoders.qwen2 import QWEN2
from longspan.models.decoders.qwen3 import QWEN3
from longspan.models.decoders.qwen3_moe import QWEN3_MOE
from longspan.models.decoders.smollm3 import SMOLLM3
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
    *(MIXTRAL, QWEN3_MOE, GPT_OSS),
    *(SMOLLM3, OLMO2, OLMO3, GRANITE, MINISTRAL, MINISTRAL3),
)

# Types of models that Longspan does not support, and what it lacks for them.
GEMMA_4 = (
    "the layers of Gemma 4: residual signals per layer (`hidden_size_per_layer_input`), a factor per layer "
    "(`layer_scalar`), normalised values, and full layers with other numbers and sizes of heads"
)
EMBEDDING_GEMMA_2 = (
    f"{GEMMA_4}. Its `sliding_window` is the number of keys on each side of a query, not twice that number as in "
    "EmbeddingGemma"
)
LLAMA_4 = (
    "attention in chunks (`attention_chunk_size`), rotary positions whose pairs are neighbouring features, norms of "
    "rotated queries and keys, a factor of the queries in layers without rotary positions, and an expert that all "
    "tokens share"
)
COHERE_2 = (
    "layers with one LayerNorm whose attention and MLP are added at once, rotary positions whose pairs are "
    "neighbouring features, and a factor of the logits (`logit_scale`)"
)
STABLELM = (
    "decoders with LayerNorms, rotary positions for a part of a head's features in such a decoder, and the variants "
    "`use_parallel_residual` and `qk_layernorm`"
)
SEQ2SEQ = "decoders that attend to the output of an encoder, and beam search"
UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("embedding_gemma2", "embedding_gemma2_text"), EMBEDDING_GEMMA_2),
    **dict.fromkeys(("gemma4", "gemma4_text"), f"{GEMMA_4}, and layers that read the keys of earlier layers"),
    **dict.fromkeys(("llama4", "llama4_text"), LLAMA_4),
    "cohere2": COHERE_2,
    "starcoder2": "decoders with LayerNorms, and MLPs without a gate (`c_fc` and `c_proj`)",
    "stablelm": STABLELM,
    **dict.fromkeys(("led", "bigbird_pegasus"), SEQ2SEQ),
}
