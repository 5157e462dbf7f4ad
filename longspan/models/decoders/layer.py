"""A decoder's layer: attention and a gated network, each added to its input, and normalised before."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longspan.cache import Cache
from longspan.models.activations import ACTIVATIONS
from longspan.models.decoders._family import DecoderConfig
from longspan.models.decoders.attention import Attention, Tokens
from longspan.models.decoders.norm import RMSNorm
from longspan.models.layers import by_pieces, linear


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); in some families each branch has a second norm."""

    def __init__(self, config: DecoderConfig, kind: str, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        self.config = config
        self.attention_norm = RMSNorm(config, config.hidden_size, **kinds)
        self.attention = Attention(config, kind, **kinds, rngs=rngs)
        self.mlp_norm = RMSNorm(config, config.hidden_size, **kinds)
        self.mlp = GatedMLP(config, **kinds, rngs=rngs)
        if config.family.branch_norms:
            self.attention_out_norm = RMSNorm(config, config.hidden_size, **kinds)
            self.mlp_out_norm = RMSNorm(config, config.hidden_size, **kinds)

    def __call__(
        self, x: Float[Array, "B T D"], tokens: Tokens, cache: Cache | None
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        attended, cache = self.attention(self.attention_norm(x), tokens, cache)
        x = x + (self.attention_out_norm(attended) if self.config.family.branch_norms else attended)
        hidden = by_pieces(self.mlp, self.mlp_norm(x))
        return x + (self.mlp_out_norm(hidden) if self.config.family.branch_norms else hidden), cache


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

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1) if self.config.family.fused else (self.gate(x), self.up(x))
        return self.down(ACTIVATIONS[self.config.hidden_act](gate) * up)


def stack(config: DecoderConfig, kind: str, count: int, *, dtype, param_dtype, rngs: nnx.Rngs) -> Layer:
    """Some layers of one kind as one, whose parameters have the layers as their first axis."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap
    def make(rngs):
        return Layer(config, kind, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    return make(rngs)


def run_layers(graphs: tuple, counts: tuple[int, ...], remat: bool, states: Any, x: jax.Array, tokens: Tokens, caches):
    """What all layers make of x, and their caches.

    By scans: each pattern is compiled once, and with `remat` the results of one are in memory at a time.

    Args:
        graphs: the structures of the stacks, by run.
        counts: how often each run repeats its pattern.
        remat: whether the backward pass computes each step again.
        states: the parameters of the stacks, by run.
        x: embeddings.
        tokens: what all layers know of the batch.
        caches: by run, and by place in its pattern; or None.
    """
    after = []
    for number, graph in enumerate(graphs):

        def step(x, one, graph=graph):
            state, cache = one
            new = []
            for place, structure in enumerate(graph):
                x, kept = nnx.merge(structure, state[place])(x, tokens, None if cache is None else cache[place])
                new.append(kept)
            return x, None if cache is None else tuple(new)

        cache = None if caches is None else caches[number]
        x, new = jax.lax.scan(jax.checkpoint(step) if remat else step, x, (states[number], cache), counts[number])
        after.append(new)
    return x, None if caches is None else tuple(after)
