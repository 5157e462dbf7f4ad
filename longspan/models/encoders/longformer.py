"""Longformer (arXiv:2004.05150): windows, and global tokens with their own projections."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, ClassVar, SupportsIndex

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longspan.masks import Mask, Segments, Window
from longspan.models.encoders.attention import EncoderTokens, FullAttention, LayerOptions
from longspan.models.encoders.bert import BODY, ENCODER, QUESTION_ANSWERING, TOKEN_CLASSIFIER
from longspan.models.encoders.encoder import stack_layers
from longspan.models.encoders.family import NOT_IN_JSON, NULLABLE, EncoderFamily, check_is_encoder
from longspan.models.encoders.roberta import MASKED_LM, SEQUENCE_CLASSIFIER, RobertaConfig, RobertaEmbeddings
from longspan.models.fields import MAX_INT32, check_counts, is_count
from longspan.models.layers import linear
from longspan.patterns import longformer_attention

FEW_GLOBALS = 8  # up to this number of global tokens per batch row, `global_rows` avoids projecting all tokens


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(RobertaConfig):
    """A Longformer encoder: windows, and global tokens with their own projections. The defaults are longformer-base.

    Args:
        window: the number of keys on each side of a query, one int or one per layer. Hugging Face's `attention_window`
            is twice that.
        sep_token_id: the token that ends the question in `QuestionAnswering`. Question tokens are global by default.

    Example:
        >>> from longspan import models
        >>> models.LongformerConfig(num_hidden_layers=3, window=256).windows
        (256, 256, 256)
    """

    max_position_embeddings: int = 4098
    sep_token_id: int = field(default=2, metadata=NULLABLE)
    window: SupportsIndex | Iterable[SupportsIndex] = field(default=256, metadata=NOT_IN_JSON)

    model_type: ClassVar[str] = "longformer"

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, "sep_token_id", minimum=0)
        # Python ints in a tuple, which hash.
        if isinstance(self.window, Iterable):
            window = windows = tuple(map(index, self.window))
            is_valid = len(windows) == self.num_hidden_layers
        else:
            window = index(self.window)
            windows, is_valid = (window,), True
        object.__setattr__(self, "window", window)
        if not is_valid or not all(0 <= w <= MAX_INT32 for w in windows):
            raise ValueError(
                f"`window` must be an int from 0 to {MAX_INT32}, or one for each of the {self.num_hidden_layers} "
                f"layers, got {self.window!r:.200}."
            )

    @property
    def family(self) -> EncoderFamily:
        return LONGFORMER

    def rule(self, layer: int) -> str:
        return f"longformer({self.windows[layer]})"

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer."""
        window: Any = self.window
        if isinstance(window, int):
            return (window,) * self.num_hidden_layers
        return window


class LongformerAttention(FullAttention):
    """A window around every token, and global tokens, which attend to all and are attended to by all.

    Global queries have their own projections of queries, keys and values.
    """

    has_globals = True
    packs = False

    def __init__(self, config: LongformerConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(config, **options)
        self.query_global = linear(config, config.hidden_size, config.hidden_size, **options)
        self.key_global = linear(config, config.hidden_size, config.hidden_size, **options)
        self.value_global = linear(config, config.hidden_size, config.hidden_size, **options)

    def tokens(self, call):
        self.check_unused(attention_type=call.attention_type, segment_ids=call.segments)
        is_global = None
        if call.global_attention_mask is not None:
            is_global = jnp.asarray(call.global_attention_mask).astype(bool)
        return EncoderTokens(valid=call.valid, is_global=is_global)

    def layer_groups(self, length, tokens):
        groups = itertools.groupby(self.config.windows)
        return [(len(list(group)), LayerOptions(window=window)) for window, group in groups]

    def attend(self, x, q, k, v, tokens, layer, dropout):
        if tokens.is_global is None:
            return self.attend_locally(q, k, v, tokens, layer, dropout)
        valid, is_global = tokens.valid, tokens.is_global
        if valid is not None:
            is_global = is_global & valid
        token_kinds = is_global.astype(jnp.int32)
        if valid is not None:
            token_kinds = jnp.where(valid, token_kinds, -1)
        options: dict[str, Any] = dict(window=layer.window, token_kinds=token_kinds, **dropout)
        options |= tokens.sharding.options

        def project_all():
            q_global, k_global = self.heads(self.query_global(x)), self.heads(self.key_global(x))
            v_global = self.heads(self.value_global(x))
            return longformer_attention(q, k, v, q_global, k_global, v_global, **options)

        def project_few():
            rows = self.global_rows(x, is_global, valid)
            # The local projections stand in for the global ones: the rows of global tokens are replaced anyway.
            return jnp.where(is_global[..., None, None], rows, longformer_attention(q, k, v, q, k, v, **options))

        if dropout or tokens.sharding.mesh is not None:
            return project_all()
        return jax.lax.cond(is_global.sum(1).max() <= FEW_GLOBALS, project_few, project_all)

    def attend_locally(self, q, k, v, tokens, layer, dropout) -> Any:
        """Attention without global tokens: one call instead of two, and no global projections."""
        mask: Mask = Window(layer.window, layer.window)
        if tokens.valid is not None:
            mask = mask & Segments(jnp.where(tokens.valid, 0, -1))
        return tokens.sharding.attention(q, k, v, mask=mask, **dropout)

    def global_rows(self, x, is_global, valid) -> Float[Array, "B T N H"]:
        """The outputs of at most `FEW_GLOBALS` global tokens per batch row; 0 for other tokens.

        Not every token is projected to a key and a value. The queries are multiplied by the key matrix instead,
        q·(K x) = (Kᵀq)·x, and the weighted sums by the value matrix, Σ p (V x) = V (Σ p x). For one global token in
        4096 that is 1/100 of the work. The bias of the keys adds the same number to all scores of a query, which a
        softmax ignores.
        """
        (B, T, D), N = x.shape, self.config.num_attention_heads
        if valid is not None:
            # The weights of padding are 0, but 0 * NaN is NaN.
            x = jnp.where(valid[..., None], x, 0)
        # The slots of the global tokens come first in this order; the others are dropped at the end.
        slots = jnp.argsort(~is_global, axis=1, stable=True)[:, : min(FEW_GLOBALS, T)]
        is_used = jnp.take_along_axis(is_global, slots, axis=1)
        key: Any = self.key_global.kernel[...].astype(x.dtype).reshape(D, N, D // N)
        value: Any = self.value_global.kernel[...].astype(x.dtype).reshape(D, N, D // N)
        bias: Any = self.value_global.bias
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        queries = self.heads(self.query_global(jnp.take_along_axis(x, slots[..., None], axis=1)))
        queries = jnp.einsum("bgnh,dnh->bgnd", queries, key) * jnp.asarray((D // N) ** -0.5, x.dtype)
        scores = jnp.einsum("bgnd,btd->bgnt", queries, x, preferred_element_type=wide)
        if valid is not None:
            # Finite, not -inf: a batch row of padding would give NaN. It has no global token, so its rows are dropped.
            scores = jnp.where(valid[:, None, None], scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        means = jnp.einsum("bgnt,btd->bgnd", weights, x)
        rows = jnp.einsum("bgnd,dnh->bgnh", means, value) + bias[...].astype(x.dtype).reshape(1, 1, N, D // N)
        target = jnp.where(is_used, slots, T)  # T: dropped
        # [B, T, N, H], not [B, T, D]: `cond` stores residuals of equal shape of both branches in one buffer, and x, a
        # residual of the other branch, would be sharded like these rows. `vmap` keeps batch rows on their devices.
        # `add`, not `set`: the gradient of `set` has to find out which of several rows was written last.
        empty = jnp.zeros((B, T, *rows.shape[2:]), rows.dtype)
        return jax.vmap(lambda empty, at, rows: empty.at[at].add(rows, mode="drop"))(empty, target, rows)


def _read(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`window` from `attention_window`: Hugging Face counts the keys on both sides."""
    check_is_encoder(raw, where)
    given = raw["attention_window"]
    is_list = isinstance(given, list)
    windows = given if is_list else [given]
    layers = raw.get("num_hidden_layers", LongformerConfig.num_hidden_layers)
    has_all_layers = not is_list or not is_count(layers) or len(given) == layers
    if not has_all_layers or not all(is_count(w, 2) and w % 2 == 0 for w in windows):
        raise ValueError(
            f"{where} has attention_window={given!r:.200}. A window must be even, because one half of it is on each "
            f"side of the query. Give one even int from 2 to {MAX_INT32 - 1}, or a list of such ints, one for each of "
            f"num_hidden_layers={layers!r:.200} layers."
        )
    if is_list:
        return dict(window=tuple(w // 2 for w in windows))
    return dict(window=given // 2)


def _write(config: LongformerConfig) -> dict[str, Any]:
    if min(config.windows) < 1:
        raise ValueError(
            f"window={config.window!r} cannot be saved: Hugging Face's `attention_window` must be positive. Save a "
            "model whose windows are at least 1."
        )
    return dict(attention_window=[2 * w for w in config.windows])


LONGFORMER = EncoderFamily(
    config=LongformerConfig,
    name="Longformer",
    prefix="longformer.",
    names=BODY,
    tasks=(ENCODER, MASKED_LM, SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, QUESTION_ANSWERING),
    defaults=dict(
        vocab_size=30522, max_position_embeddings=512, type_vocab_size=2, layer_norm_eps=1e-12, attention_window=512
    ),
    renamed_keys=("attention_window",),
    read=_read,
    write=_write,
    embeddings=RobertaEmbeddings,
    attention=LongformerAttention,
    stack=stack_layers,
    lm_activation="gelu",
)
