"""The lifetime of each key under a mask: from its own position to the last query that may attend to it."""

from collections.abc import Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import jax
import numpy as np

from longspan.array_types import FAR
from longspan.cache.outline import Outline, every_position, find_outline
from longspan.masks import Mask
from longspan.masks.algebra import combine_periodicities

MAX_CACHED_LENGTH = 2**22  # positions: longer plans and lifetimes are not cached, they would take 300 MB each


class Lifetimes(NamedTuple):
    """The lifetimes of a mask's keys, in NumPy, at the positions of an outline."""

    last: np.ndarray  # int64 [keys]: the last query that may attend to each key, -1 if there is none
    tied: np.ndarray  # bool [keys]: the position must be in the same append as the position before it
    outline: Outline


def lifetimes(mask: Mask, length: int, slack: int = 0, margin_factor: int | None = 1) -> Lifetimes:
    """The lifetimes of a mask's keys. They do not depend on its arrays, so masks of equal structure share them.

    Args:
        mask: the mask.
        length: the total number of positions.
        slack: the number of steps for which a plan keeps keys longer; outlines have wider margins for it.
        margin_factor: the margin that an outline leaves around its cuts, as a multiple of the longest lifetime; None
            visits every position.
    """
    return _lifetimes_of_all((without_data(mask),), length, slack, margin_factor)[0]


def lifetimes_of_both(first: Mask, second: Mask, length: int) -> tuple[Lifetimes, Lifetimes]:
    """The lifetimes of two masks at the same positions."""
    found = _lifetimes_of_all((without_data(first), without_data(second)), length, 0, 1)
    return found[0], found[1]


def sees_free_slots(mask: Mask, length: int) -> bool:
    """Whether a mask by position would let some query attend to a slot that holds no key."""
    free = np.array([FAR])
    return any((rule.nearest_query(free, free * 0 + (length - 1), -1) >= 0).any() for rule in _rules_of_heads(mask))


def without_data(mask: Mask) -> Mask:
    """The mask with the shapes of its arrays only: plans read no more, and must not keep arrays alive."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mask)


def is_hashable(mask: Mask) -> bool:
    """Whether a mask's structure can be hashed; a user's mask may have fields that cannot."""
    try:
        hash(jax.tree.structure(mask))
    except TypeError:
        return False
    return True


def cached_by_structure(function: Any) -> Any:
    """Caches a function of masks without data, by their structure and shapes, and of further numbers."""

    @lru_cache(maxsize=32)
    def cached(structure: Any, leaves: tuple, *numbers: int | None) -> Any:
        return function(jax.tree.unflatten(structure, leaves), *numbers)

    @wraps(function)
    def call(mask: Any, *numbers: int | None) -> Any:
        leaves, structure = jax.tree.flatten(mask)
        return cached(structure, tuple(leaves), *numbers)

    call.cached = cached  # type: ignore[attr-defined]
    return call


def _lifetimes_of_all(
    masks: tuple[Mask, ...], length: int, slack: int, margin_factor: int | None
) -> tuple[Lifetimes, ...]:
    """The lifetimes of several masks, at the positions of a common outline if there is one, else at every position."""
    hashable = all(map(is_hashable, masks))
    if margin_factor is not None:
        at_outline = _cached_at_outline if hashable else _at_outline
        found = at_outline(masks, length, slack, margin_factor)
        if found is not None:
            return found
    if hashable and length <= MAX_CACHED_LENGTH:
        return _cached_at_every_position(masks, length)
    return _at_every_position(masks, length)


def _at_outline(masks: tuple[Mask, ...], length: int, slack: int, margin_factor: int) -> tuple[Lifetimes, ...] | None:
    rules_by_mask = [_rules_of_heads(mask) for mask in masks]
    outline = _outline([rule for rules in rules_by_mask for rule in rules], length, slack, margin_factor)
    if outline is None:
        return None
    found = [_lifetimes_at(rules, outline) for rules in rules_by_mask]
    known = tuple(one for one in found if one is not None)
    if len(known) < len(masks):
        return None
    return known


def _at_every_position(masks: tuple[Mask, ...], length: int) -> tuple[Lifetimes, ...]:
    found = [_lifetimes_at(_rules_of_heads(mask), every_position(length, mask)) for mask in masks]
    return tuple(one for one in found if one is not None)


_cached_at_outline = cached_by_structure(_at_outline)
_cached_at_every_position = cached_by_structure(_at_every_position)


def _outline(rules: Sequence[Mask], length: int, slack: int, margin_factor: int) -> Outline | None:
    """An outline for the lifetimes of all these rules; None if they do not repeat."""
    depends = combine_periodicities([rule.periodicity() for rule in rules])
    if depends is None:
        return None
    # Distances 0 and 1 matter too: a query before the key's own position ties positions, a query at it does not.
    distances = {0, 1, *depends.distances}
    edges = {place + side * d for place in {0, length, *depends.places} for d in distances for side in (-1, 1)}
    near = 2 * depends.period + 2
    edges = {edge for edge in edges if -near < edge < length + near}

    def lifetimes_at(key: np.ndarray) -> list[np.ndarray]:
        return [found for rule in rules for found in _last_and_early(rule, key, length)]

    return find_outline(length, depends.period, sorted(edges), slack, margin_factor, lifetimes_at)


def _last_and_early(rule: Mask, key: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The last query that may attend to each key, or -1; the first, if it comes before the key, else `length`."""
    last = np.maximum(rule.nearest_query(key, key * 0 + (length - 1), -1), -1)
    first = np.full(len(key), length)
    # Few rules let a query attend to later keys: the first query is searched for only where one does.
    early = rule.nearest_query(key, key - 1, -1) >= 0
    first[early] = rule.nearest_query(key[early], key[early] * 0, 1)
    return last, first


def _lifetimes_at(rules: Sequence[Mask], outline: Outline) -> Lifetimes | None:
    """The lifetimes of a mask from the rules of its heads; None if the outline omits a position that they need."""
    key = outline.keys
    last, first = np.full(len(key), -1), np.full(len(key), outline.length)
    for rule in rules:
        last_of_rule, first_of_rule = _last_and_early(rule, key, outline.length)
        last, first = np.maximum(last, last_of_rule), np.minimum(first, first_of_rule)
    first_index = outline.places_of(key, first)
    if first_index is None:
        return None
    tied = _tied(first_index, np.arange(len(key)))
    # A period represents the positions of a cut only if the period after the cut has the same ties.
    period = outline.period
    for at, _ in outline.before_cuts():
        if (tied[at - period : at] != tied[at : at + period]).any():
            return None
    return Lifetimes(last, tied, outline)


def _rules_of_heads(mask: Mask) -> list[Mask]:
    """The distinct rules of a mask's heads; rules that differ in their arrays only count as one."""
    distinct: dict[Any, Mask] = {}
    for head in range(mask.heads):
        rule = mask.of_head(head)
        key = jax.tree.structure(rule) if is_hashable(rule) else id(rule)
        distinct[key] = rule
    return list(distinct.values())


def _tied(first: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Which keys are tied to the one before: a query before a key that attends to it ties all positions in between."""
    change = np.zeros(len(key) + 1, np.int64)
    early = first < key
    np.add.at(change, first[early] + 1, 1)
    np.add.at(change, key[early] + 1, -1)
    return np.cumsum(change[:-1]) > 0
