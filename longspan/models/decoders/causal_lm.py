"""The decoder that all families share: embeddings, layers, and the logits of the next token."""

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
from longspan.models.decoders.layer import run_layers, stack
from longspan.models.decoders.products import is_plain
from longspan.models.layers import embed, linear, rms_norm
from longspan.models.output import Output
from longspan.models.placed import columns_of, placed
from longspan.models.rngs import check_rngs
from longspan.parallel.sequence_sharding import SequenceSharding

FEW = 64  # tokens of a step of decoding, at most


class CausalLM(nnx.Module):
    """A decoder that predicts the next token at each place, of the family that the config is of.

    Layers have the mask and the rotary positions of their kind. Those that repeat are scanned, so that the time to
    compile does not grow with their number.

    Args:
        config: for example a `LlamaConfig`.
        dtype: of the computation.
        param_dtype: of the parameters.
        rngs: initial parameters.

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
    suffixes: ClassVar[tuple[str, ...]] = ("ForCausalLM",)  # of Hugging Face's names for it

    config: Any  # of the family

    def __init__(self, config: DecoderConfig, *, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs):
        check_rngs(rngs)
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.source: str | None = None
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        self.embed = embed(config, config.vocab_size, **kinds, rngs=rngs)
        self.layers = nnx.List(
            stack(config, kind, run.count, **kinds, rngs=rngs) for run in config.runs for kind in run.kinds
        )
        self.norm = rms_norm(config, config.hidden_size, **kinds)
        shape = config.hidden_size, config.vocab_size
        tied = config.tie_word_embeddings
        self.head = nnx.data(None) if tied else linear(config, *shape, use_bias=False, **kinds, rngs=rngs)

    def __call__(
        self,
        input_ids: Int[AnyArray, "B T"] | None = None,
        attention_mask: Shaped[AnyArray, "B T"] | None = None,
        positions: Int[AnyArray, "B_or_1 T"] | None = None,
        inputs_embeds: Float[AnyArray, "B T D"] | None = None,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        cache: DecoderCache | None = None,
        *,
        remat: bool = False,
        mesh: Any = None,
        axis: str = "sp",
        order: str = "contiguous",
        batch_axes: str | Sequence[str] = BATCH_AXES,
        head_axis: str | None = HEAD_AXIS,
    ) -> Output:
        """The logits [B, T, vocab_size] of the token after each token; with a `cache` also the new one.

        Ids outside of their tables are an error, unless they are traced: then they are not known, and give NaN.

        Args:
            input_ids: token ids, an array.
            attention_mask: nonzero for tokens, 0 for padding, which may come before them or after them; bools, ints or
                floats. The logits at padding mean nothing.
            positions: of the tokens, for rotations; by default tokens are counted in each row, and in each document.
            inputs_embeds: embeddings instead of `input_ids`, as they are: a family that scales its own does not scale
                these.
            segment_ids: the document of each token in packed rows, negative for padding: no token sees another
                document.
            cache: what `init_cache` gave, or the call before, for the tokens that come after those in it. Rows may
                have different numbers of them, by `attention_mask`.
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
        return self._answered(arrays, remat=remat, sharding=sharding)

    @placed
    def _answered(
        self, input_ids, attention_mask, positions, inputs_embeds, segment_ids, cache, *,
        remat: bool, sharding: SequenceSharding,
    ) -> Output:  # fmt: skip
        config, shape = self.config, (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        x = self._embedded(input_ids, inputs_embeds)
        if cache is None:
            tokens = tokens_of(config, shape, attention_mask, positions, segment_ids, sharding)
            return self._output(self._apply_layers(x, tokens, remat=remat)[0], None)
        step, tokens_before, lengths = not remat and self._reads_in_place(shape[0] * shape[1]), None, None
        if attention_mask is not None:
            # A cache keeps the first tokens of a row, so padding goes to its end, and comes back afterwards.
            tokens_before, lengths = tokens_first(attention_mask)
            x = jnp.take_along_axis(x, tokens_before[..., None], axis=1)
        tokens, cache = cached_tokens_of(config, shape, cache, lengths, self.dtype)
        x, stacks = self._apply_layers(x, tokens, cache.stacks, step=step, remat=remat)
        if tokens_before is not None:
            x = jnp.take_along_axis(x, jnp.argsort(tokens_before, axis=1)[..., None], axis=1)
        return self._output(x, replace(cache, stacks=stacks), step=step)

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> DecoderCache:
        """An empty cache of all layers, for `batch` rows of up to `length` tokens each.

        A layer keeps what its mask will look at again: a sliding one its window, whatever the length.

        Args:
            batch: rows.
            length: tokens of a row, prompt and answer.
            dtype: of keys and values; by default the model's.

        Returns:
            What a call takes as `cache`, and gives back in `output.cache` with its tokens; donate it to a jitted one.

        Example:
            >>> from flax import nnx
            >>> from longspan import models
            >>> config = models.LlamaConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=3)
            >>> model = models.CausalLM(config, rngs=nnx.Rngs(0))
            >>> cache = model.init_cache(batch=5, length=100)
            >>> [layer.k.shape for layer in cache]
            [(5, 100, 2, 4), (5, 100, 2, 4), (5, 100, 2, 4)]
        """
        return empty_cache(self.config, batch, length, self.dtype if dtype is None else dtype)

    @property
    def _columns(self) -> Any:
        """The mesh axes that logits are split over, besides those of tokens."""
        return columns_of(self.head, self.embed)

    def _embedded(self, input_ids, inputs_embeds) -> jax.Array:
        if inputs_embeds is not None:
            return jnp.asarray(inputs_embeds, self.dtype)
        x = self.embed(jnp.asarray(input_ids, jnp.int32))
        if not self.config.family.scaled_embeddings:
            return x
        # Rounded first, as the families do that scale: √2304 is 48 in float32 as well as in bfloat16, √3072 is not.
        return x * jnp.asarray(self.config.hidden_size**0.5, self.dtype)

    def _apply_layers(
        self, x, tokens, stacks: Any = None, *, step: bool = False, remat: bool = False
    ) -> tuple[jax.Array, tuple]:
        graphs, states = zip(*map(nnx.split, self.layers), strict=True)
        stacks = (None,) * len(graphs) if stacks is None else stacks
        return _run_layers(graphs, self.config.runs, step, remat, states, x, tokens, stacks)

    def _reads_in_place(self, count: int) -> bool:
        """Whether so many tokens are a step of decoding, which is not scanned: that would copy matrices and caches."""
        if count > FEW:
            return False
        if jax.default_backend() != "cpu":
            return True
        table = self.embed.embedding.get_raw_value()
        devices = jax.device_count() if isinstance(table, Tracer) else len(table.sharding.device_set)
        return devices == 1 and reads_in_place(count, self.dtype, table.dtype)

    def _output(self, x, cache, *, step: bool = False) -> Output:
        x = self.norm(x)
        return Output(last_hidden_state=x, logits=self._logits(x, step=step), cache=cache)

    def _logits(self, x, *, step: bool) -> jax.Array:
        head = self.embed if self.head is None else self.head
        if not step or not is_plain(head, x) or getattr(head, "bias", None) is not None:
            logits = self.embed.attend(x) if self.head is None else self.head(x)
        elif self.head is None:
            logits = multiply(x, [self.embed.embedding[...]], by_outer=True)[0].astype(self.dtype)
        else:
            logits = multiply(x, [self.head.kernel[...]])[0].astype(self.dtype)
        cap = self.config.final_soft_cap
        return logits if cap is None else jnp.tanh(logits / cap) * cap


# Jitted, or a call outside of `jit` would compile the loops every time: their bodies are new functions in each.
_run_layers = functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))(run_layers)
