"""What makes a mask a value: a frozen pytree that compares by its contents, and hashes if it holds no arrays."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import numpy as np

Class = TypeVar("Class", bound=type)


class Value:
    """A frozen pytree made by `rule`: its arrays are leaves, so new arrays never retrace; all else is structure."""

    static: ClassVar[tuple[str, ...]] = ()  # fields whose NumPy arrays belong to the structure, not to the data
    _data: tuple[str, ...] = ()  # fields that are pytree children, found by `rule`
    # What the last axes of a field's arrays run along, where that is batch rows (B) or heads (N): of {"ids": "BT"} each
    # device has its own rows. Only of arrays that are read through the sides; others, and what is not named, are whole.
    array_axes: ClassVar[dict[str, str]] = {}

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, my_tree = jax.tree.flatten(self)
        theirs, their_tree = jax.tree.flatten(other)
        return my_tree == their_tree and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def __hash__(self) -> int:
        leaves, tree = jax.tree.flatten(self)
        if leaves:
            raise TypeError(
                f"{self!r} holds arrays, and arrays do not hash. Pass it to jit as an ordinary argument (masks are "
                "pytrees), not as a static one."
            )
        return hash(tree)

    def _letters(self) -> Iterator[tuple[str, str]]:
        """The fields that hold arrays, and what each axis of these runs along."""
        for name in self._data:
            ndim = getattr(getattr(self, name), "ndim", None)
            if ndim is not None:
                letters = self.array_axes.get(name) or ("B" if ndim == 1 else "")
                yield name, letters.rjust(ndim, ".")[-ndim:] if ndim else ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._arguments())})"

    def _arguments(self) -> list[str]:
        return [f"{f.name}={short(getattr(self, f.name))}" for f in fields(self)]  # type: ignore[arg-type]


@dataclass_transform(frozen_default=True, eq_default=False)
def rule(cls: Class) -> Class:
    """Makes a frozen pytree of a `Mask` subclass: fields that hold arrays or masks are data, all others are static.

    Example:
        >>> @ls.masks.rule
        ... class Strided(ls.Mask):
        ...     stride: int
        ...
        ...     def allowed(self, q, kv):
        ...         return (q.position - kv.position) % self.stride == 0
        >>> print(Strided(2).show(3, 4))
        #.#.
        .#.#
        #.#.
    """
    made: Any = dataclass(frozen=True, eq=False, repr=False)(cls)
    names = tuple(f.name for f in fields(made))
    plain_init = made.__init__

    @wraps(plain_init)
    def init(self, *args, **kwargs):
        plain_init(self, *args, **kwargs)
        # Decided once, here: JAX rebuilds masks with placeholders (ints, None) where the arrays were.
        object.__setattr__(self, "_data", tuple(n for n in names if _is_data(getattr(self, n), n in made.static)))

    def flatten_with_keys(self):
        data = [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in self._data]
        static = tuple((n, _hashable(getattr(self, n))) for n in names if n not in self._data)
        return data, (self._data, static)

    def flatten(self):
        static = tuple((n, _hashable(getattr(self, n))) for n in names if n not in self._data)
        return [getattr(self, n) for n in self._data], (self._data, static)

    def unflatten(aux, children):
        data, static = aux
        self = object.__new__(made)
        for name, value in (*zip(data, children, strict=True), *static):
            object.__setattr__(self, name, value.array if isinstance(value, StaticArray) else value)
        object.__setattr__(self, "_data", data)
        return self

    made.__init__ = init
    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made


def axes_of(tree: Any, letters: str = "") -> list[str]:
    """What each array in a tree runs along, one letter per axis, "." for those that the tree does not name.

    Example:
        >>> axes_of(ls.Causal(jnp.ones(2, int)) & ls.Segments(jnp.zeros((2, 3), int)))
        ['B', 'BT']
    """
    if tree is None:
        return []
    flat = jax.tree_util.default_registry.flatten_one_level_with_keys(tree)
    if flat is None:
        ndim = len(tree.shape)
        return [letters.rjust(ndim, ".")[max(len(letters) - ndim, 0) :]]
    own = getattr(tree, "array_axes", None)
    children = [(getattr(key, "name", ""), child) for key, child in flat[0]]
    return [axes for name, child in children for axes in axes_of(child, letters if own is None else own.get(name, ""))]


class StaticArray:
    """A NumPy array as part of a mask's static structure: compared and hashed by its contents."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self._key = (array.shape, array.dtype.str, array.tobytes())

    def __eq__(self, other):
        return isinstance(other, StaticArray) and self._key == other._key

    def __hash__(self):
        return hash(self._key)


def short(value: Any) -> str:
    """A value as it stands in a repr: arrays by dtype and shape (`i32[2,7]`), tuples and masks in full."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = {"bool": "bool", "int": "i", "uint": "u", "float": "f", "bfloat": "bf"}
        name = np.dtype(value.dtype).name if not isinstance(value.dtype, str) else value.dtype
        letters = name.rstrip("0123456789")
        return f"{kind.get(letters, letters)}{name[len(letters) :]}[{','.join(map(str, value.shape))}]"
    return repr(value)


def _is_data(value: Any, static_if_numpy: bool = False) -> bool:
    if value is None or isinstance(value, int | str):  # most are: asked first, because rules are made at every plan
        return False
    if isinstance(value, np.ndarray):
        return not static_if_numpy
    if isinstance(value, jax.Array | Value | jax.ShapeDtypeStruct):
        return True
    return isinstance(value, tuple) and any(_is_data(v) for v in value)


def _hashable(value: Any) -> Any:
    return StaticArray(value) if isinstance(value, np.ndarray) else value
