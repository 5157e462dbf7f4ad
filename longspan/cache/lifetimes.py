"""How long a mask needs each key: from its own position to the last query that may see it."""

from functools import lru_cache, wraps
from typing import Any, NamedTuple

import jax
import numpy as np

from longspan._types import FAR
from longspan.masks import Mask


class Lifetimes(NamedTuple):
    """What a mask asks of a cache of `length` positions, in NumPy."""

    last: np.ndarray  # int64 [length]: the last query that may see each key, -1 if none does
    tied: np.ndarray  # bool [length]: whether a position must come in one append with the one before it


def lifetimes(mask: Mask, length: int) -> Lifetimes:
    """The lifetimes of a mask's keys. Arrays in it are not read, so equal structures share them."""
    mask = without_data(mask)
    return _known(mask, length) if is_hashable(mask) else _of(mask, length)


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
    """Remembers a function of a mask without data, by its structure and shapes, and of further numbers."""

    @lru_cache(maxsize=32)
    def known(structure: Any, leaves: tuple, *numbers: int) -> Any:
        return function(jax.tree.unflatten(structure, leaves), *numbers)

    @wraps(function)
    def ask(mask: Mask, *numbers: int) -> Any:
        leaves, structure = jax.tree.flatten(mask)
        return known(structure, tuple(leaves), *numbers)

    return ask


def _of(mask: Mask, length: int) -> Lifetimes:
    key = np.arange(length, dtype=np.int64)
    last, first = np.full(length, -1), np.full(length, length)
    for rule in _by_head(mask):
        last = np.maximum(last, rule.nearest_query(key, key * 0 + (length - 1), -1))
        # Few rules let a query see what comes after it; only there is the first of them looked for.
        early = key[rule.nearest_query(key, key - 1, -1) >= 0]
        first[early] = np.minimum(first[early], rule.nearest_query(early, early * 0, 1))
    return Lifetimes(last, _tied(first, key))


_known = by_structure(_of)


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
