"""`MixtureOfExperts`: an MLP that computes each token with the experts that a router chooses for it.

Tokens are sorted by expert, so that each expert multiplies all of its tokens at once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from longspan.array_types import statistics_dtype
from longspan.axes import explicit_mesh, on_auto_axes, spec_entries
from longspan.models.activations import ACTIVATIONS
from longspan.models.decoders.family import DecoderConfig
from longspan.models.decoders.grouped import grouped_products
from longspan.models.decoders.mixture import route
from longspan.models.decoders.products import linear_each
from longspan.models.layers import linear


class MixtureOfExperts(nnx.Module):
    """Σ weight · expert(x) over the experts that a router chooses for a token.

    There is no capacity: no token is dropped.
    """

    def __init__(self, config: DecoderConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        assert config.mixture is not None
        self.mixture, biased = config.mixture, config.mixture.clamped is not None
        options: dict[str, Any] = dict(use_bias=biased, param_dtype=param_dtype, rngs=rngs)
        self.router = linear(config, config.hidden_size, self.mixture.count, dtype=dtype, **options)
        self.experts = Experts(config, **options)

    def __call__(self, x: Float[Array, "B T D"], at: Any = None, layer: Any = None) -> Float[Array, "B T D"]:
        """The output.

        Args:
            x: the input.
            at: of a stack of layers that is read in place, the index of this one; otherwise None.
            layer: the same index. It is used if the experts are a stack and the router is not.
        """
        if explicit_mesh(x) is None:
            return self._apply(x, at, layer)
        # Tokens of all rows are sorted together, which explicit axes do not express.
        graph, state = nnx.split(self)
        return on_auto_axes(_call_merged, _output_spec, (graph,), (state, x, at, layer))

    def _apply(self, x: jax.Array, at: Any, layer: Any) -> jax.Array:
        (logits,) = linear_each([self.router], x, at)
        chosen, weights = route(self.mixture, logits.reshape(-1, self.mixture.count))
        pairs = sort_by_expert(chosen, self.mixture.count)
        y = self.experts(x.reshape(-1, x.shape[-1])[pairs.tokens], pairs, layer, native=at is not None)
        y = y[pairs.places].reshape(*chosen.shape, -1)
        wide = statistics_dtype(x.dtype)
        total = jnp.sum(y.astype(wide) * weights.astype(wide)[..., None], axis=1)
        return total.astype(x.dtype).reshape(x.shape)


def _call_merged(graph: Any, state: Any, x: jax.Array, at: Any, layer: Any) -> jax.Array:
    return nnx.merge(graph, state)._apply(x, at, layer)


def _output_spec(graph: Any, operands: tuple, y: jax.Array) -> P:
    _, x, _, _ = operands
    return P(*spec_entries(x))


class Pairs(NamedTuple):
    """The pairs of a token and one of its experts, sorted by expert."""

    experts: jax.Array  # int32 [pairs]
    tokens: jax.Array  # int32 [pairs]
    places: jax.Array  # int32 [tokens · chosen]: the place of each token's pairs in this order
    sizes: jax.Array  # int32 [experts]: the number of tokens of each expert


def sort_by_expert(chosen: Int[Array, "tokens chosen"], count: int) -> Pairs:
    """The pairs of tokens and their chosen experts, of which there are `count`.

    Example:
        >>> sort_by_expert(jnp.array([[2, 0], [0, 1]]), 3).tokens
        Array([0, 1, 1, 0], dtype=int32)
    """
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(count, dtype=flat.dtype)[None], axis=0, dtype=np.int32)
    return Pairs(flat[order], order // np.int32(chosen.shape[1]), jnp.argsort(order), sizes)


class Experts(nnx.Module):
    """down(act(gate(x)) · up(x)), where each row is multiplied with the matrices of its own expert."""

    def __init__(self, config: DecoderConfig, *, use_bias: bool, param_dtype, rngs: nnx.Rngs):
        assert config.mixture is not None
        self.hidden_act, self.clamped = config.hidden_act, config.mixture.clamped
        inner = config.mixture.width
        options: dict[str, Any] = dict(use_bias=use_bias, param_dtype=param_dtype, rngs=rngs)
        if self.clamped is not None:
            self.gate_up = ExpertLinear(config, config.hidden_size, 2 * inner, **options)
        else:
            self.gate = ExpertLinear(config, config.hidden_size, inner, **options)
            self.up = ExpertLinear(config, config.hidden_size, inner, **options)
        self.down = ExpertLinear(config, inner, config.hidden_size, **options)

    def __call__(
        self, x: Float[Array, "pairs D"], pairs: Pairs, layer: Any = None, *, native: bool = False
    ) -> Float[Array, "pairs D"]:
        """The output for rows that are sorted by expert. The parameters may be a stack, of which `layer` is used."""
        apply = partial(apply_each, pairs=pairs, layer=layer, native=native)
        if self.clamped is not None:
            (gate_up,) = apply([self.gate_up], x)
            hidden = self.clamped(gate_up[:, ::2], gate_up[:, 1::2])
        else:
            gate, up = apply([self.gate, self.up], x)
            hidden = ACTIVATIONS[self.hidden_act](gate) * up
        return apply([self.down], hidden)[0]


class ExpertLinear(nnx.Module):
    """A linear layer for each expert: kernels [experts, inputs, outputs]."""

    def __init__(self, config: DecoderConfig, inputs: int, outputs: int, *, use_bias: bool, param_dtype, rngs):
        assert config.mixture is not None
        init, count = nnx.initializers.normal(config.initializer_range), config.mixture.count
        self.kernel = nnx.Param(init(rngs.params(), (count, inputs, outputs), param_dtype))
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((count, outputs), param_dtype))


def apply_each(
    layers: Sequence[ExpertLinear], x: jax.Array, *, pairs: Pairs, layer: Any, native: bool
) -> list[jax.Array]:
    """[expert(x) for expert in layers], where each row of x has its own expert."""
    kernels = [each.kernel[...] for each in layers]
    if kernels[0].ndim == 3:  # not a stack
        layer = None
    outputs = []
    for y, each in zip(grouped_products(x, kernels, pairs.sizes, layer, native=native), layers, strict=True):
        if each.bias is not None:
            own = pairs.experts if layer is None else (layer, pairs.experts)
            y = y + each.bias[...][own].astype(y.dtype)
        outputs.append(y)
    return outputs
