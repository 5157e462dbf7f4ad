"""Hugging Face checkpoints: read them, write them, and make a long-document model of a short one.

Nothing here needs `transformers` or `torch`, and nothing downloads: a checkpoint is a directory with a `config.json`
and a `model.safetensors`.

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

# ruff: noqa: E402 - without Flax no import below would get far, and its error would not say what to install.

from longspan.optional import needs

needs(__name__, "flax", extra="hf")
needs(__name__, "safetensors", extra="hf")

from longspan.hf.extend import extend as extend
from longspan.hf.load import load as load
from longspan.hf.save import save as save
