"""The caches of all layers together. Those of one kind hold the same positions in the same slots: that is kept once."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longspan._attention import planned
from longspan.cache import Cache
from longspan.layout import BlockLayout
from longspan.models.decoders._family import DecoderConfig
from longspan.models.decoders.runs import Run


class Stacks(NamedTuple):
    """Keys and values of all layers, stacked as their parameters are: a loop over layers takes and gives them so."""

    by_run: tuple[tuple[tuple[Any, Any], ...], ...]  # of each run and place in its pattern, [layers, B, capacity, K, H]

    @classmethod
    def of(cls, runs: tuple[Run, ...], pairs: "tuple[tuple[Any, Any], ...] | Stacks") -> "Stacks":
        """Those of each layer, stacked, unless they are already."""
        if isinstance(pairs, cls):
            return pairs
        return cls(tuple(tuple(_stacked(pairs, run, place) for place in range(len(run.kinds))) for run in runs))

    def pairs(self, runs: tuple[Run, ...]) -> tuple[tuple[Any, Any], ...]:
        """Those of each layer."""
        found = {
            number: (k[at], v[at])
            for run, places in zip(runs, self.by_run, strict=True)
            for place, (k, v) in enumerate(places)
            for at, number in enumerate(run.numbers(place))
        }
        return tuple(found[number] for number in range(len(found)))


def _stacked(pairs: tuple, run: Run, place: int) -> tuple[jax.Array, jax.Array]:
    own = [pairs[number] for number in run.numbers(place)]
    return jnp.stack([k for k, _ in own]), jnp.stack([v for _, v in own])


class Kept(NamedTuple):
    """Keys and values by layer, and by kind of layer where they are."""

    pairs: tuple[tuple[Any, Any], ...] | Stacks  # (k, v) of each layer, [B, capacity, K, H]; or all of them, stacked
    slots: dict[str, Cache]  # by kind: a cache without keys and values

    @classmethod
    def of(cls, config: DecoderConfig, caches: tuple[Cache, ...]) -> "Kept":
        """Caches as they are kept."""
        slots = {kind: replace(cache, k=None, v=None) for kind, cache in zip(config.kinds, caches, strict=True)}
        return cls(tuple((cache.k, cache.v) for cache in caches), slots)

    def caches(self, config: DecoderConfig) -> tuple[Cache, ...]:
        """The cache of each layer."""
        pairs = self.pairs.pairs(config.runs) if isinstance(self.pairs, Stacks) else self.pairs
        each = zip(config.kinds, pairs, strict=True)
        return tuple(replace(self.slots[kind], k=k, v=v) for kind, (k, v) in each)

    @property
    def length(self) -> jax.Array:
        """How many tokens each row has, int32 [B]."""
        return next(iter(self.slots.values())).length

    @property
    def capacity(self) -> int:
        """How many tokens a row may have."""
        return next(iter(self.slots.values())).plan.length

    def advanced(self, count: int, lengths: Any) -> tuple["Kept", dict[str, Any]]:
        """With the positions of new tokens, and by kind of layer the step that writes them."""
        both = {kind: cache.advance(count, lengths) for kind, cache in self.slots.items()}
        steps = {kind: step for kind, (_, step) in both.items()}
        return self._replace(slots={kind: cache for kind, (cache, _) in both.items()}), steps


def layouts(config: DecoderConfig, steps: dict[str, Any], dtype: Any) -> dict[str, BlockLayout]:
    """What new tokens visit, by kind of layer: planned once for all of its layers."""
    heads, kv_heads, size = config.heads
    found = {}
    for kind, step in steps.items():
        (batch, count), seen = step.q_positions.shape, step.kv_positions.shape[1]
        q = jax.ShapeDtypeStruct((batch, count, heads, size), dtype)
        kv = jax.ShapeDtypeStruct((batch, seen, kv_heads, size), dtype)
        options = dict(scale=config.scale, soft_cap=config.soft_cap)
        found[kind] = planned(q, kv, kv, **step.of(config.mask(kind)), **options)
    return found
