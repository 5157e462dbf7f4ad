"""`DecoderCache`: the keys and values of all layers of a decoder, stacked like the parameters of the layers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from longspan import cache as caches
from longspan.array_types import Array, no_type_check
from longspan.attend import attention, attention_of_layer, plan_attention_layout
from longspan.cache import Cache
from longspan.cache.checks import check_dtype, check_order, check_rows
from longspan.cache.store import AppendStep, in_order, slots_first, without_keys
from longspan.checks import check_static_size, is_known
from longspan.engines import put
from longspan.layout import BlockLayout
from longspan.models.decoders.family import DecoderConfig
from longspan.models.decoders.runs import LayerRun

if TYPE_CHECKING:
    Stack = tuple[jax.Array, jax.Array]
else:
    Stack = Any  # not shapes: JAX rebuilds the object with placeholders, which a type checker would reject


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderCache:
    """The caches of all layers of a `CausalLM`. `CausalLM.init_cache` makes one; every method returns a new one.

    A pytree of static shapes, which a call takes and returns in `output.cache`. Donate it to `jit` to have it updated
    in place. Keys and values are stacked like the parameters of the layers, so a decode step is one loop over layers.
    Layers of one kind hold the same positions in the same slots, so their positions are stored once. `cache[i]` is the
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

    # (k, v) of each of the model's layers: [layers, B, capacity, K, H]; with `heads_first` [layers, B, K, capacity, H]
    stacks: tuple[Stack, ...]
    slots: dict[str, Cache]  # by kind of layer: a cache of positions, without keys and values
    runs: tuple[LayerRun, ...] = field(metadata=dict(static=True))  # the layers of each stack

    @property
    def length(self) -> jax.Array:
        """The number of tokens of each row, int32 [B]."""
        return next(iter(self.slots.values())).length

    @property
    def max_length(self) -> int:
        """The number of tokens per row that the cache was made for."""
        return next(iter(self.slots.values())).plan.length

    @property
    def heads_first(self) -> bool:
        """Whether heads come before slots in the keys and values of every layer."""
        return next(iter(self.slots.values())).heads_first

    @property
    def kv_sizes(self) -> tuple[int, int]:
        """The number of key/value heads and the head size."""
        shape = self.stacks[0][0].shape
        return shape[3 - self.heads_first], shape[4]

    @property
    def nbytes(self) -> int:
        """The size of all keys and values in bytes."""
        return sum(x.nbytes for x in jax.tree.leaves(self.stacks))

    def __len__(self) -> int:
        return sum(len(run.kinds) * run.count for run in self.runs)

    def __getitem__(self, number: int) -> Cache:
        """The cache of one layer."""
        place = _places(self.runs)[number]
        k, v = self.stacks[place.stack]
        return replace(self.slots[place.kind], k=k[place.index], v=v[place.index])

    def __iter__(self) -> Iterator[Cache]:
        return (self[number] for number in range(len(self)))

    @no_type_check
    def fork(self, rows: Int[Array, "rows"]) -> "DecoderCache":
        """A cache whose rows are copies of rows of this one, for beams or a shared prefix.

        Args:
            rows: ints [n], the rows to copy.
        """
        batch = self.length.shape[0]
        inside = jnp.clip(check_rows(rows, batch), 0, batch - 1)
        stacks = jax.tree.map(lambda x: jnp.take(x, inside, axis=1), self.stacks)
        return replace(self, stacks=stacks, slots={kind: slots.fork(rows) for kind, slots in self.slots.items()})

    @no_type_check
    def rollback(self, n: int | Int[Array, "B"]) -> "DecoderCache":
        """The cache without the last n tokens of each row.

        A layer that evicts keys, such as a sliding layer, can go back at most `slack` tokens from the largest length
        that the row has had. Give `slack` to `CausalLM.init_cache`; by default it is 0, and such a model raises a
        ValueError for every n > 0.

        Args:
            n: the number of tokens, an int or ints [B].
        """
        return replace(self, slots={kind: slots.rollback(n) for kind, slots in self.slots.items()})

    def with_layers(self, layers: Sequence[Cache]) -> "DecoderCache":
        """A cache with the contents of `layers`, one `Cache` per layer, for example from `ls.cache.restore`.

        Args:
            layers: caches like those of `cache[i]`. They may have any number of rows, and heads before or after slots.
        """
        places = _places(self.runs)
        _check_layers(self, places, layers)
        layers = [in_order(layer, self.heads_first) for layer in layers]
        stacks = []
        for number in range(len(self.stacks)):
            members = [layer for layer, place in zip(layers, places, strict=True) if place.stack == number]
            stacks.append((jnp.stack([layer.k for layer in members]), jnp.stack([layer.v for layer in members])))
        slots = {kind: replace(layers[_first_layer(places, kind)], k=None, v=None) for kind in self.slots}
        return replace(self, stacks=tuple(stacks), slots=slots)

    def advanced(self, count: int, lengths: Any) -> tuple["DecoderCache", dict[str, AppendStep]]:
        """The cache with the positions of new tokens, and by kind of layer the step that writes them."""
        slots, steps = {}, {}
        for kind, cache in self.slots.items():
            slots[kind], steps[kind] = cache.advance(count, lengths)
        return replace(self, slots=slots), steps


def empty_cache(
    config: DecoderConfig, batch: int, length: int, dtype: Any, slack: int = 0, *, heads_first: bool = False
) -> DecoderCache:
    """A cache without tokens, planned from the masks of the layers."""
    check_dtype(dtype)
    check_order(heads_first)
    batch = check_static_size("batch", batch, 1)
    _, kv_heads, head_dim = config.heads
    plans = {kind: caches.plan(config.mask(kind), length, slack=slack) for kind in dict.fromkeys(config.kinds)}
    stacks = []
    for run in config.runs:
        for kind in run.kinds:
            capacity = plans[kind.attention].capacity
            slots_and_heads = capacity, kv_heads
            if heads_first:
                slots_and_heads = kv_heads, capacity
            shape = run.count, batch, *slots_and_heads, head_dim
            stacks.append((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))
    slots = {kind: without_keys(plan, batch, heads_first) for kind, plan in plans.items()}
    return DecoderCache(tuple(stacks), slots, config.runs)


def attend_cached(
    step: AppendStep,
    stack: Stack,
    layer: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    in_place: bool,
    sinks: jax.Array | None = None,
    **options: Any,
) -> tuple[Stack, jax.Array]:
    """The stack with new keys and values in one layer, and the attention of new queries over that layer.

    Args:
        step: the slots of the new tokens.
        stack: keys and values of several layers.
        layer: the index of the layer in the stack, traced.
        q: new queries [B, T, N, H].
        k: new keys.
        v: new values.
        in_place: whether to read and write the layer inside its stack; otherwise it is copied out and back.
        sinks: one logit per query head, or None.
        options: keyword arguments of `attention`, with the layout as `mask`.
    """
    k_stack, v_stack = stack
    if in_place and step.order is None and k_stack.dtype == q.dtype:
        order = step.heads_first
        k_stack = put(k_stack, layer, step.slots, k, heads_first=order)
        v_stack = put(v_stack, layer, step.slots, v, heads_first=order)
        static = tuple((name, value) for name, value in options.items() if name != "mask")
        out: Any = _attend_layer(k_stack.shape[0], order, static, q, k_stack, v_stack, layer, options["mask"], sinks)
        return (k_stack, v_stack), out
    k_layer, k_visible = step.write(_take_layer(k_stack, layer), k)
    v_layer, v_visible = step.write(_take_layer(v_stack, layer), v)
    out = attention(q, k_visible.astype(q.dtype), v_visible.astype(q.dtype), sinks=sinks, **options)
    return (_put_layer(k_stack, layer, k_layer), _put_layer(v_stack, layer, v_layer)), out


def plan_layouts(config: DecoderConfig, steps: Mapping[str, AppendStep], dtype: Any) -> dict[str, BlockLayout]:
    """The key tiles that new tokens visit, planned once for all layers of a kind."""
    heads, kv_heads, head_dim = config.heads
    found = {}
    for kind, step in steps.items():
        batch, q_len = step.q_positions.shape
        q = jax.ShapeDtypeStruct((batch, q_len, heads, head_dim), dtype)
        kv = jax.ShapeDtypeStruct((batch, step.kv_positions.shape[1], kv_heads, head_dim), dtype)
        options = dict(scale=config.scale, soft_cap=config.soft_cap)
        found[kind] = plan_attention_layout(q, kv, kv, **step.of(config.mask(kind)), **options)
    return found


class _Place(NamedTuple):
    """The kind of a layer's attention, its stack, and its index in the stack."""

    kind: str
    stack: int
    index: int


@lru_cache(maxsize=64)
def _places(runs: tuple[LayerRun, ...]) -> tuple[_Place, ...]:
    """The place of each layer, by the layer's number."""
    found, stack = {}, 0
    for run in runs:
        for place, kind in enumerate(run.kinds):
            for index, number in enumerate(run.numbers(place)):
                found[number] = _Place(kind.attention, stack, index)
            stack += 1
    return tuple(found[number] for number in range(len(found)))


def _first_layer(places: Sequence[_Place], kind: str) -> int:
    """The number of the first layer of a kind."""
    return next(number for number, place in enumerate(places) if place.kind == kind)


def _take_layer(stack: jax.Array, layer: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False, allow_negative_indices=False)


def _put_layer(stack: jax.Array, layer: Any, values: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, values, layer, 0, allow_negative_indices=False)


def _check_layers(cache: DecoderCache, places: Sequence[_Place], layers: Sequence[Any]) -> None:
    if len(layers) != len(places):
        raise ValueError(f"`layers` must be {len(places)} caches, one per layer, got {len(layers)}.")
    for number, (layer, place) in enumerate(zip(layers, places, strict=True)):
        kind, plan = place.kind, cache.slots[place.kind].plan
        if not isinstance(layer, Cache):
            raise TypeError(
                f"`layers` must be caches of type `longspan.cache.Cache`, like `cache[i]`, got {type(layer).__name__}."
            )
        if layer.plan != plan:
            raise ValueError(
                f"Layer {number} has the plan {layer.plan!r}, but this cache has {plan!r}. `layers` must come from a "
                "cache with the same model, length and slack as this cache: `model.init_cache(batch, length, "
                "slack=...)`."
            )
        first = _first_layer(places, kind)
        both_known = is_known(layer.positions) and is_known(layers[first].positions)
        if both_known and not np.array_equal(layer.positions, layers[first].positions):
            raise ValueError(
                f"Layers {first} and {number} are both of kind '{kind}', but hold different positions. Layers of one "
                "kind must hold the same positions. Give the layers of one cache, all taken after the same tokens."
            )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend_layer(layers: int, heads_first: bool, static: tuple, q, k, v, layer, mask, sinks):
    """Attention over one layer of the stacks k and v, with gradients."""
    return attention_of_layer(q, k, v, layer, mask=mask, sinks=sinks, heads_first=heads_first, **dict(static))


def _attend_forward(layers: int, heads_first: bool, static: tuple, q, k, v, layer, mask, sinks):
    # The residuals are the layer's keys and values, not the stacks: a loop over layers would save the stacks each time.
    residuals = q, _take_layer(k, layer), _take_layer(v, layer), layer, mask, sinks
    return _attend_layer(layers, heads_first, static, q, k, v, layer, mask, sinks), residuals


def _attend_backward(layers: int, heads_first: bool, static: tuple, residuals, dout):
    q, k, v, layer, mask, sinks = residuals

    def attend(q, k, v, sinks):
        k, v = slots_first(k, heads_first), slots_first(v, heads_first)
        return attention(q, k, v, mask=mask, sinks=sinks, **dict(static))

    dq, dk, dv, dsinks = jax.vjp(attend, q, k, v, sinks)[1](dout)
    dk_stack = jnp.zeros((layers, *dk.shape), dk.dtype).at[layer].set(dk)
    dv_stack = jnp.zeros((layers, *dv.shape), dv.dtype).at[layer].set(dv)
    return dq, dk_stack, dv_stack, None, None, dsinks


_attend_layer.defvjp(_attend_forward, _attend_backward)
