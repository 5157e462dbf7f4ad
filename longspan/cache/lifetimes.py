"""How long a mask needs each key: from its own position to the last query that may see it."""

from collections.abc import Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import jax
import numpy as np

from longspan.array_types import FAR
from longspan.cache.outline import Outline, listed, outlined
from longspan.masks import Mask
from longspan.masks.algebra import combine_periodicities

MOST_REMEMBERED = 2**22  # positions of plans and of lists that are remembered: longer ones take 300 MB each


class Lifetimes(NamedTuple):
    """What a mask asks of a cache, in NumPy, at the positions that its outline looks at."""

    last: np.ndarray  # int64 [keys]: the last query that may see each key, -1 if none does
    tied: np.ndarray  # bool [keys]: whether a position must come in one append with the one before it
    outline: Outline


def lifetimes(mask: Mask, length: int, slack: int = 0, room: int | None = 1) -> Lifetimes:
    """The lifetimes of a mask's keys. Arrays in it are not read, so equal structures share them.

    Args:
        mask: the rule.
        length: positions in all.
        slack: for how many steps more a plan keeps keys: outlines leave so much room.
        room: how many of the longest lifetimes an outline leaves around cuts; None: look at every position.
    """
    return _together((without_data(mask),), length, slack, room)[0]


def compared(mine: Mask, theirs: Mask, length: int) -> tuple[Lifetimes, Lifetimes]:
    """The lifetimes of two masks at the same positions."""
    one, other = _together((without_data(mine), without_data(theirs)), length, 0, 1)
    return one, other


def sees_free(mask: Mask, length: int) -> bool:
    """Whether a rule by position alone would let some query see a slot that holds no key."""
    free = np.array([FAR])
    return any((rule.nearest_query(free, free * 0 + (length - 1), -1) >= 0).any() for rule in _by_head(mask))


def without_data(mask: Mask) -> Mask:
    """The mask with the shapes of its arrays alone: all that a plan reads, and may hold on to."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mask)


def is_hashable(mask: Mask) -> bool:
    """Whether a mask's structure hashes; a user's rule may have fields that do not."""
    try:
        hash(jax.tree.structure(mask))
    except TypeError:
        return False
    return True


def by_structure(function: Any) -> Any:
    """Remembers a function of masks without data, by their structure and shapes, and of further numbers."""

    @lru_cache(maxsize=32)
    def known(structure: Any, leaves: tuple, *numbers: int | None) -> Any:
        return function(jax.tree.unflatten(structure, leaves), *numbers)

    @wraps(function)
    def ask(mask: Any, *numbers: int | None) -> Any:
        leaves, structure = jax.tree.flatten(mask)
        return known(structure, tuple(leaves), *numbers)

    ask.known = known  # type: ignore[attr-defined]
    return ask


def _together(masks: tuple[Mask, ...], length: int, slack: int, room: int | None) -> tuple[Lifetimes, ...]:
    """The lifetimes of some masks, from an outline of all of them if there is one, else at every position."""
    remembered = all(map(is_hashable, masks))
    found = None if room is None else (_known if remembered else _outlined)(masks, length, slack, room)
    if found is None:
        found = (_known_every if remembered and length <= MOST_REMEMBERED else _every)(masks, length)
    return found


def _outlined(masks: tuple[Mask, ...], length: int, slack: int, room: int) -> tuple[Lifetimes, ...] | None:
    by_mask = [_by_head(mask) for mask in masks]
    outline = _outline([rule for rules in by_mask for rule in rules], length, slack, room)
    found = [] if outline is None else [_measured(rules, outline) for rules in by_mask]
    known = tuple(one for one in found if one is not None)
    return known if len(known) == len(masks) else None


def _every(masks: tuple[Mask, ...], length: int) -> tuple[Lifetimes, ...]:
    found = [_measured(_by_head(mask), listed(length, mask)) for mask in masks]
    return tuple(one for one in found if one is not None)


_known, _known_every = by_structure(_outlined), by_structure(_every)


def _outline(rules: Sequence[Mask], length: int, slack: int, room: int) -> Outline | None:
    """An outline for the lifetimes of all of these rules, if they repeat."""
    depends = combine_periodicities([rule.periodicity() for rule in rules])
    if depends is None:
        return None
    # A query before the key's own place makes positions tied, and one at it does not: distances 0 and 1 matter, too.
    away = {0, 1, *depends.distances}
    edges = {place + side * d for place in {0, length, *depends.places} for d in away for side in (-1, 1)}
    near = 2 * depends.period + 2
    edges = {edge for edge in edges if -near < edge < length + near}

    def ask(key: np.ndarray) -> list[np.ndarray]:
        return [found for rule in rules for found in _asked(rule, key, length)]

    return outlined(length, depends.period, sorted(edges), slack, room, ask)


def _asked(rule: Mask, key: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The last query that may see each key, -1 if none does; the first, if it is before the key, else the length."""
    last, first = np.maximum(rule.nearest_query(key, key * 0 + (length - 1), -1), -1), np.full(len(key), length)
    # Few rules let a query see what comes after it; only there is the first of them looked for.
    early = rule.nearest_query(key, key - 1, -1) >= 0
    first[early] = rule.nearest_query(key[early], key[early] * 0, 1)
    return last, first


def _measured(rules: Sequence[Mask], outline: Outline) -> Lifetimes | None:
    """The lifetimes of a mask by the rules of its heads; None if the outline leaves something out that it needs."""
    key = outline.keys
    last, first = np.full(len(key), -1), np.full(len(key), outline.length)
    for rule in rules:
        of_rule = _asked(rule, key, outline.length)
        last, first = np.maximum(last, of_rule[0]), np.minimum(first, of_rule[1])
    place = outline.places_of(key, first)
    if place is None:
        return None
    tied = _tied(place, np.arange(len(key)))
    # The period after a cut says the same as the one before it, or they do not stand for what is between them.
    period = outline.period
    alike = all((tied[at - period : at] == tied[at : at + period]).all() for at, _ in outline.before_cuts())
    return Lifetimes(last, tied, outline) if alike else None


def _by_head(mask: Mask) -> list[Mask]:
    """The rules that heads have, each once: what they hold as data is not read."""
    rules = [mask.of_head(head) for head in range(mask.heads)]
    return list({jax.tree.structure(rule) if is_hashable(rule) else id(rule): rule for rule in rules}.values())


def _tied(first: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A key that is seen before its own position ties everything in between together."""
    change = np.zeros(len(key) + 1, np.int64)
    early = first < key
    np.add.at(change, first[early] + 1, 1)
    np.add.at(change, key[early] + 1, -1)
    return np.cumsum(change[:-1]) > 0
