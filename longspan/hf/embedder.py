"""`load_embedder`: reads a sentence-transformers directory."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from longspan.hf.config import config_of, read_content
from longspan.hf.load import checked_directory, load
from longspan.hf.sentence_modules import (
    SentenceModule,
    SentenceSettings,
    TransformerSettings,
    check_modules,
    listed_modules,
    read_modules,
    sentence_settings,
    transformer_settings,
)
from longspan.hf.tensors import CheckpointTensors
from longspan.hf.tokenizer import apply_settings, limits_of, mark_special, read_tokenizer
from longspan.models import CausalLM, Embedder, Pooling


def load_embedder(directory: str | os.PathLike, *, dtype: Any = None) -> Embedder:
    """Loads an embedder from a directory that sentence-transformers or `hf.save` wrote.

    Its `modules.json` lists a Transformer, a Pooling, and possibly Dense and Normalize. Longspan runs these modules
    with their settings, or raises an error that names what it does not support. A directory without `modules.json`
    gives the mean of the tokens, not normalised, as in sentence-transformers. The Transformer may be any encoder, or a
    decoder. Of a model with a head, only the encoder is loaded.

    Args:
        directory: the directory. It needs a `tokenizer.json`.
        dtype: the dtype of the model's computation, as in `hf.load`. The modules compute in float32.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from tokenizers import Tokenizer
        >>> from tokenizers.models import WordLevel
        >>> from longspan import hf, models
        >>> config = models.BertConfig(vocab_size=3, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> encoder, tokenizer = models.Encoder(config, rngs=nnx.Rngs(0)), Tokenizer(WordLevel(dict(a=0, b=1, c=2)))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     hf.save(models.Embedder(encoder, tokenizer), directory)
        ...     hf.load_embedder(directory)
        Embedder(bert, mean pooling, size=6, max_seq_length=512)
    """
    where = checked_directory(Path(directory), needs_config=False)
    modules = listed_modules(where)
    check_modules(where, modules)
    return _loaded(where, modules, None, dtype)


def load_pooled(directory: Path, modes: tuple[str, ...], *, dtype: Any = None) -> Embedder:
    """The embedder of a directory with another pooling instead of all of its modules after the Transformer."""
    return _loaded(directory, listed_modules(directory), modes, dtype)


def _loaded(where: Path, listed: list[SentenceModule] | None, modes: tuple[str, ...] | None, dtype: Any) -> Embedder:
    folder, settings, text = where, SentenceSettings({}), TransformerSettings()
    if listed:  # without `modules.json`, sentence-transformers reads none of these settings either
        settings = sentence_settings(where)
    if listed and listed[0].kind == "Transformer":
        folder = where / listed[0].folder
        text = transformer_settings(folder)
    checked_directory(folder)
    tokenizer = read_tokenizer(folder)
    mark_special(tokenizer, folder)
    apply_settings(tokenizer, folder)
    limits = limits_of(folder / "tokenizer.json")
    size = config_of(read_content(folder)).hidden_size
    modules: tuple[Any, ...] = (Pooling(size, modes or ("mean",)),)
    if listed is not None and modes is None:
        modules = read_modules(where, listed, size)
    model = _load_model(folder, dtype)
    embedder = Embedder(
        model,
        tokenizer,
        modules,
        prompts=settings.prompts,
        default_prompt_name=settings.default_prompt_name,
        max_seq_length=_limit(model, text.max_seq_length, limits.max_length),
        truncate_dim=settings.truncate_dim if modes is None else None,
        similarity_fn_name=settings.similarity_fn_name,
        truncation_side=limits.side,
        do_lower_case=text.lower_case,
    )
    embedder.source = str(folder.resolve())
    return embedder


def _load_model(folder: Path, dtype: Any) -> Any:
    content = read_content(folder)
    if not any(task.model is CausalLM for task in content.family.tasks):
        return load(folder, dtype=dtype, task="encoder")
    task, changes = content.family.tasks[0], None
    with ExitStack() as stack:
        if task.tied not in CheckpointTensors.open(folder, stack).where:
            # Embedders have no logits, and many files have no matrix for them, whatever their config says.
            changes = dict(tie_word_embeddings=True)
    return load(folder, dtype=dtype, task="causal_lm", config=changes)


def _limit(model: Any, own: int | None, of_tokenizer: int | None) -> int | None:
    """The number of tokens after which texts are truncated, as in sentence-transformers."""
    if own is not None:
        return own
    if of_tokenizer is None:
        return None
    longest = model.config.max_position_embeddings
    if not isinstance(model, CausalLM):
        longest = model.config.max_tokens
    return min(of_tokenizer, longest)
