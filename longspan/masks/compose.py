"""Rules made of other rules or of a user's function: `PerHead` and `Custom`."""

from collections.abc import Callable
from typing import Any, no_type_check

import jax.numpy as jnp
import numpy as np

from longspan._checks import check_custom, check_masks, check_truth
from longspan.masks.base import Extent, Mask, Spans, rule, short
from longspan.masks.side import KEYS, QUERIES


@rule
class PerHead(Mask):
    """Allows, for head n, what `masks[n]` allows.

    Args:
        masks: one mask a query head.

    Example:
        >>> from longspan import Causal, Full
        >>> print(PerHead((Causal(), Full())).show(2, 2, head=0))
        #.
        ##
    """

    masks: tuple[Mask, ...]

    def __post_init__(self):
        check_masks(self, "masks", Mask)

    def allowed(self, q, kv):
        return self._select(q.side, lambda mask: mask.allowed(q, kv))

    def classify(self, q, kv):
        kinds = [self._select(q.side, lambda mask, i=i: mask.classify(q, kv)[i]) for i in (0, 1)]
        return kinds[0], kinds[1]

    def kv_spans(self, q, kv):
        return self._spans(q.side, KEYS, lambda mask: mask.kv_spans(q, kv))

    def q_spans(self, kv, q):
        return self._spans(q.side, QUERIES, lambda mask: mask.q_spans(kv, q))

    def extents(self):
        yield Extent("PerHead.masks", "N", len(self.masks))
        for mask in self.masks:
            yield from mask.extents()

    def _select(self, side, of: Callable[[Mask], Any]):
        """Each head's own value, along the head axis."""
        xp, ((first, _), *others) = side.xp, self._groups()
        value = of(first)
        for mask, heads in others:
            value = xp.where(_is_one_of(side.head, heads), of(mask), value)
        return xp.broadcast_to(value, np.broadcast_shapes(value.shape, side.head.shape))

    def _spans(self, side, axis: int, of: Callable[[Mask], Spans]) -> Spans:
        """The spans of every head side by side; a head with fewer intervals gets empty ones."""
        parts = [(of(mask), heads) for mask, heads in self._groups()]
        most = max(spans.low.shape[axis] for spans, _ in parts)
        low, high, common = None, None, None
        for spans, heads in parts:
            mine = _is_one_of(side.head, heads)
            empty = [(0, most - spans.low.shape[axis]) if i == axis else (0, 0) for i in range(4)]
            padded = [side.xp.pad(a, empty) for a in (spans.low, spans.high)]
            low, high = (
                side.xp.where(mine, new, side.xp.zeros_like(new) if old is None else old)
                for old, new in zip((low, high), padded, strict=True)
            )
            if spans.common is not None:
                own = mine & spans.common
                common = own if common is None else common | own
        return Spans(low, high, common)

    def _groups(self) -> list[tuple[Mask, list[int]]]:
        """Equal masks once, with the heads that have them."""
        groups: dict[Any, tuple[Mask, list[int]]] = {}
        for head, mask in enumerate(self.masks):
            try:
                key = (type(mask), mask, hash(mask))
            except TypeError:  # it holds arrays: compared by identity
                key = id(mask)
            groups.setdefault(key, (mask, []))[1].append(head)
        return list(groups.values())

    def _arguments(self):
        return [f"({', '.join(map(repr, self.masks))}{',' if len(self.masks) == 1 else ''})"]


@rule
class Custom(Mask):
    """Allows where `fn(q, k, *arrays)` is true; `q` and `k` are positions that broadcast against each other.

    Without `bounds` no tile can be skipped (`explain` says so).

    Args:
        fn: any traceable function of two int arrays and the `arrays`; it returns bool.
        arrays: data of the rule; new values do not retrace. Traced values belong here: a function that closes over one
            cannot be differentiated or mapped by `engine="xla"`.
        bounds: `bounds(q, kv, *arrays) -> (may_any, must_all)` for tiles whose positions lie in
            [q.first, q.last] x [kv.first, kv.last]; both must hold for every pair of positions in them.

    Example:
        >>> print(Custom(lambda q, k: (q + k) % 2 == 0).show(3, 3))
        #.#
        .#.
        #.#
    """

    fn: Callable
    arrays: tuple = ()
    bounds: Callable | None = None

    @no_type_check
    def __init__(self, fn: Callable, *arrays, bounds: Callable | None = None):
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "bounds", bounds)
        check_custom(fn, bounds)

    def allowed(self, q, kv):
        # The user's function may use jax.numpy, whatever namespace the caller plans in.
        q_pos, kv_pos = jnp.asarray(q.position), jnp.asarray(kv.position)
        truth = jnp.asarray(self.fn(q_pos, kv_pos, *self.arrays))
        shape = np.broadcast_shapes(q_pos.shape, kv_pos.shape)
        check_truth(truth.shape, shape)
        truth = truth.astype(bool) & jnp.full(shape, True)
        return truth if q.side.xp is jnp else np.asarray(truth)

    def classify(self, q, kv):
        if self.bounds is None:
            return super().classify(q, kv)
        return self.bounds(q, kv, *self.arrays)

    def extents(self):
        yield from ()

    def _arguments(self):
        name = getattr(self.fn, "__name__", repr(self.fn))
        bounds = [] if self.bounds is None else [f"bounds={getattr(self.bounds, '__name__', repr(self.bounds))}"]
        return [name, *map(short, self.arrays), *bounds]


def _is_one_of(head, heads: list[int]):
    mine = head == heads[0]
    for other in heads[1:]:
        mine = mine | (head == other)
    return mine
