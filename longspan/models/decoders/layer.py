"""A decoder's layer: attention and a gated network, each added to its input, and normalised before."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from longspan.models.activations import ACTIVATIONS
from longspan.models.decoders._family import DecoderConfig
from longspan.models.decoders.attention import Attention, Tokens
from longspan.models.decoders.kept import Stacks
from longspan.models.decoders.products import linear_each
from longspan.models.decoders.runs import Run
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
        self, x: Float[Array, "B T D"], tokens: Tokens, kept: Any, at: Any = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The output, and the kept keys and values with the new ones; of a stack, that of layer `at`."""
        attended, kept = self.attention(self.attention_norm(x, at), tokens, kept, at)
        x = x + (self.attention_out_norm(attended, at) if self.config.family.branch_norms else attended)
        hidden = by_pieces(partial(self.mlp, at=at), self.mlp_norm(x, at))
        return x + (self.mlp_out_norm(hidden, at) if self.config.family.branch_norms else hidden), kept


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


def run_layers(graphs: tuple, runs: tuple[Run, ...], remat: bool, states: Any, x: jax.Array, tokens: Tokens, kept):
    """What all layers make of x, and their keys and values.

    By scans: each pattern is compiled once, and with `remat` the results of one are in memory at a time.

    Args:
        graphs: the structures of the stacks, by run.
        runs: the layers by their repeating pattern.
        remat: whether the backward pass computes each step again.
        states: the parameters of the stacks, by run.
        x: embeddings.
        tokens: what all layers know of the batch.
        kept: keys and values of each layer, or `Stacks` of them; or None.
    """
    stacks = None if kept is None else Stacks.of(runs, kept)
    after: list[Any] = []
    for number, (run, graph, state) in enumerate(zip(runs, graphs, states, strict=True)):

        def step(x, one, graph=graph):
            state, pairs = one
            new = []
            for place, structure in enumerate(graph):
                x, pair = nnx.merge(structure, state[place])(x, tokens, None if pairs is None else pairs[place])
                new.append(pair)
            return x, None if pairs is None else tuple(new)

        own = None if stacks is None else stacks.by_run[number]
        x, new = jax.lax.scan(jax.checkpoint(step) if remat else step, x, (state, own), run.count)
        after.append(new)
    if stacks is None:
        return x, None
    return x, Stacks(tuple(after)) if stacks is kept else Stacks(tuple(after)).pairs(runs)


def loop_layers(graphs: tuple, runs: tuple[Run, ...], states: Any, x: jax.Array, tokens: Tokens, stacks: Stacks):
    """`run_layers` for one new token of each row, by loops in which layers read and write where their stacks lie.

    A scan would copy every layer's matrices and caches out of the stacks, which takes longer than reading them.
    """
    after = []
    for run, graph, state, own in zip(runs, graphs, states, stacks.by_run, strict=True):

        def step(at, carry, graph=graph, state=state):
            x, pairs = carry
            new = []
            for structure, one, pair in zip(graph, state, pairs, strict=True):
                x, pair = nnx.merge(structure, one)(x, tokens, pair, at)
                new.append(pair)
            return x, tuple(new)

        x, new = jax.lax.fori_loop(np.int32(0), np.int32(run.count), step, (x, own))
        after.append(new)
    return x, Stacks(tuple(after))


def step_layers(graphs: tuple, runs: tuple[Run, ...], states: Any, x: jax.Array, tokens: Tokens, kept):
    """`run_layers` one after another, where caches are not stacked: nothing is copied, but every layer is compiled."""
    after: dict[int, Any] = {}
    for run, graph, state in zip(runs, graphs, states, strict=True):
        layers = [nnx.merge(structure, own) for structure, own in zip(graph, state, strict=True)]
        for at in range(run.count):
            for place, layer in enumerate(layers):
                number = run.numbers(place)[at]
                x, after[number] = layer(x, tokens, kept[number], at)
    return x, tuple(after[number] for number in range(len(after)))
