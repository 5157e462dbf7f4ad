"""`CausalLM`: the decoder of all families, with embeddings, layers and the logits of the next token."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Float, Int, Shaped

from longspan.array_types import Array as AnyArray
from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.engines import multiply, reads_in_place
from longspan.models.decoders.cache import DecoderCache, empty_cache
from longspan.models.decoders.family import DecoderConfig
from longspan.models.decoders.inputs import cached_tokens_of, check_inputs, tokens_first, tokens_of
from longspan.models.decoders.layer import run_layers, stack_layers
from longspan.models.decoders.products import is_plain
from longspan.models.explicit_axes import accepts_explicit_axes, vocab_axes_of
from longspan.models.layers import embed, linear, multiplied, rms_norm
from longspan.models.output import Output
from longspan.models.rngs import check_rngs
from longspan.parallel.sequence_sharding import SequenceSharding

MAX_DECODE_TOKENS = 64  # tokens of all rows in a decode step; longer calls are prefill


class CausalLM(nnx.Module):
    """A decoder that predicts the next token at each position. The config decides the family.

    Each kind of layer has a mask and rotary positions. Repeated layers are scanned, so the time to compile does not
    grow with their number.

    Args:
        config: for example a `LlamaConfig`.
        dtype: the dtype of the computation.
        param_dtype: the dtype of the parameters.
        rngs: random keys for the initial parameters.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.LlamaConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> model = models.CausalLM(config, rngs=nnx.Rngs(0))
        >>> model(jnp.array([[3, 7, 5]])).logits.shape
        (1, 3, 11)
        >>> output = model(jnp.array([[3, 7, 5]]), cache=model.init_cache(batch=1, length=100))
        >>> model(jnp.array([[2]]), cache=output.cache).logits.shape
        (1, 1, 11)
    """

    task: ClassVar[str] = "causal_lm"  # its name in `hf.load`
    suffixes: ClassVar[tuple[str, ...]] = ("ForCausalLM",)  # of Hugging Face's class names

    config: Any  # `Any`: every family adds fields

    def __init__(self, config: DecoderConfig, *, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs):
        check_rngs(rngs)
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.source: str | None = None
        dtypes: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        self.embed = embed(config, config.vocab_size, **dtypes, rngs=rngs)
        self.layers = nnx.List(
            stack_layers(config, kind, run.count, **dtypes, rngs=rngs) for run in config.runs for kind in run.kinds
        )
        self.norm = rms_norm(config, config.hidden_size, **dtypes)
        if config.tie_word_embeddings:
            self.head = nnx.data(None)
        else:
            self.head = linear(config, config.hidden_size, config.vocab_size, use_bias=False, **dtypes, rngs=rngs)

    def __call__(
        self,
        input_ids: Int[AnyArray, "B T"] | None = None,
        attention_mask: Shaped[AnyArray, "B T"] | None = None,
        positions: Int[AnyArray, "B_or_1 T"] | None = None,
        inputs_embeds: Float[AnyArray, "B T D"] | None = None,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        cache: DecoderCache | None = None,
        *,
        logits: bool = True,
        remat: bool = False,
        mesh: Any = None,
        axis: str = "sp",
        order: str = "contiguous",
        batch_axes: str | Sequence[str] = BATCH_AXES,
        head_axis: str | None = HEAD_AXIS,
    ) -> Output:
        """The logits [B, T, vocab_size] of the next token after each position; with a `cache` also the updated cache.

        Token ids outside of the vocabulary raise an error. Traced ids cannot be checked and give NaN instead.

        Args:
            input_ids: token ids.
            attention_mask: nonzero for tokens, 0 for padding; bools, ints or floats. Padding may be on either side of
                the tokens. The logits at padding are meaningless.
            positions: the positions of the tokens for the rotations. By default they are counted from 0 in each row
                and in each document.
            inputs_embeds: embeddings instead of `input_ids`. As in Hugging Face, Gemma's are not scaled, unlike the
                embeddings of tokens, and Granite's are multiplied by `embedding_multiplier`.
            segment_ids: the document of each token in packed rows, negative for padding. Tokens attend to their own
                document only.
            cache: from `init_cache` or from the previous call's output. The new tokens follow those in it. Rows may
                have different numbers of new tokens, by `attention_mask`.
            logits: whether to compute the logits. Without them only `last_hidden_state` is computed, for embeddings.
            remat: whether the backward pass recomputes each layer instead of keeping its intermediate results.
            mesh: shards the sequence over the devices of this mesh, as in `ls.parallel.attention`. By default every
                device has the whole sequence.
            axis: the mesh axis that shards the sequence.
            order: the order of the tokens on that axis, as in `ls.parallel.shard_batch`.
            batch_axes: the mesh axes that shard the batch, as in `ls.parallel.attention`.
            head_axis: the mesh axis that shards the heads, likewise.
        """
        sharding = SequenceSharding(mesh, axis, order, batch_axes, head_axis)
        arrays: dict[str, Any] = dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            positions=positions,
            inputs_embeds=inputs_embeds,
            segment_ids=segment_ids,
            cache=cache,
        )
        check_inputs(self.config, **arrays, sharding=sharding)
        return self._forward(arrays, logits=logits, remat=remat, sharding=sharding)

    @accepts_explicit_axes
    def _forward(
        self, input_ids, attention_mask, positions, inputs_embeds, segment_ids, cache, *,
        logits: bool, remat: bool, sharding: SequenceSharding,
    ) -> Output:  # fmt: skip
        x = self._embedded(input_ids, inputs_embeds)
        shape: Any = x.shape[:2]
        if cache is None:
            tokens = tokens_of(self.config, shape, attention_mask, positions, segment_ids, sharding)
            x, _ = self._apply_layers(x, tokens, remat=remat)
            return self._output(x, None, logits=logits)
        in_place = not remat and self._reads_in_place(shape[0] * shape[1])
        order = lengths = None
        if attention_mask is not None:
            # A cache takes the first tokens of a row, so padding moves to the end, and back after the layers.
            order, lengths = tokens_first(attention_mask)
            x = jnp.take_along_axis(x, order[..., None], axis=1)
        tokens, cache = cached_tokens_of(self.config, shape, cache, lengths, self.dtype)
        x, stacks = self._apply_layers(x, tokens, cache.stacks, in_place=in_place, remat=remat)
        if order is not None:
            x = jnp.take_along_axis(x, jnp.argsort(order, axis=1)[..., None], axis=1)
        return self._output(x, replace(cache, stacks=stacks), logits=logits, in_place=in_place)

    def init_cache(
        self, batch: int, length: int, dtype: Any = None, *, slack: int = 0, heads_first: bool = False
    ) -> DecoderCache:
        """An empty cache of all layers, for `batch` rows of up to `length` tokens each.

        The cache of a layer holds the keys that its mask can still attend to: a sliding layer stores one window and
        `slack` further keys, whatever the length.

        Args:
            batch: the number of rows.
            length: the maximum number of tokens of a row, prompt and answer.
            dtype: the dtype of keys and values; by default the model's.
            slack: the number of tokens that `DecoderCache.rollback` may remove, for example rejected draft tokens.
            heads_first: whether keys and values are stored as [B, K, slots, H], the order of TPU kernels, instead of
                [B, slots, K, H].

        Returns:
            The `cache` argument of a call, which returns the updated cache in `output.cache`. Donate it to a jitted
            call to have it updated in place.

        Example:
            >>> from flax import nnx
            >>> from longspan import models
            >>> config = models.LlamaConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=3)
            >>> model = models.CausalLM(config, rngs=nnx.Rngs(0))
            >>> cache = model.init_cache(batch=5, length=100)
            >>> [layer.k.shape for layer in cache]
            [(5, 100, 2, 4), (5, 100, 2, 4), (5, 100, 2, 4)]
        """
        if dtype is None:
            dtype = self.dtype
        return empty_cache(self.config, batch, length, dtype, slack, heads_first=heads_first)

    @property
    def _vocab_axes(self) -> Any:
        """The mesh axes that shard the vocabulary axis of the logits."""
        return vocab_axes_of(self.head, self.embed)

    def _embedded(self, input_ids, inputs_embeds) -> jax.Array:
        if inputs_embeds is not None:
            x = jnp.asarray(inputs_embeds, self.dtype)
        else:
            x = self.embed(jnp.asarray(input_ids, jnp.int32))
            if self.config.family.scaled_embeddings:
                # The factor is rounded to the dtype first, as these families do: √2304 is exact in bfloat16, √3072 not.
                x = x * jnp.asarray(self.config.hidden_size**0.5, self.dtype)
        return multiplied(x, self.config.multipliers.embeddings)

    def _apply_layers(
        self, x, tokens, stacks: Any = None, *, in_place: bool = False, remat: bool = False
    ) -> tuple[jax.Array, tuple]:
        graphs, states = zip(*map(nnx.split, self.layers), strict=True)
        if stacks is None:
            stacks = (None,) * len(graphs)
        return _run_layers(graphs, self.config.runs, in_place, remat, states, x, tokens, stacks)

    def _reads_in_place(self, count: int) -> bool:
        """Whether a call with `count` tokens reads matrices and caches from their stacks without copying them."""
        if count > MAX_DECODE_TOKENS:
            return False
        if jax.default_backend() != "cpu":
            return True
        embeddings = self.embed.embedding.get_raw_value()
        if isinstance(embeddings, Tracer):
            devices = jax.device_count()
        else:
            devices = len(embeddings.sharding.device_set)
        return devices == 1 and reads_in_place(count, self.dtype, embeddings.dtype)

    def _output(self, x, cache, *, logits: bool, in_place: bool = False) -> Output:
        x = self.norm(x)
        if not logits:
            return Output(last_hidden_state=x, cache=cache)
        return Output(last_hidden_state=x, logits=self._logits(x, in_place=in_place), cache=cache)

    def _logits(self, x, *, in_place: bool) -> jax.Array:
        logits = self._tied_logits(x, in_place) if self.head is None else self._head_logits(x, in_place)
        logits = multiplied(logits, 1 / self.config.multipliers.logits_divisor)
        cap = self.config.final_soft_cap
        if cap is None:
            return logits
        return jnp.tanh(logits / cap) * cap

    def _tied_logits(self, x, in_place: bool) -> jax.Array:
        if not in_place or not is_plain(self.embed, x):
            return self.embed.attend(x)
        return multiply(x, [self.embed.embedding[...]], by_outer=True)[0].astype(self.dtype)

    def _head_logits(self, x, in_place: bool) -> jax.Array:
        head: Any = self.head
        if not in_place or not is_plain(head, x) or head.bias is not None:
            return head(x)
        return multiply(x, [head.kernel[...]])[0].astype(self.dtype)


# Jitted here: a call outside of `jit` would otherwise compile the scans again, because their bodies are new functions.
_run_layers = functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))(run_layers)
