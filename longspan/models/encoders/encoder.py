"""`Encoder`: the embeddings, layers and pooler of all encoder families."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from longspan.array_types import Array as AnyArray
from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.masks import positions_from_segments
from longspan.models.activations import ACTIVATIONS
from longspan.models.encoders.attention import EncoderCall, EncoderTokens, LayerOptions, segments_of
from longspan.models.encoders.family import EncoderConfig
from longspan.models.encoders.inputs import check_inputs
from longspan.models.explicit_axes import accepts_explicit_axes
from longspan.models.layers import LayerNorm, by_pieces, dropout, embed, linear
from longspan.models.output import Output
from longspan.models.rngs import Rngs, check_call_rngs, check_rngs, dropout_stream, next_key
from longspan.parallel.sequence_sharding import SequenceSharding


class Encoder(nnx.Module):
    """An encoder, for example a BERT, a Longformer or a ModernBERT. The config decides the family.

    Args:
        config: for example a `BertConfig` or a `ModernBertConfig`.
        pooler: whether there is a pooler, which computes `pooler_output`; by default as in Hugging Face.
        dtype: the dtype of the computation; softmax and layer-norm statistics are at least float32.
        param_dtype: the dtype of the parameters.
        rngs: random keys for the initial parameters. Dropout uses the `rngs` of a call.

    Attributes:
        deterministic: whether calls skip dropout by default; `train()` and `eval()` set it.
        source: the directory that `hf.load` read the model from, where `hf.save` finds its tokenizer; otherwise None.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.LongformerConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> encoder = models.Encoder(config, rngs=nnx.Rngs(0))
        >>> encoder(jnp.array([[0, 7, 5, 2, 1]]), attention_mask=jnp.array([[1, 1, 1, 1, 0]])).last_hidden_state.shape
        (1, 5, 6)
    """

    task: ClassVar[str] = "encoder"  # its name in `hf.load`
    suffixes: ClassVar[tuple[str, ...]] = ("Model",)  # of Hugging Face's class names, which start with the family

    def __init__(
        self,
        config: EncoderConfig,
        *,
        pooler: bool | None = None,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_rngs(rngs)
        if pooler is None:
            pooler = config.family.has_pooler and config.family.default_pooler
        if pooler and not config.family.has_pooler:
            raise ValueError(f"`pooler=True` was given, but a {config.model_type} has no pooler. Leave it out.")
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.deterministic = True
        self.source: str | None = None
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.embeddings = config.family.embeddings(config, **options)
        self.layers = config.family.stack(config, **options)
        if pooler:
            self.pooler = linear(config, config.hidden_size, config.hidden_size, **options)
        else:
            self.pooler = nnx.data(None)

    def __call__(
        self,
        input_ids: Int[AnyArray, "B T"] | None = None,
        attention_mask: Shaped[AnyArray, "B T"] | None = None,
        token_type_ids: Int[AnyArray, "B T"] | None = None,
        global_attention_mask: Shaped[AnyArray, "B T"] | None = None,
        position_ids: Int[AnyArray, "B_or_1 T"] | None = None,
        inputs_embeds: Float[AnyArray, "B T D"] | None = None,
        deterministic: bool | None = None,
        *,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        attention_type: str | None = None,
        remat: bool = False,
        rngs: Rngs | None = None,
        mesh: Any = None,
        axis: str = "sp",
        order: str = "contiguous",
        batch_axes: str | Sequence[str] = BATCH_AXES,
        head_axis: str | None = HEAD_AXIS,
    ) -> Output:
        """Encodes token ids or word embeddings.

        Ids outside of their tables raise an error. Traced ids cannot be checked and give NaN instead.

        Args:
            input_ids: token ids.
            attention_mask: nonzero for tokens, 0 for padding; bools, ints or floats.
            token_type_ids: the token type of each token; 0 by default. Not in models without a table of token types.
            global_attention_mask: nonzero for global tokens. Longformer only.
            position_ids: rows of the position table, or the positions of the rotations in models that rotate queries
                and keys. By default they are counted, in RoBERTa and Longformer without padding.
            inputs_embeds: word embeddings instead of `input_ids`.
            deterministic: False turns dropout on. The default is the model's `deterministic`, which `model.train()`
                and `model.eval()` set and which is True at first.
            segment_ids: the document of each token in packed rows, negative for padding. Tokens attend to their own
                document only, and rows of the position table are counted from the start of each document. The
                `pooler_output` is that of the first document. Not supported by Longformer and BigBird.
            attention_type: "block_sparse" or "original_full", overrides the config's. BigBird only.
            remat: whether the backward pass recomputes each layer instead of keeping its intermediate results.
            rngs: the random keys of dropout: an `nnx.Rngs` with the stream "dropout", a stream, or a JAX key. Inside
                `nnx.jit` and `nnx.grad` it must be an argument of the transformed function.
            mesh: shards the sequence over the devices of this mesh, as in `ls.parallel.attention`. By default every
                device has the whole sequence.
            axis: the mesh axis that shards the sequence.
            order: the order of the tokens on that axis, as in `ls.parallel.shard_batch`. Models with a table of
                positions need `position_ids` in every order except "contiguous".
            batch_axes: the mesh axes that shard the batch, as in `ls.parallel.attention`.
            head_axis: the mesh axis that shards the heads, likewise.
        """
        arrays: dict[str, Any] = dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            global_attention_mask=global_attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            segment_ids=segment_ids,
        )
        check_inputs(self.config, **arrays)
        check_call_rngs(rngs)
        if deterministic is None:
            deterministic = self.deterministic
        arrays["keys"] = _dropout_keys(self.config, deterministic, rngs)
        sharding = SequenceSharding(mesh, axis, order, batch_axes, head_axis)
        options: dict[str, Any] = dict(attention_type=attention_type, remat=remat, sharding=sharding)
        return self._forward(arrays, **options)

    @accepts_explicit_axes
    def _forward(
        self, input_ids, attention_mask, token_type_ids, global_attention_mask, position_ids, inputs_embeds,
        segment_ids, keys, *, attention_type: str | None, remat: bool, sharding: SequenceSharding,
    ) -> Output:  # fmt: skip
        embedding_key, layer_keys = keys or (None, None)
        attention, valid, segments = self.layers.attention, None, None
        if attention_mask is not None:
            valid = jnp.asarray(attention_mask).astype(bool)
        if segment_ids is not None:
            segments = segments_of(valid, segment_ids)
        T = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
        call = EncoderCall(T, valid, segments, position_ids, global_attention_mask, attention_type, sharding)
        tokens = dataclasses.replace(attention.tokens(call), sharding=sharding)
        if sharding.positions(T) is not None and position_ids is None and self.config.position_rows is not None:
            raise ValueError(
                f"`position_ids` is missing. order={sharding.order!r} moves tokens to other slots, so an encoder "
                "needs the position of each token. Pass `position_ids` in the same order as `input_ids`."
            )
        x = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, segments, dropout_key=embedding_key)
        x, tokens = attention.fit(x, tokens)
        x = self.layers.run(x, tokens, layer_keys, remat=remat)[:, :T]
        pooled = None
        if self.pooler is not None:
            first = x[:, 0]
            if self.config.position_rows is None:
                first = first_tokens(x, valid, sharding.positions(T))
            pooled = jnp.tanh(self.pooler(first))
        return Output(last_hidden_state=x, pooler_output=pooled)

    @property
    def _vocab_axes(self) -> Any:
        """The mesh axes that shard the vocabulary axis of the logits: none, an encoder has no logits."""
        return None


class Embeddings(nnx.Module):
    """The sum of word, position and token-type embeddings, normalised."""

    config: Any  # `Any`: subclasses read fields of their family

    def __init__(self, config: EncoderConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.word = embed(config, config.vocab_size, **options)
        self.position = embed(config, config.max_position_embeddings, **options)
        self.token_type = embed(config, config.token_types, **options)
        self.norm = LayerNorm(config, **options)

    def __call__(
        self, input_ids, token_type_ids, position_ids, inputs_embeds, segments, *, dropout_key
    ) -> Float[Array, "B T D"]:
        if inputs_embeds is None:
            word = self.word(jnp.asarray(input_ids, jnp.int32))
        else:
            word = jnp.asarray(inputs_embeds, self.word.dtype)
        if position_ids is None:
            position_ids = self.positions(input_ids, word.shape[1], segments)
        if token_type_ids is None:
            token_type_ids = jnp.zeros((1, 1), jnp.int32)
        x = self.scale(word) + self.token_type(jnp.asarray(token_type_ids, jnp.int32))
        x = x + self.position(jnp.asarray(position_ids, jnp.int32))
        return self.finish(x, dropout_key)

    def positions(self, input_ids, length: int, segments) -> jax.Array:
        """The default rows of the position table."""
        if segments is not None:
            return positions_from_segments(segments) + self.config.first_position
        return jnp.arange(length, dtype=jnp.int32)[None] + self.config.first_position

    def scale(self, word: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return word

    def finish(self, x: Float[Array, "B T D"], dropout_key) -> Float[Array, "B T D"]:
        return dropout(self.norm(x), self.config.hidden_dropout_prob, dropout_key)


class EncoderLayer(nnx.Module):
    """Self-attention and a feed-forward network, each added to its input and normalised afterwards.

    `stack_layers` makes all layers of an encoder as one such module, and `run` applies them.
    """

    config: Any  # `Any`: fields of `BertFields`

    def __init__(self, config: EncoderConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.attention = config.family.attention(config, **options)
        self.out = linear(config, config.hidden_size, config.hidden_size, **options)
        self.out_norm = LayerNorm(config, **options)
        self.feed_forward = FeedForward(config, **options)

    def __call__(
        self, x: Float[Array, "B T D"], tokens: EncoderTokens, layer: LayerOptions, dropout_key=None
    ) -> Float[Array, "B T D"]:
        attention_key = residual_key = mlp_key = None
        if dropout_key is not None:
            attention_key, residual_key, mlp_key = jax.random.split(dropout_key, 3)
        attended = self.out(self.attention(x, tokens, layer, attention_key))
        x = self.out_norm(dropout(attended, self.config.hidden_dropout_prob, residual_key) + x)
        return self.feed_forward(x, x, mlp_key)

    def run(self, x: Float[Array, "B T D"], tokens: EncoderTokens, keys, *, remat: bool) -> Float[Array, "B T D"]:
        """The output of all layers of a stack."""
        graph, parameters = nnx.split(self)
        return _run_layers(graph, remat, parameters, x, tokens, keys)


class FeedForward(nnx.Module):
    """norm(down(act(up(x))) + residual)."""

    config: Any

    def __init__(self, config: EncoderConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.up = linear(config, config.hidden_size, config.intermediate_size, **options)
        self.down = linear(config, config.intermediate_size, config.hidden_size, **options)
        self.norm = LayerNorm(config, **options)

    def __call__(self, x, residual, dropout_key=None) -> Float[Array, "B T D"]:
        activation = ACTIVATIONS[self.config.hidden_act]
        hidden = by_pieces(lambda x: self.down(activation(self.up(x))), x)
        return self.norm(dropout(hidden, self.config.hidden_dropout_prob, dropout_key) + residual)


def first_tokens(x: Float[Array, "B T D"], valid, positions) -> Float[Array, "B D"]:
    """The first token of each row that is not padding; the first slot of a row of padding alone."""
    if valid is None:
        return x[:, 0]
    if positions is None:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    first = jnp.argmin(jnp.where(valid, positions[None], x.shape[1]), axis=1)
    return jnp.take_along_axis(x, first[:, None, None], axis=1)[:, 0]


def stack_layers(config: EncoderConfig, *, dtype, param_dtype, rngs: nnx.Rngs) -> EncoderLayer:
    """All layers as one module, whose parameters have the layers as their first axis."""

    @nnx.split_rngs(splits=config.num_hidden_layers)
    @nnx.vmap
    def make(rngs):
        return EncoderLayer(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    return make(rngs)


# Jitted here: a call outside of `jit` would otherwise compile the scan again, because its body is a new function.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_layers(graph, remat: bool, parameters, x, tokens: EncoderTokens, keys):
    """A scan over the layers, which compiles one of them. With `remat` only one is in memory in the backward pass."""

    def step(x, layer):
        parameters, key, options = layer
        return nnx.merge(graph, parameters)(x, tokens, options, key), None

    body = jax.checkpoint(step) if remat else step
    groups = nnx.merge(graph, parameters).attention.layer_groups(x.shape[1], tokens)
    start = 0
    for count, options in groups:
        scanned = parameters, keys
        if len(groups) > 1:
            scanned = jax.tree.map(operator.itemgetter(slice(start, start + count)), scanned)
        x, _ = jax.lax.scan(body, x, (*scanned, options))
        start += count
    return x


def uses_dropout(config: EncoderConfig, deterministic: bool) -> bool:
    """Whether a call of the encoder draws a random key, from which all its dropout keys are split."""
    return not deterministic and config.max_dropout > 0


def _dropout_keys(config: EncoderConfig, deterministic: bool, rngs: Rngs | None):
    """A key for the embeddings and one for each layer; None without dropout."""
    if not uses_dropout(config, deterministic):
        return None
    embedding_key, layers_key = jax.random.split(next_key(dropout_stream(rngs)))
    return embedding_key, jax.random.split(layers_key, config.num_hidden_layers)
