"""Hugging Face checkpoints: load them, save them, and extend a BERT or RoBERTa to long documents.

A checkpoint is a directory with a `config.json` and a `model.safetensors`. Nothing here needs `transformers` or
`torch`, and nothing downloads.

Example:
    >>> import tempfile
    >>> from flax import nnx
    >>> from longspan import hf, models
    >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
    >>> short = models.Encoder(config, rngs=nnx.Rngs(0))
    >>> long = hf.extend(short, max_positions=4096, window=256)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     hf.save(long, directory)
    ...     type(hf.load(directory).config).__name__
    'LongformerConfig'
"""

# ruff: noqa: E402 - the checks come first: without Flax the imports below would fail with a less helpful error.

from longspan.optional import needs as _needs

_needs(__name__, "flax", extra="hf")
_needs(__name__, "safetensors", extra="hf")

from longspan.hf.embedder import load_embedder as load_embedder
from longspan.hf.extend import extend as extend
from longspan.hf.load import load as load
from longspan.hf.save import save as save
