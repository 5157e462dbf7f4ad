"""`DecoderLayer`: attention and a gated MLP, each with norms and a residual; and the loop over layers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from longspan.models.activations import ACTIVATIONS
from longspan.models.decoders.attention import DecoderAttention, DecoderTokens
from longspan.models.decoders.experts import MixtureOfExperts
from longspan.models.decoders.family import DecoderConfig, LayerKind
from longspan.models.decoders.products import linear_each
from longspan.models.decoders.runs import LayerRun, group_by_run
from longspan.models.layers import by_pieces, linear, multiplied, rms_norm


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Some families normalise the outputs instead, or also."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, *, dtype, param_dtype, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        self.config, self.kind = config, kind
        if config.family.input_norms:
            self.attention_norm = rms_norm(config, config.hidden_size, **dtypes)
            self.mlp_norm = rms_norm(config, config.hidden_size, **dtypes)
        self.attention = DecoderAttention(config, kind, **dtypes, rngs=rngs)
        mlp: Any = MixtureOfExperts if kind.experts else GatedMLP
        self.mlp = mlp(config, **dtypes, rngs=rngs)
        if config.family.branch_norms:
            self.attention_out_norm = rms_norm(config, config.hidden_size, **dtypes)
            self.mlp_out_norm = rms_norm(config, config.hidden_size, **dtypes)

    def __call__(
        self, x: Float[Array, "B T D"], tokens: DecoderTokens, stack: Any = None, layer: Any = None, at: Any = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The output, and the stack with the new keys and values. `DecoderAttention` explains the arguments."""
        family, factor = self.config.family, self.config.multipliers.branches
        hidden = x
        if family.input_norms:
            hidden = self.attention_norm(x, at)
        hidden, stack = self.attention(hidden, tokens, stack, layer, at)
        if family.branch_norms:
            hidden = self.attention_out_norm(hidden, at)
        x = x + multiplied(hidden, factor)
        hidden = x
        if family.input_norms:
            hidden = self.mlp_norm(x, at)
        if self.kind.experts:
            hidden = self.mlp(hidden, at, layer)
        else:
            hidden = by_pieces(partial(self.mlp, at=at), hidden)
        if family.branch_norms:
            hidden = self.mlp_out_norm(hidden, at)
        return x + multiplied(hidden, factor), stack


class GatedMLP(nnx.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, config: DecoderConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        self.config = config
        inner, bias = config.intermediate_size, config.biases[2]
        options: dict[str, Any] = dict(use_bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        if config.family.fused:
            self.gate_up = linear(config, config.hidden_size, 2 * inner, **options)
        else:
            self.gate = linear(config, config.hidden_size, inner, **options)
            self.up = linear(config, config.hidden_size, inner, **options)
        self.down = linear(config, inner, config.hidden_size, **options)

    def __call__(self, x: Float[Array, "B T D"], at: Any = None) -> Float[Array, "B T D"]:
        """The output; of a stack of MLPs, that of the one at index `at`."""
        if self.config.family.fused:
            (gate_up,) = linear_each([self.gate_up], x, at)
            gate, up = jnp.split(gate_up, 2, axis=-1)
        else:
            gate, up = linear_each([self.gate, self.up], x, at)
        return linear_each([self.down], ACTIVATIONS[self.config.hidden_act](gate) * up, at)[0]


def stack_layers(
    config: DecoderConfig, kind: LayerKind, count: int, *, dtype, param_dtype, rngs: nnx.Rngs
) -> DecoderLayer:
    """`count` layers of one kind as one module, whose parameters have the layers as their first axis."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap
    def make(rngs):
        return DecoderLayer(config, kind, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    return make(rngs)


def run_layers(
    graphs: tuple,
    runs: tuple[LayerRun, ...],
    in_place: bool,
    remat: bool,
    states: tuple,
    x: jax.Array,
    tokens: DecoderTokens,
    kv_stacks,
) -> tuple[jax.Array, tuple]:
    """The output of all layers, and the stacks with the new keys and values.

    Each run is a scan over the repetitions of its pattern, which is compiled once.

    Args:
        graphs: the graph definitions of the stacks of layers.
        runs: the layers by their repeating pattern.
        in_place: whether layers read parameters, keys and values from their stacks instead of copying them out. For
            few tokens the copies would take longer than the computation.
        remat: whether the backward pass recomputes each repetition, so that only one is in memory at a time.
        states: the parameters of the stacks of layers.
        x: embeddings.
        tokens: the masks and positions of the batch.
        kv_stacks: keys and values, stacked like the layers; a None per stack without a cache.
    """
    new_stacks: list[Any] = []
    grouped = [group_by_run(runs, items) for items in (graphs, states, kv_stacks)]
    for run, run_graphs, run_states, run_stacks in zip(runs, *grouped, strict=True):
        splits = [
            _split(state, in_place, stack is not None and not remat)
            for state, stack in zip(run_states, run_stacks, strict=True)
        ]
        whole, scanned = zip(*splits, strict=True)

        def step(carry, layer_states, run_graphs=run_graphs, whole=whole):
            index, x, stacks = carry
            at = index if in_place else None
            written = []
            for graph, stacked, state, stack in zip(run_graphs, whole, layer_states, stacks, strict=True):
                layer = nnx.merge(graph, nnx.merge_state(stacked, state))
                x, stack = layer(x, tokens, stack, index, at)
                written.append(stack)
            return (index + 1, x, tuple(written)), None

        body = jax.checkpoint(step) if remat else step
        (_, x, run_stacks), _ = jax.lax.scan(body, (np.int32(0), x, run_stacks), scanned, run.count)
        new_stacks += run_stacks
    return x, tuple(new_stacks)


def _split(state: Any, in_place: bool, cached: bool) -> tuple[Any, Any]:
    """The parameters that each layer reads from their stack, and those that the scan copies out of it.

    Without a cache the scan copies all. The gradient of a stack that is read in place has the size of the whole stack
    in every layer, but that of a copy has the size of a layer.
    """
    if in_place:
        return state, nnx.State({})
    if not cached:
        return nnx.State({}), state
    # A prompt of few tokens reads experts only once, and a copy of all experts would take as long.
    experts, others = nnx.split_state(state, nnx.PathContains("experts"), ...)
    return experts, others
