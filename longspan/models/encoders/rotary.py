"""The body of encoders that rotate queries and keys: ModernBERT and its relatives. The family's record has switches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from longspan.masks import Full, Mask, Segments
from longspan.models.activations import ACTIVATIONS
from longspan.models.decoders.runs import LayerRun, group_by_run
from longspan.models.encoders.attention import EncoderCall, EncoderTokens, FullAttention, segments_of
from longspan.models.encoders.rotary_config import RotaryConfig
from longspan.models.layers import LayerNorm, by_pieces, concatenated_linear, dropout, embed, linear, rms_norm
from longspan.nn.rope import apply_rope


class RotaryEmbeddings(nnx.Module):
    """Word embeddings; some families add token types, and most normalise the sum."""

    config: Any

    def __init__(self, config: RotaryConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.word = embed(config, config.vocab_size, **options)
        self.token_type = self.norm = nnx.data(None)
        if config.token_types:
            self.token_type = embed(config, config.token_types, **options)
        if config.family.embedding_norm:
            self.norm = make_norm(config, **options)

    def __call__(
        self, input_ids, token_type_ids, position_ids, inputs_embeds, segments, *, dropout_key
    ) -> Float[Array, "B T D"]:
        if inputs_embeds is None:
            x = self.word(jnp.asarray(input_ids, jnp.int32))
            if self.config.family.scaled_embeddings:
                # The factor is rounded to the dtype first, as in Gemma's decoders.
                x = x * jnp.asarray(self.config.hidden_size**0.5, self.dtype)
        else:
            x = jnp.asarray(inputs_embeds, self.dtype)
        if self.token_type is not None:
            if token_type_ids is None:
                token_type_ids = jnp.zeros((1, 1), jnp.int32)
            x = x + self.token_type(jnp.asarray(token_type_ids, jnp.int32))
        if self.norm is not None:
            x = self.norm(x)
        return dropout(x, self.config.dropout_rates.embedding, dropout_key)


class RotaryAttention(FullAttention):
    """Self-attention of one kind of layer, with rotated queries and keys."""

    def __init__(self, config: RotaryConfig, kind: str, *, dtype, param_dtype, rngs: nnx.Rngs):
        # Not `FullAttention.__init__`: queries, keys and values come from one matrix in most families.
        options: dict[str, Any] = dict(use_bias=config.biases.qkv, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config, self.kind = config, kind
        heads, kv_heads, head_dim = config.heads
        if config.family.fused:
            self.qkv = linear(config, config.hidden_size, (heads + 2 * kv_heads) * head_dim, **options)
        else:
            self.query = linear(config, config.hidden_size, heads * head_dim, **options)
            self.key = linear(config, config.hidden_size, kv_heads * head_dim, **options)
            self.value = linear(config, config.hidden_size, kv_heads * head_dim, **options)
        options["use_bias"] = config.biases.out
        self.out = linear(config, heads * head_dim, config.hidden_size, **options)
        if config.family.qk_norm:
            self.query_norm = rms_norm(config, head_dim, dtype=dtype, param_dtype=param_dtype)
            self.key_norm = rms_norm(config, head_dim, dtype=dtype, param_dtype=param_dtype)

    def __call__(self, x: Float[Array, "B T D"], tokens: EncoderTokens, dropout_key) -> Float[Array, "B T D"]:
        heads, kv_heads, head_dim = self.config.heads
        if self.config.family.fused:
            sizes = np.cumsum([heads * head_dim, kv_heads * head_dim]).tolist()
            q, k, v = jnp.split(self.qkv(x), sizes, axis=-1)
        else:
            q, k, v = concatenated_linear((self.query, self.key, self.value), x)
        q = q.reshape(*x.shape[:2], heads, head_dim)
        k = k.reshape(*x.shape[:2], kv_heads, head_dim)
        v = v.reshape(*x.shape[:2], kv_heads, head_dim)
        if self.config.family.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = apply_rope(self.config.frequencies(self.kind), False, tokens.positions, q, k)
        options = dict(mask=self.mask(tokens), scale=self.config.scale, **self.dropout(dropout_key))
        attended = tokens.sharding.attention(q, k, v, **options)
        return self.out(attended.reshape(*x.shape[:2], -1))

    def mask(self, tokens: EncoderTokens) -> Mask | None:
        rule = self.config.mask(self.kind)
        if tokens.segments is not None:
            return rule & Segments(tokens.segments)
        return None if isinstance(rule, Full) else rule

    def dropout(self, key) -> dict:
        rate = self.config.dropout_rates.scores
        if key is None or rate == 0:
            return {}
        return dict(dropout_rate=rate, dropout_key=key)

    def tokens(self, call: EncoderCall) -> EncoderTokens:
        self.check_unused(global_attention_mask=call.global_attention_mask, attention_type=call.attention_type)
        segments, positions = call.segments, call.position_ids
        if segments is None:
            segments = segments_of(call.valid, None)
        # Rotations depend on distances only, so documents of a packed row need no positions of their own.
        if positions is None:
            positions = call.sharding.positions(call.length)
        if positions is None:
            positions = np.arange(call.length, dtype=np.int32)
        return EncoderTokens(segments=segments, positions=jnp.asarray(positions, jnp.int32))


class RotaryMLP(nnx.Module):
    """down(act(gate(x)) · up(x)), or down(act(up(x))) in families without a gate."""

    def __init__(self, config: RotaryConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(use_bias=config.biases.up, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        size, inner, mlp = config.hidden_size, config.intermediate_size, config.family.mlp
        if mlp in ("gate_first", "gate_last"):
            self.gate_up = linear(config, size, 2 * inner, **options)
        else:
            self.up = linear(config, size, inner, **options)
        if mlp == "gated":
            self.gate = linear(config, size, inner, **options)
        options["use_bias"] = config.biases.down
        self.down = linear(config, inner, size, **options)

    def __call__(self, x: Float[Array, "B T D"], dropout_key) -> Float[Array, "B T D"]:
        rate = self.config.dropout_rates.hidden
        if dropout_key is None or rate == 0:
            return by_pieces(lambda x: self.down(self.hidden(x)), x)
        # Not by pieces: all pieces would drop the same hidden units.
        return self.down(dropout(self.hidden(x), rate, dropout_key))

    def hidden(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        act, mlp = ACTIVATIONS[self.config.activation], self.config.family.mlp
        if mlp == "plain":
            return act(self.up(x))
        if mlp == "gated":
            gate, up = concatenated_linear((self.gate, self.up), x)
        elif mlp == "gate_first":
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        else:
            up, gate = jnp.split(self.gate_up(x), 2, axis=-1)
        return act(gate) * up


class RotaryLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with the norms after the sums in post-norm families.

    Some pre-norm families also normalise the output of both branches.
    """

    def __init__(self, config: RotaryConfig, kind: str, has_norm: bool, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.attention_norm = make_norm(config, **options) if has_norm else nnx.data(None)
        self.attention = RotaryAttention(config, kind, **options)
        self.mlp_norm = make_norm(config, **options)
        self.mlp = RotaryMLP(config, **options)
        if config.family.branch_norms:
            self.attention_out_norm = make_norm(config, **options)
            self.mlp_out_norm = make_norm(config, **options)

    def __call__(self, x: Float[Array, "B T D"], tokens: EncoderTokens, dropout_key) -> Float[Array, "B T D"]:
        keys, rates = [None] * 4, self.config.dropout_rates
        if dropout_key is not None:
            keys = list(jax.random.split(dropout_key, 4))
        norm: Any = self.attention_norm
        if not self.config.family.pre_norm:
            x = norm(x + dropout(self.attention(x, tokens, keys[0]), rates.attention, keys[1]))
            return self.mlp_norm(x + dropout(self.mlp(x, keys[2]), rates.mlp, keys[3]))
        attended = self.attention(x if norm is None else norm(x), tokens, keys[0])
        if self.config.family.branch_norms:
            attended = self.attention_out_norm(attended)
        x = x + dropout(attended, rates.attention, keys[1])
        hidden = self.mlp(self.mlp_norm(x), keys[2])
        if self.config.family.branch_norms:
            hidden = self.mlp_out_norm(hidden)
        return x + dropout(hidden, rates.mlp, keys[3])


class RotaryLayers(nnx.Module):
    """All layers, stacked by their place in a repeating pattern, and the last norm of pre-norm families."""

    def __init__(self, config: RotaryConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.stacks = nnx.List(_stack(config, kind, run, **options) for run in config.runs for kind in run.kinds)
        self.norm = make_norm(config, **options) if config.family.pre_norm else nnx.data(None)

    @property
    def attention(self) -> RotaryAttention:
        """The attention of the first layer, which prepares calls."""
        return self.stacks[0].attention

    def run(self, x: Float[Array, "B T D"], tokens: EncoderTokens, keys, *, remat: bool) -> Float[Array, "B T D"]:
        """The output of all layers."""
        graphs, states = zip(*map(nnx.split, self.stacks), strict=True)
        x = _run_stacks(graphs, self.config.runs, remat, states, x, tokens, keys)
        if self.norm is None:
            return x
        return self.norm(x)


def make_norm(config: RotaryConfig, *, dtype, param_dtype, rngs: nnx.Rngs) -> Any:
    """A norm over the features, of the family's type."""
    if config.family.rms_norms:
        return rms_norm(config, config.hidden_size, dtype=dtype, param_dtype=param_dtype)
    return LayerNorm(config, use_bias=config.layer_norm_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def _stack(config: RotaryConfig, kind: str, run: LayerRun, *, dtype, param_dtype, rngs: nnx.Rngs) -> RotaryLayer:
    """The layers at one place of a run as one module, whose parameters have the layers as their first axis."""
    has_norm = config.family.first_norm or run.start > 0

    @nnx.split_rngs(splits=run.count)
    @nnx.vmap
    def make(rngs):
        return RotaryLayer(config, kind, has_norm, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    return make(rngs)


# Jitted here: a call outside of `jit` would otherwise compile the scans again, because their bodies are new functions.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_stacks(graphs: tuple, runs: tuple[LayerRun, ...], remat: bool, states, x, tokens: EncoderTokens, keys):
    """A scan over the repetitions of each run's pattern, which is compiled once."""
    for run, run_graphs, run_states in zip(runs, group_by_run(runs, graphs), group_by_run(runs, states), strict=True):

        def step(x, scanned, run_graphs=run_graphs):
            states, keys = scanned
            for place, (graph, state) in enumerate(zip(run_graphs, states, strict=True)):
                x = nnx.merge(graph, state)(x, tokens, None if keys is None else keys[place])
            return x, None

        run_keys = None
        if keys is not None:
            size = run.count * len(run.kinds)
            run_keys = keys[run.start : run.start + size].reshape(run.count, len(run.kinds), *keys.shape[1:])
        x, _ = jax.lax.scan(jax.checkpoint(step) if remat else step, x, (run_states, run_keys), run.count)
    return x
