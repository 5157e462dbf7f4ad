"""The cache of a decoder: keys and values of all layers, stacked as the layers' parameters are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from longspan import cache as caches
from longspan.array_types import Array, no_type_check
from longspan.attend import attention, attention_of_layer, plan_attention_layout
from longspan.cache import Cache
from longspan.cache.checks import check_dtype, check_rows
from longspan.cache.store import AppendStep, without_keys
from longspan.checks import check_static_size, is_known
from longspan.engines import put
from longspan.layout import BlockLayout
from longspan.models.decoders.family import DecoderConfig
from longspan.models.decoders.runs import Run

if TYPE_CHECKING:
    Stack = tuple[jax.Array, jax.Array]
else:
    Stack = Any  # not shapes: JAX rebuilds the object with placeholders


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderCache:
    """The caches of all layers of a `CausalLM`. Made by `CausalLM.init_cache`; every method gives a new one.

    A pytree of static shapes, which a call takes and returns in `output.cache`; donate it to `jit` to have it updated
    in place. Keys and values are stacked as the parameters of layers are, so that a step is one loop over layers.
    Layers of one kind hold the same positions in the same slots, which are stored once. `cache[i]` is the
    `longspan.cache.Cache` of layer i.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.MistralConfig(
        ...     vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=3, num_key_value_heads=1,
        ...     sliding_window=4, intermediate_size=8,
        ... )
        >>> model = models.CausalLM(config, rngs=nnx.Rngs(0))
        >>> cache = model(jnp.array([[3, 7, 5], [2, 2, 9]]), cache=model.init_cache(batch=2, length=100)).cache
        >>> len(cache), cache.length.tolist(), cache[0].k.shape, cache.stacks[0][0].shape
        (3, [3, 3], (2, 4, 1, 4), (3, 2, 4, 1, 4))
    """

    stacks: tuple[Stack, ...]  # keys and values of each of the model's `layers`, [layers, B, capacity, K, H]
    slots: dict[str, Cache]  # by kind of layer: a cache without keys and values
    runs: tuple[Run, ...] = field(metadata=dict(static=True))  # which layers lie in which stack

    @property
    def length(self) -> jax.Array:
        """How many tokens each row has, int32 [B]."""
        return next(iter(self.slots.values())).length

    @property
    def max_length(self) -> int:
        """How many tokens a row may have."""
        return next(iter(self.slots.values())).plan.length

    @property
    def nbytes(self) -> int:
        """How many bytes all keys and values take."""
        return sum(x.nbytes for x in jax.tree.leaves(self.stacks))

    def __len__(self) -> int:
        return sum(len(run.kinds) * run.count for run in self.runs)

    def __getitem__(self, number: int) -> Cache:
        """The cache of one layer."""
        kind, stack, at = _places(self.runs)[number]
        k, v = self.stacks[stack]
        return replace(self.slots[kind], k=k[at], v=v[at])

    def __iter__(self) -> Iterator[Cache]:
        return (self[number] for number in range(len(self)))

    @no_type_check
    def fork(self, rows: Int[Array, "rows"]) -> "DecoderCache":
        """A cache whose rows are copies of some rows of this one: beams, or a shared prefix.

        Args:
            rows: ints [n], the rows to take.
        """
        batch = self.length.shape[0]
        inside = jnp.clip(check_rows(rows, batch), 0, batch - 1)
        stacks = jax.tree.map(lambda x: jnp.take(x, inside, axis=1), self.stacks)
        return replace(self, stacks=stacks, slots={kind: slots.fork(rows) for kind, slots in self.slots.items()})

    @no_type_check
    def rollback(self, n: int | Int[Array, "B"]) -> "DecoderCache":
        """The cache without the last n tokens of each row, if no layer has evicted a key since then.

        Args:
            n: an int, or ints [B].
        """
        return replace(self, slots={kind: slots.rollback(n) for kind, slots in self.slots.items()})

    def with_layers(self, layers: Sequence[Cache]) -> "DecoderCache":
        """A cache like this one that holds what `layers` hold, one per layer: those that `ls.cache.restore` read.

        Args:
            layers: caches as `cache[i]` gives them, for as many rows as one likes.
        """
        places = _places(self.runs)
        _check_layers(self, places, layers)
        stacks = []
        for stack in range(len(self.stacks)):
            own = [layer for layer, (_, number, _) in zip(layers, places, strict=True) if number == stack]
            stacks.append((jnp.stack([layer.k for layer in own]), jnp.stack([layer.v for layer in own])))
        slots = {kind: replace(layers[_first(places, kind)], k=None, v=None) for kind in self.slots}
        return replace(self, stacks=tuple(stacks), slots=slots)

    def advanced(self, count: int, lengths: Any) -> tuple["DecoderCache", dict[str, AppendStep]]:
        """The cache with the positions of new tokens, and by kind of layer the step that writes them."""
        both = {kind: cache.advance(count, lengths) for kind, cache in self.slots.items()}
        steps = {kind: step for kind, (_, step) in both.items()}
        return replace(self, slots={kind: cache for kind, (cache, _) in both.items()}), steps


def empty_cache(config: DecoderConfig, batch: int, length: int, dtype: Any) -> DecoderCache:
    """A cache without tokens, planned from the masks of the layers."""
    check_dtype(dtype)
    batch, (_, kv_heads, size) = check_static_size("batch", batch, 1), config.heads
    plans = {kind: caches.plan(config.mask(kind), length) for kind in dict.fromkeys(config.kinds)}
    stacks = []
    for count, kind in [(run.count, kind) for run in config.runs for kind in run.kinds]:
        shape = count, batch, plans[kind].capacity, kv_heads, size
        stacks.append((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))
    return DecoderCache(tuple(stacks), {kind: without_keys(plan, batch) for kind, plan in plans.items()}, config.runs)


def attend_cached(
    step: AppendStep,
    stack: Stack,
    layer: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    in_place: bool,
    **options: Any,
) -> tuple[Stack, jax.Array]:
    """The stack with new keys and values in one layer, and what new queries see there.

    Args:
        step: where the new tokens go.
        stack: keys and values of several layers.
        layer: which of them, traced.
        q: new queries [B, T, N, H].
        k: new keys.
        v: new values.
        in_place: whether the layer is read and written where it lies; else it is copied out of its stack and back.
        options: of `attention`, the layout among them.
    """
    if in_place and step.order is None and stack[0].dtype == q.dtype:
        k_stack, v_stack = (put(x, layer, step.slots, new) for x, new in zip(stack, (k, v), strict=True))
        static = tuple((name, value) for name, value in options.items() if name != "mask")
        return (k_stack, v_stack), _attend_layer(k_stack.shape[0], static, q, k_stack, v_stack, layer, options["mask"])
    both = [step.write(_layer(x, layer), new) for x, new in zip(stack, (k, v), strict=True)]
    k_stack, v_stack = (_with_layer(x, layer, one) for x, (one, _) in zip(stack, both, strict=True))
    return (k_stack, v_stack), attention(q, *(seen.astype(q.dtype) for _, seen in both), **options)


def layouts(config: DecoderConfig, steps: Mapping[str, AppendStep], dtype: Any) -> dict[str, BlockLayout]:
    """What new tokens visit, by kind of layer: planned once for all of its layers."""
    heads, kv_heads, size = config.heads
    found = {}
    for kind, step in steps.items():
        (batch, count), seen = step.q_positions.shape, step.kv_positions.shape[1]
        q = jax.ShapeDtypeStruct((batch, count, heads, size), dtype)
        kv = jax.ShapeDtypeStruct((batch, seen, kv_heads, size), dtype)
        options = dict(scale=config.scale, soft_cap=config.soft_cap)
        found[kind] = plan_attention_layout(q, kv, kv, **step.of(config.mask(kind)), **options)
    return found


@lru_cache(maxsize=64)
def _places(runs: tuple[Run, ...]) -> tuple[tuple[str, int, int], ...]:
    """Of each layer, its kind, its stack and its place in it."""
    found, stack = {}, 0
    for run in runs:
        for place, kind in enumerate(run.kinds):
            found |= {number: (kind, stack, at) for at, number in enumerate(run.numbers(place))}
            stack += 1
    return tuple(found[number] for number in range(len(found)))


def _first(places: Sequence[tuple[str, int, int]], kind: str) -> int:
    """The first layer of a kind."""
    return next(number for number, place in enumerate(places) if place[0] == kind)


def _layer(stack: jax.Array, layer: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False, allow_negative_indices=False)


def _with_layer(stack: jax.Array, layer: Any, one: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, one, layer, 0, allow_negative_indices=False)


def _check_layers(cache: DecoderCache, places: Sequence[tuple[str, int, int]], layers: Sequence[Any]) -> None:
    if len(layers) != len(places):
        raise ValueError(f"`layers` must be {len(places)} caches, one per layer, got {len(layers)}.")
    for number, (layer, (kind, _, _)) in enumerate(zip(layers, places, strict=True)):
        if not isinstance(layer, Cache):
            raise TypeError(f"`layers` must be what `cache[i]` gives for each layer, got {type(layer).__name__}.")
        if layer.plan != cache.slots[kind].plan:
            raise ValueError(
                f"Layer {number} has another plan, {layer.plan!r}; here it is {cache.slots[kind].plan!r}. Make this "
                "cache with the same model and length: `model.init_cache(batch, length)`."
            )
        first = layers[_first(places, kind)]
        known = is_known(layer.positions) and is_known(first.positions)
        if known and not np.array_equal(layer.positions, first.positions):
            raise ValueError(
                f"Layers {_first(places, kind)} and {number} are of one kind, '{kind}', but hold different positions. "
                "Give the layers of one cache, after the same tokens."
            )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_layer(layers: int, static: tuple, q, k, v, layer, mask):
    """`attention_of_layer`, with gradients."""
    return attention_of_layer(q, k, v, layer, mask=mask, **dict(static))


def _attend_forward(layers: int, static: tuple, q, k, v, layer, mask):
    # Of the stacks only the layer is kept for the backward pass, or a loop over layers would keep all of them in each.
    residuals = q, _layer(k, layer), _layer(v, layer), layer, mask
    return _attend_layer(layers, static, q, k, v, layer, mask), residuals


def _attend_backward(layers: int, static: tuple, residuals, dout):
    q, k, v, layer, mask = residuals
    dq, dk, dv = jax.vjp(lambda *qkv: attention(*qkv, mask=mask, **dict(static)), q, k, v)[1](dout)
    dk, dv = (jnp.zeros((layers, *x.shape), x.dtype).at[layer].set(x) for x in (dk, dv))
    return dq, dk, dv, None, None


_attend_layer.defvjp(_attend_forward, _attend_backward)
