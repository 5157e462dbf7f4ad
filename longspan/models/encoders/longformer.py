"""Longformer (arXiv:2004.05150): windows, and global tokens with projections of their own."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, ClassVar, SupportsIndex

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longspan.masks import Full, Segments, Window
from longspan.models.encoders.attention import FullAttention, Site, Tokens
from longspan.models.encoders.bert import BODY, ENCODER, QUESTION_ANSWERING, TOKEN_CLASSIFIER
from longspan.models.encoders.family import NULL, OURS, EncoderFamily, refuse_decoders
from longspan.models.encoders.roberta import MASKED_LM, SEQUENCE_CLASSIFIER, RobertaConfig, RobertaEmbeddings
from longspan.models.fields import MOST, check_counts, is_count
from longspan.models.layers import linear
from longspan.patterns import longformer_attention

# Up to so many global tokens in a row of the batch, not every token is projected for them.
FEW = 8


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(RobertaConfig):
    """A Longformer encoder: windows, and global tokens with projections of their own; defaults are longformer-base.

    Args:
        window: keys seen on each side, one int or one per layer. Hugging Face's `attention_window` is twice that.
        sep_token_id: ends the question in `QuestionAnswering`, whose tokens are global by default.

    Example:
        >>> from longspan import models
        >>> models.LongformerConfig(num_hidden_layers=3, window=256).windows
        (256, 256, 256)
    """

    max_position_embeddings: int = 4098
    sep_token_id: int = field(default=2, metadata=NULL)
    window: SupportsIndex | Iterable[SupportsIndex] = field(default=256, metadata=OURS)

    model_type: ClassVar[str] = "longformer"

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, "sep_token_id", least=0)
        # Ints that hash, whatever kind of number or list they came as.
        window = tuple(map(index, self.window)) if isinstance(self.window, Iterable) else index(self.window)
        object.__setattr__(self, "window", window)
        counts = isinstance(window, int) or len(window) == self.num_hidden_layers
        if not counts or not all(0 <= w <= MOST for w in (window if isinstance(window, tuple) else (window,))):
            raise ValueError(
                f"`window` must be an int from 0 to {MOST}, or one for each of the {self.num_hidden_layers} layers, "
                f"got {self.window!r:.200}."
            )

    @property
    def family(self) -> EncoderFamily:
        return LONGFORMER

    def rule(self, layer: int) -> str:
        return f"longformer({self.windows[layer]})"

    @property
    def windows(self) -> tuple[int, ...]:
        window: Any = self.window
        return (window,) * self.num_hidden_layers if isinstance(window, int) else window


class LongformerAttention(FullAttention):
    """A window around every token, and global tokens that see and are seen by all, with their own projections."""

    has_globals = True

    def __init__(self, config: LongformerConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(config, **kinds)
        self.query_global = linear(config, config.hidden_size, config.hidden_size, **kinds)
        self.key_global = linear(config, config.hidden_size, config.hidden_size, **kinds)
        self.value_global = linear(config, config.hidden_size, config.hidden_size, **kinds)

    def tokens(self, seq_len, valid, global_attention_mask, attention_type):
        self.refuse(attention_type=attention_type)
        is_global = None if global_attention_mask is None else jnp.asarray(global_attention_mask).astype(bool)
        return Tokens(valid=valid, is_global=is_global)

    def sites(self, seq_len, tokens):
        return [(len(list(run)), Site(window=window)) for window, run in itertools.groupby(self.config.windows)]

    def attend(self, x, q, k, v, tokens, site, dropout):
        valid = tokens.valid
        if tokens.is_global is None:
            # One call instead of two, and no global projections.
            padding = Full() if valid is None else Segments(jnp.where(valid, 0, -1))
            window: Any = site.window
            return tokens.sharding.attention(q, k, v, mask=Window(window, window) & padding, **dropout)
        is_global = tokens.is_global if valid is None else tokens.is_global & valid
        kinds = is_global.astype(jnp.int32)
        kinds = kinds if valid is None else jnp.where(valid, kinds, -1)
        options: dict[str, Any] = dict(window=site.window, token_kinds=kinds, **dropout, **tokens.sharding.options)

        def many():
            projections = (self.heads(p(x)) for p in (self.query_global, self.key_global, self.value_global))
            return longformer_attention(q, k, v, *projections, **options)

        def few():
            rows = self.global_rows(x, is_global, valid)
            # The rows of global tokens, computed here from q, k and v, are replaced: they are as few as the tokens.
            return jnp.where(is_global[..., None, None], rows, longformer_attention(q, k, v, q, k, v, **options))

        if dropout or tokens.sharding.mesh is not None:
            return many()
        return jax.lax.cond(is_global.sum(1).max() <= FEW, few, many)

    def global_rows(self, x, is_global, valid) -> Float[Array, "B T N H"]:
        """What at most `FEW` global tokens per row attend to; elsewhere 0.

        Their queries go through the key projection, q·(K x) = (Kᵀq)·x, and what they read through the value projection,
        Σ p (V x) = V (Σ p x), so that not every token has to: for one global token in 4096 that is 1/100 of the work.
        The keys' bias is the same for all keys of a query, and a softmax does not see it.
        """
        (B, T, D), N = x.shape, self.config.num_attention_heads
        # Weights of padding are 0, but 0 * NaN would not be.
        x = x if valid is None else jnp.where(valid[..., None], x, 0)
        G = min(FEW, T)
        place = jnp.argsort(~is_global, axis=1, stable=True)[:, :G]
        there = jnp.take_along_axis(is_global, place, axis=1)
        key, value = (p.kernel[...].astype(x.dtype).reshape(D, N, D // N) for p in (self.key_global, self.value_global))
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        queries = self.heads(self.query_global(jnp.take_along_axis(x, place[..., None], axis=1)))
        queries = jnp.einsum("bgnh,dnh->bgnd", queries, key) * jnp.asarray((D // N) ** -0.5, x.dtype)
        scores = jnp.einsum("bgnd,btd->bgnt", queries, x, preferred_element_type=wide)
        if valid is not None:
            # Finite: a row of padding alone has no global token, and its weights, whatever they are, go nowhere.
            scores = jnp.where(valid[:, None, None], scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        read = jnp.einsum("bgnt,btd->bgnd", weights, x)
        rows = jnp.einsum("bgnd,dnh->bgnh", read, value)
        bias: Any = self.value_global.bias
        rows = rows + bias[...].astype(x.dtype).reshape(1, 1, N, D // N)
        target = jnp.where(there, place, T)
        # By heads, not [B, T, D]: `cond` keeps residuals of one shape of both branches in one place, and x, which is in
        # the other branch's, would be split as these are. Row by row, so that rows stay on their devices. Added, if to
        # nothing: the gradient of `set` asks which of several rows was the last.
        empty = jnp.zeros((B, T, *rows.shape[2:]), rows.dtype)
        return jax.vmap(lambda empty, at, rows: empty.at[at].add(rows, mode="drop"))(empty, target, rows)


def _read(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`window` from `attention_window`: Hugging Face counts the keys of a window on both sides."""
    refuse_decoders(raw, where)
    given = raw["attention_window"]
    windows = given if isinstance(given, list) else [given]
    layers = raw.get("num_hidden_layers", LongformerConfig.num_hidden_layers)
    per_layer = not isinstance(given, list) or not is_count(layers) or len(given) == layers
    if not per_layer or not all(is_count(w, 2) and w % 2 == 0 for w in windows):
        raise ValueError(
            f"{where} has attention_window={given!r:.200}, which must be even, half on each side: one int from 2 to "
            f"{MOST - 1}, or a list of them, one for each of num_hidden_layers={layers!r:.200}."
        )
    return dict(window=tuple(w // 2 for w in windows) if isinstance(given, list) else given // 2)


def _write(config: LongformerConfig) -> dict[str, Any]:
    if min(config.windows) < 1:
        raise ValueError(
            f"window={config.window!r}: Hugging Face's `attention_window` cannot be 0. Save a model whose windows "
            "are at least 1."
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
    spelled_otherwise=("attention_window",),
    read=_read,
    write=_write,
    embeddings=RobertaEmbeddings,
    attention=LongformerAttention,
    lm_activation="gelu",
)
