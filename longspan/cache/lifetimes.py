"""How long a mask needs each key: from its own position to the last query that may see it."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from longspan._types import FAR
from longspan.masks import Mask


class Lifetimes(NamedTuple):
    """What a mask asks of a cache of `length` positions, in NumPy."""

    last: np.ndarray  # int64 [length]: the last query that may see each key, -1 if none does
    tied: np.ndarray  # bool [length]: whether a position must come in one append with the one before it
    sees_free: bool  # whether the rule alone would let a query see a slot that holds no key


def lifetimes(mask: Mask, length: int) -> Lifetimes:
    """The lifetimes of a mask's keys. Arrays in it are not read, so equal structures share them."""
    leaves, structure = jax.tree.flatten(mask)
    try:
        return _lifetimes(structure, tuple((x.shape, np.dtype(x.dtype).str) for x in leaves), length)
    except TypeError:  # a user's rule whose fields do not hash
        return _of(mask, length)


@lru_cache(maxsize=32)
def _lifetimes(structure: Any, leaves: tuple, length: int) -> Lifetimes:
    arrays = [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in leaves]
    return _of(jax.tree.unflatten(structure, arrays), length)


def _of(mask: Mask, length: int) -> Lifetimes:
    key = np.arange(length, dtype=np.int64)
    last, first, free = np.full(length, -1), np.full(length, length), np.array([FAR])
    sees_free = False
    for rule in _by_head(mask):
        last = np.maximum(last, rule.nearest_query(key, key * 0 + (length - 1), -1))
        first = np.minimum(first, rule.nearest_query(key, key * 0, 1))
        sees_free |= bool((rule.nearest_query(free, free * 0 + (length - 1), -1) >= 0).any())
    seen = (last >= 0) & (first < length)
    return Lifetimes(np.where(seen, last, -1), _tied(np.where(seen, first, key), key), sees_free)


def _by_head(mask: Mask) -> list[Mask]:
    """The rules that heads have, each once."""
    rules: dict[Any, Mask] = {}
    for head in range(mask.heads):
        rule = mask.of_head(head)
        try:
            rules[hash(rule), rule] = rule
        except TypeError:  # it holds arrays
            rules[id(rule)] = rule
    return list(rules.values())


def _tied(first: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A key that is seen before its own position ties everything in between together."""
    change = np.zeros(len(key) + 1, np.int64)
    early = first < key
    np.add.at(change, first[early] + 1, 1)
    np.add.at(change, key[early] + 1, -1)
    return np.cumsum(change[:-1]) > 0
