"""The similarity of vectors, by the names that sentence-transformers uses."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float

from longspan.checks import check_choice

MIN_NORM = 1e-12
BLOCK = 2**24  # differences that are in memory at once


def similarity(name: str, a: Any, b: Any) -> Float[np.ndarray, "n m"]:
    """The similarity of each vector of `a` to each of `b`; a larger number is more similar.

    Example:
        >>> similarity("euclidean", [[0.0, 3.0]], [[4.0, 0.0], [0.0, 2.0]])
        array([[-5., -1.]], dtype=float32)
    """
    check_choice("similarity_fn_name", name, tuple(SIMILARITIES))
    a, b = _vectors("a", a), _vectors("b", b)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"`a` has vectors of size {a.shape[1]} and `b` of size {b.shape[1]}. The sizes must be equal.")
    return SIMILARITIES[name](a, b)


def _vectors(name: str, given: Any) -> np.ndarray:
    vectors = np.asarray(given, np.float32)
    if vectors.ndim == 1:
        vectors = vectors[None]
    if vectors.ndim != 2:
        raise ValueError(f"`{name}` must have shape [n, size] or [size], got {vectors.shape}.")
    return vectors


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _unit(a) @ _unit(b).T


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), MIN_NORM)


def _distances(a: np.ndarray, b: np.ndarray, norm: int) -> np.ndarray:
    """Minus the distances, from differences: ‖a‖² − 2ab + ‖b‖² would cancel."""
    out = np.empty((len(a), len(b)), np.float32)
    rows = max(1, BLOCK // max(1, b.size))
    for start in range(0, len(a), rows):
        out[start : start + rows] = -np.linalg.norm(a[start : start + rows, None] - b[None], ord=norm, axis=-1)
    return out


SIMILARITIES: MappingProxyType[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = MappingProxyType(
    dict(
        cosine=_cosine,
        dot=lambda a, b: a @ b.T,
        euclidean=lambda a, b: _distances(a, b, 2),
        manhattan=lambda a, b: _distances(a, b, 1),
    )
)
