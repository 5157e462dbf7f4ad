"""A decoder's layer: attention and a gated network, each added to its input, and normalised before."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from longspan.models.activations import ACTIVATIONS
from longspan.models.decoders.attention import Attention, Tokens
from longspan.models.decoders.family import DecoderConfig
from longspan.models.decoders.products import linear_each
from longspan.models.decoders.runs import Run, by_run
from longspan.models.layers import by_pieces, linear, rms_norm


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); in some families each branch has a second norm."""

    def __init__(self, config: DecoderConfig, kind: str, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        self.config = config
        self.attention_norm = rms_norm(config, config.hidden_size, **kinds)
        self.attention = Attention(config, kind, **kinds, rngs=rngs)
        self.mlp_norm = rms_norm(config, config.hidden_size, **kinds)
        self.mlp = GatedMLP(config, **kinds, rngs=rngs)
        if config.family.branch_norms:
            self.attention_out_norm = rms_norm(config, config.hidden_size, **kinds)
            self.mlp_out_norm = rms_norm(config, config.hidden_size, **kinds)

    def __call__(
        self, x: Float[Array, "B T D"], tokens: Tokens, stack: Any = None, layer: Any = None, at: Any = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The output, and the stack of keys and values with the new ones; see `Attention`."""
        attended, stack = self.attention(self.attention_norm(x, at), tokens, stack, layer, at)
        x = x + (self.attention_out_norm(attended, at) if self.config.family.branch_norms else attended)
        hidden = by_pieces(partial(self.mlp, at=at), self.mlp_norm(x, at))
        return x + (self.mlp_out_norm(hidden, at) if self.config.family.branch_norms else hidden), stack


class GatedMLP(nnx.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, config: DecoderConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        self.config = config
        inner, bias = config.intermediate_size, config.biases[2]
        kinds: dict[str, Any] = dict(use_bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        if config.family.fused:
            self.gate_up = linear(config, config.hidden_size, 2 * inner, **kinds)
        else:
            self.gate = linear(config, config.hidden_size, inner, **kinds)
            self.up = linear(config, config.hidden_size, inner, **kinds)
        self.down = linear(config, inner, config.hidden_size, **kinds)

    def __call__(self, x: Float[Array, "B T D"], at: Any = None) -> Float[Array, "B T D"]:
        """The output; of a stack, that of layer `at`."""
        if self.config.family.fused:
            (both,) = linear_each([self.gate_up], x, at)
            gate, up = jnp.split(both, 2, axis=-1)
        else:
            gate, up = linear_each([self.gate, self.up], x, at)
        return linear_each([self.down], ACTIVATIONS[self.config.hidden_act](gate) * up, at)[0]


def stack(config: DecoderConfig, kind: str, count: int, *, dtype, param_dtype, rngs: nnx.Rngs) -> Layer:
    """Some layers of one kind as one, whose parameters have the layers as their first axis."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap
    def make(rngs):
        return Layer(config, kind, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    return make(rngs)


def run_layers(
    graphs: tuple,
    runs: tuple[Run, ...],
    in_place: bool,
    remat: bool,
    states: tuple,
    x: jax.Array,
    tokens: Tokens,
    stacks,
) -> tuple[jax.Array, tuple]:
    """What all layers make of x, and the stacks of their keys and values.

    One loop for each repeating pattern, which is compiled once; with `remat` the results of one step are in memory at
    a time.

    Args:
        graphs: the structures of the stacks of layers.
        runs: the layers by their repeating pattern.
        in_place: whether layers read parameters, keys and values where they lie, for few tokens: copying them out of
            their stacks would take longer than reading them.
        remat: whether the backward pass computes each step again.
        states: the parameters of the stacks of layers.
        x: embeddings.
        tokens: what all layers know of the batch.
        stacks: keys and values, stacked as the layers are; None for each without a cache.
    """
    after: list[Any] = []
    for run, *parts in zip(runs, *(by_run(runs, each) for each in (graphs, states, stacks)), strict=True):
        graph, state, own = parts

        def step(carry, sliced, graph=graph, state=state):
            layer, x, own = carry
            new = []
            for structure, parameters, stack in zip(graph, state if in_place else sliced, own, strict=True):
                one = nnx.merge(structure, parameters)
                x, stack = one(x, tokens, stack, layer, layer if in_place else None)
                new.append(stack)
            return (layer + 1, x, tuple(new)), None

        carry, sliced = (np.int32(0), x, own), None if in_place else state
        (_, x, own), _ = jax.lax.scan(jax.checkpoint(step) if remat else step, carry, sliced, run.count)
        after += own
    return x, tuple(after)
