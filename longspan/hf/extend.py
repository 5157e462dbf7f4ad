"""`extend`: turns a BERT or RoBERTa into a Longformer for long documents."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from longspan.models import CausalLM, Encoder, LongformerConfig, MaskedLM, Model, QuestionAnswering, SequenceClassifier
from longspan.models.activations import ACTIVATIONS
from longspan.models.encoders.longformer import LONGFORMER
from longspan.models.families import FAMILIES

# Keys of a `config.json` that may repeat the maximum length.
LIMIT_KEYS = ("max_length", "max_seq_length", "model_max_length")


def extend(
    model: Encoder | Model | CausalLM,
    max_positions: int = 4096,
    window: int = 256,
    *,
    sep_token_id: int | None = None,
) -> Encoder | Model:
    """A Longformer with a BERT's or RoBERTa's parameters: the recipe of the Longformer paper (arXiv:2004.05150, §5).

    The table of positions is repeated until it has `max_positions` rows, and the projections of global tokens start as
    copies of the local ones. Texts shorter than the old table and the window keep their encodings exactly if padding
    is on the right, because a Longformer counts positions like RoBERTa, without padding. Longer texts work without
    training and improve with some. `save` writes the new maximum length into the tokenizer's files too, so that
    tokenizers do not truncate documents at the old one.

    Args:
        model: a BERT, RoBERTa, XLM-RoBERTa or CamemBERT with any head; it is not changed.
        max_positions: the maximum number of tokens of the new model.
        window: the number of keys on each side of a token.
        sep_token_id: the token that ends the question in `QuestionAnswering`; by default the one in the model's config.

    Example:
        >>> from flax import nnx
        >>> from longspan import hf, models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> long = hf.extend(models.Encoder(config, rngs=nnx.Rngs(0)), max_positions=1000, window=100)
        >>> long(jnp.ones((1, 1000), int)).last_hidden_state.shape
        (1, 1000, 6)
    """
    old = model.config
    if isinstance(model, CausalLM) or not old.family.extendable:
        names = [family.model_type for family in FAMILIES if family.extendable]
        raise ValueError(
            f"`extend` turns a {', '.join(names[:-1])} or {names[-1]} model into a Longformer, got a {old.model_type}. "
            "Load a model of one of these families."
        )
    if max_positions < old.max_tokens:
        raise ValueError(
            f"max_positions={max_positions} must be at least {old.max_tokens}, the number of positions of the model."
        )
    if isinstance(model, MaskedLM):
        _check_activation(old)
    config = _config(old, max_positions, window, _separator(model, sep_token_id))
    long = nnx.eval_shape(lambda: type(model)(config, **_options(model), rngs=nnx.Rngs(0)))
    state, values = nnx.state(long, nnx.Param), _values(model, config)
    for path, variable in nnx.to_flat_state(state):
        # Copies, because training one of the models must not change the other. `jnp.array` would compile per shape.
        variable.set_value(jax.device_put(values[tuple(path)], may_alias=False))
    nnx.update(long, state)
    long.set_attributes(source=model.source)
    return long


def _check_activation(old) -> None:
    """Raises unless a masked-LM head has the same activation in a Longformer."""
    expected = LONGFORMER.lm_activation or old.hidden_act
    given = old.family.lm_activation or old.hidden_act
    if ACTIVATIONS[given] is not ACTIVATIONS[expected]:
        raise ValueError(
            f"A Longformer's masked-LM head has the activation {expected!r}, but this model's head has {given!r}. "
            "Extend only the encoder: `extend(model.encoder)`."
        )


def _separator(model, given: int | None) -> int:
    extra = json.loads(model.config.extra)
    candidates = [given, extra.get("sep_token_id"), extra.get("eos_token_id"), model.config.family.separator]
    found = [number for number in candidates if isinstance(number, int)]
    if found:
        return found[0]
    if isinstance(model, QuestionAnswering):
        raise ValueError(
            "This BERT's config has no token that separates question and text. A Longformer needs this token to find "
            "the global tokens. Pass `sep_token_id`, the tokenizer's [SEP] (102 in the original BERTs)."
        )
    return LongformerConfig.sep_token_id


def _config(old, max_positions: int, window: int, sep: int) -> LongformerConfig:
    shared = {f.name: getattr(old, f.name) for f in dataclasses.fields(old)}
    extra = json.loads(old.extra)
    extra.pop("sep_token_id", None)
    for key in LIMIT_KEYS:
        if extra.get(key) in (old.max_tokens, old.max_position_embeddings):
            extra[key] = max_positions
    first = old.pad_token_id + 1
    changes = dict(max_position_embeddings=max_positions + first, extra=json.dumps(extra), sep_token_id=sep)
    return LongformerConfig(**{**shared, **changes, "window": window})


def _options(model) -> dict:
    encoder = model if isinstance(model, Encoder) else model.encoder
    # In a Longformer's sequence classifier, BERT's pooler is the first layer of the head.
    pooled = encoder.pooler is not None and not isinstance(model, SequenceClassifier)
    return dict(pooler=pooled, dtype=model.dtype, param_dtype=encoder.embeddings.word.param_dtype)


def _values(model, config: LongformerConfig) -> dict:
    """The new model's parameters by path."""
    old: Any = model.config
    flat = {tuple(path): variable[...] for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    body = () if isinstance(model, Encoder) else ("encoder",)
    values = dict(flat)
    for path, value in flat.items():
        if path[-3:-1] in {("attention", name) for name in ("query", "key", "value")}:
            values[(*path[:-2], f"{path[-2]}_global", path[-1])] = value
    table = (*body, "embeddings", "position", "embedding")
    values[table] = _tile(flat[table], old.first_position, config)
    if isinstance(model, SequenceClassifier) and model.config.family.classifier_reads_pooler:
        for name in ("kernel", "bias"):
            values[("dense", name)] = values.pop(("encoder", "pooler", name))
    return values


def _tile(table, first: int, config: LongformerConfig):
    """The rows of the table from `first`, repeated, after the rows that a Longformer reserves for padding."""
    rows, wanted = table[first:], config.max_position_embeddings - config.first_position
    repeated = jnp.tile(rows, (-(-wanted // rows.shape[0]), 1))[:wanted]
    if first == config.first_position:
        padding_rows = table[:first]
    else:
        padding_rows = jnp.zeros((config.first_position, table.shape[1]), table.dtype)
    return jnp.concatenate([padding_rows, repeated])
