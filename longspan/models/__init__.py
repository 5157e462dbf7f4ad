"""Encoders (BERT, RoBERTa, Longformer, BigBird, ModernBERT, …) and decoders (Llama, Mistral, Qwen, Gemma, Phi-3).

A model is a config and a task; `longspan.hf` reads and writes both.

Example:
    >>> from flax import nnx
    >>> from longspan import models
    >>> config = models.LongformerConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
    >>> model = models.SequenceClassifier(config, rngs=nnx.Rngs(0))
    >>> models.compiled(model)(jnp.array([[0, 7, 5, 2]])).logits.shape
    (1, 2)
"""

# ruff: noqa: E402 - the check comes first: without Flax the imports below would fail with a less helpful error.

from longspan.optional import needs as _needs

_needs(__name__, "flax", extra="flax")

from longspan.models.compiled import compiled as compiled
from longspan.models.decoders.cache import DecoderCache as DecoderCache
from longspan.models.decoders.causal_lm import CausalLM as CausalLM
from longspan.models.decoders.gemma2 import Gemma2Config as Gemma2Config
from longspan.models.decoders.gemma3 import Gemma3Config as Gemma3Config
from longspan.models.decoders.gpt_oss import GptOssConfig as GptOssConfig
from longspan.models.decoders.granite import GraniteConfig as GraniteConfig
from longspan.models.decoders.llama import LlamaConfig as LlamaConfig
from longspan.models.decoders.ministral import MinistralConfig as MinistralConfig
from longspan.models.decoders.ministral3 import Ministral3Config as Ministral3Config
from longspan.models.decoders.mistral import MistralConfig as MistralConfig
from longspan.models.decoders.mixtral import MixtralConfig as MixtralConfig
from longspan.models.decoders.olmo2 import Olmo2Config as Olmo2Config
from longspan.models.decoders.olmo3 import Olmo3Config as Olmo3Config
from longspan.models.decoders.phi3 import Phi3Config as Phi3Config
from longspan.models.decoders.qwen2 import Qwen2Config as Qwen2Config
from longspan.models.decoders.qwen3 import Qwen3Config as Qwen3Config
from longspan.models.decoders.qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from longspan.models.decoders.smollm3 import SmolLM3Config as SmolLM3Config
from longspan.models.embedder import Embedder as Embedder
from longspan.models.encoders.bert import BertConfig as BertConfig
from longspan.models.encoders.bigbird import BigBirdConfig as BigBirdConfig
from longspan.models.encoders.embedding_gemma import EmbeddingGemmaConfig as EmbeddingGemmaConfig
from longspan.models.encoders.encoder import Encoder as Encoder
from longspan.models.encoders.eurobert import EuroBertConfig as EuroBertConfig
from longspan.models.encoders.longformer import LongformerConfig as LongformerConfig
from longspan.models.encoders.modernbert import ModernBertConfig as ModernBertConfig
from longspan.models.encoders.roberta import CamembertConfig as CamembertConfig
from longspan.models.encoders.roberta import RobertaConfig as RobertaConfig
from longspan.models.encoders.roberta import XLMRobertaConfig as XLMRobertaConfig
from longspan.models.encoders.rotary_bert import GteConfig as GteConfig
from longspan.models.encoders.rotary_bert import JinaEmbeddingsV3Config as JinaEmbeddingsV3Config
from longspan.models.encoders.rotary_bert import NomicBertConfig as NomicBertConfig
from longspan.models.encoders.tasks import MaskedLM as MaskedLM
from longspan.models.encoders.tasks import Model as Model
from longspan.models.encoders.tasks import QuestionAnswering as QuestionAnswering
from longspan.models.encoders.tasks import SequenceClassifier as SequenceClassifier
from longspan.models.encoders.tasks import TokenClassifier as TokenClassifier
from longspan.models.output import Output as Output
from longspan.models.pooling import DenseLayer as DenseLayer
from longspan.models.pooling import Normalize as Normalize
from longspan.models.pooling import Pooling as Pooling
