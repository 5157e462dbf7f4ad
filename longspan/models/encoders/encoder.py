"""The encoder that all families share: embeddings, layers, pooler."""

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
from longspan.models.activations import ACTIVATIONS
from longspan.models.encoders.attention import Site, Tokens
from longspan.models.encoders.family import EncoderConfig
from longspan.models.encoders.inputs import check_inputs
from longspan.models.layers import LayerNorm, by_pieces, dropout, embed, linear
from longspan.models.output import Output
from longspan.models.placed import placed
from longspan.models.rngs import Rngs, check_call_rngs, check_rngs, dropout_stream, next_key
from longspan.parallel.sequence_sharding import SequenceSharding


class Encoder(nnx.Module):
    """A BERT, RoBERTa, Longformer or BigBird encoder, whichever the config is of.

    Args:
        config: a `BertConfig`, `RobertaConfig`, `LongformerConfig` or `BigBirdConfig`.
        pooler: whether there is a pooler, which gives `pooler_output`.
        dtype: what is computed in; softmax and layer-norm statistics are float32 at least.
        param_dtype: what parameters are kept in.
        rngs: for the initial values; dropout takes its randomness from the call.

    Attributes:
        deterministic: whether calls that do not say so leave dropout out; `train()` and `eval()` switch it.
        source: the directory that `hf.load` read it from, where `hf.save` finds its tokenizer; None if it was made.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.LongformerConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> encoder = models.Encoder(config, rngs=nnx.Rngs(0))
        >>> encoder(jnp.array([[0, 7, 5, 2, 1]]), attention_mask=jnp.array([[1, 1, 1, 1, 0]])).last_hidden_state.shape
        (1, 5, 6)
    """

    task: ClassVar[str] = "encoder"  # its name in `hf.load`
    suffixes: ClassVar[tuple[str, ...]] = ("Model",)  # ends of Hugging Face's names for it, which begin with the family

    def __init__(
        self, config: EncoderConfig, *, pooler: bool = True, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs
    ):
        check_rngs(rngs)
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.deterministic = True
        self.source: str | None = None
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.embeddings = config.family.embeddings(config, **kinds)
        self.layers = _stack(config, dtype, param_dtype, rngs)
        self.pooler = linear(config, config.hidden_size, config.hidden_size, **kinds) if pooler else nnx.data(None)

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
        attention_type: str | None = None,
        remat: bool = False,
        rngs: Rngs | None = None,
        mesh: Any = None,
        axis: str = "sp",
        order: str = "contiguous",
        batch_axes: str | Sequence[str] = BATCH_AXES,
        head_axis: str | None = HEAD_AXIS,
    ) -> Output:
        """Encodes token ids, or word embeddings in their place.

        Ids outside of their tables are an error, unless they are traced: then they are not known, and give NaN.

        Args:
            input_ids: token ids, an array.
            attention_mask: nonzero for tokens, 0 for padding; bools, ints or floats.
            token_type_ids: 0 by default.
            global_attention_mask: nonzero for global tokens. Longformer only.
            position_ids: rows of the position table; counted by default, from 0 or as RoBERTa does.
            inputs_embeds: word embeddings instead of `input_ids`.
            deterministic: False switches dropout on; by default what `model.train()` or `model.eval()` said last, at
                first True.
            attention_type: "block_sparse" or "original_full", instead of the config's. BigBird only.
            remat: whether the backward pass recomputes each layer instead of keeping its intermediate results.
            rngs: what dropout draws from: the stream "dropout" of an `nnx.Rngs`, a stream, or a JAX key. Inside of
                `nnx.jit` and `nnx.grad` it must be an argument of the function that they transform.
            mesh: shards the sequence over the devices of this mesh, as in `ls.parallel.attention`. By default every
                device has the whole sequence.
            axis: the mesh axis that shards the sequence.
            order: the order of the tokens on that axis, as in `ls.parallel.shard_batch`. Every order except
                "contiguous" needs `position_ids`.
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
        )
        check_inputs(self.config, **arrays)
        check_call_rngs(rngs)
        arrays["keys"] = _dropout_keys(
            self.config, self.deterministic if deterministic is None else deterministic, rngs
        )
        sharding = SequenceSharding(mesh, axis, order, batch_axes, head_axis)
        options: dict[str, Any] = dict(attention_type=attention_type, remat=remat, sharding=sharding)
        return self._encoded(arrays, **options)

    @placed
    def _encoded(
        self, input_ids, attention_mask, token_type_ids, global_attention_mask, position_ids, inputs_embeds, keys, *,
        attention_type: str | None, remat: bool, sharding: SequenceSharding,
    ) -> Output:  # fmt: skip
        T = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
        attention = self.layers.attention
        valid = None if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
        tokens = attention.tokens(T, valid, global_attention_mask, attention_type)
        tokens = dataclasses.replace(tokens, sharding=sharding)
        if sharding.positions(T) is not None and position_ids is None:
            raise ValueError(f"order={sharding.order!r} moves tokens to other slots: give their `position_ids` too.")
        x = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, dropout_key=keys and keys[0])
        x, tokens = attention.fit(x, tokens)
        graph, parameters = nnx.split(self.layers)
        x = _run_layers(graph, remat, parameters, x, tokens, keys and keys[1])[:, :T]
        pooled = None if self.pooler is None else jnp.tanh(self.pooler(x[:, 0]))
        return Output(last_hidden_state=x, pooler_output=pooled)

    @property
    def _columns(self) -> Any:
        """The mesh axes that logits are split over: it has none."""
        return None


class Embeddings(nnx.Module):
    """Word + position + token type, normalised."""

    config: Any  # of the family: subclasses read more of it than every encoder has

    def __init__(self, config: EncoderConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.word = embed(config, config.vocab_size, **kinds)
        self.position = embed(config, config.max_position_embeddings, **kinds)
        self.token_type = embed(config, config.type_vocab_size, **kinds)
        self.norm = LayerNorm(config, **kinds)

    def __call__(self, input_ids, token_type_ids, position_ids, inputs_embeds, *, dropout_key) -> Float[Array, "B T D"]:
        if inputs_embeds is None:
            word = self.word(jnp.asarray(input_ids, jnp.int32))
        else:
            word = jnp.asarray(inputs_embeds, self.word.dtype)
        if position_ids is None:
            position_ids = self.positions(input_ids, word.shape[1])
        if token_type_ids is None:
            token_type_ids = jnp.zeros((1, 1), jnp.int32)
        x = self.scale(word) + self.token_type(jnp.asarray(token_type_ids, jnp.int32))
        x = x + self.position(jnp.asarray(position_ids, jnp.int32))
        return self.finish(x, dropout_key)

    def positions(self, input_ids, seq_len: int) -> jax.Array:
        """Rows of the position table where the caller names none."""
        return jnp.arange(seq_len, dtype=jnp.int32)[None] + self.config.first_position

    def scale(self, word: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return word

    def finish(self, x: Float[Array, "B T D"], dropout_key) -> Float[Array, "B T D"]:
        return dropout(self.norm(x), self.config.hidden_dropout_prob, dropout_key)


class Layer(nnx.Module):
    """Self-attention and a feed-forward network, each added to its input and normalised afterwards."""

    def __init__(self, config: EncoderConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.attention = config.family.attention(config, **kinds)
        self.out = linear(config, config.hidden_size, config.hidden_size, **kinds)
        self.out_norm = LayerNorm(config, **kinds)
        self.feed_forward = FeedForward(config, **kinds)

    def __call__(self, x: Float[Array, "B T D"], tokens: Tokens, site: Site, dropout_key=None) -> Float[Array, "B T D"]:
        keys = [None] * 3 if dropout_key is None else jax.random.split(dropout_key, 3)
        attended = self.out(self.attention(x, tokens, site, keys[0]))
        x = self.out_norm(dropout(attended, self.config.hidden_dropout_prob, keys[1]) + x)
        return self.feed_forward(x, x, keys[2])


class FeedForward(nnx.Module):
    """norm(down(act(up(x))) + residual)."""

    def __init__(self, config: EncoderConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.up = linear(config, config.hidden_size, config.intermediate_size, **kinds)
        self.down = linear(config, config.intermediate_size, config.hidden_size, **kinds)
        self.norm = LayerNorm(config, **kinds)

    def __call__(self, x, residual, dropout_key=None) -> Float[Array, "B T D"]:
        activation = ACTIVATIONS[self.config.hidden_act]
        hidden = by_pieces(lambda x: self.down(activation(self.up(x))), x)
        return self.norm(dropout(hidden, self.config.hidden_dropout_prob, dropout_key) + residual)


def _stack(config: EncoderConfig, dtype, param_dtype, rngs: nnx.Rngs) -> Layer:
    """All layers as one, whose parameters have the layers as their first axis."""

    @nnx.split_rngs(splits=config.num_hidden_layers)
    @nnx.vmap
    def make(rngs):
        return Layer(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    return make(rngs)


# Jitted, or a call outside of `jit` would compile the scan every time: its body is a new function in each.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_layers(graph, remat: bool, parameters, x, tokens: Tokens, keys):
    """A scan over the layers: one of them is compiled, and with `remat` one of them is in memory."""

    def step(x, layer):
        parameters, key, site = layer
        return nnx.merge(graph, parameters)(x, tokens, site, key), None

    runs = nnx.merge(graph, parameters).attention.sites(x.shape[1], tokens)
    start = 0
    for count, site in runs:
        mine = parameters, keys
        if len(runs) > 1:
            mine = jax.tree.map(operator.itemgetter(slice(start, start + count)), mine)
        x, _ = jax.lax.scan(jax.checkpoint(step) if remat else step, x, (*mine, site))
        start += count
    return x


def drops_any(config: EncoderConfig, deterministic: bool) -> bool:
    """Whether a call of the encoder draws a key, which all of its dropout follows from."""
    return not deterministic and max(config.hidden_dropout_prob, config.attention_probs_dropout_prob) > 0


def _dropout_keys(config: EncoderConfig, deterministic: bool, rngs: Rngs | None):
    """A key for the embeddings and one for each layer; None if nothing is dropped."""
    if not drops_any(config, deterministic):
        return None
    first, second = jax.random.split(next_key(dropout_stream(rngs)))
    return first, jax.random.split(second, config.num_hidden_layers)
