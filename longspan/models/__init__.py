"""Encoders for long documents, and the ones they grew from: Longformer, BigBird, BERT, RoBERTa.

A model is a config and a task; `longspan.hf` reads and writes both.

Example:
    >>> from flax import nnx
    >>> from longspan import models
    >>> config = models.LongformerConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
    >>> model = models.SequenceClassifier(config, rngs=nnx.Rngs(0))
    >>> nnx.jit(model)(jnp.array([[0, 7, 5, 2]])).logits.shape
    (1, 2)
"""

from longspan.models.config import BertConfig as BertConfig
from longspan.models.config import BigBirdConfig as BigBirdConfig
from longspan.models.config import LongformerConfig as LongformerConfig
from longspan.models.config import RobertaConfig as RobertaConfig
from longspan.models.encoder import Encoder as Encoder
from longspan.models.heads import MaskedLM as MaskedLM
from longspan.models.heads import Model as Model
from longspan.models.heads import QuestionAnswering as QuestionAnswering
from longspan.models.heads import SequenceClassifier as SequenceClassifier
from longspan.models.heads import TokenClassifier as TokenClassifier
from longspan.models.output import Output as Output
