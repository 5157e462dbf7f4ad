"""`Value`, the base of masks, terms and biases: a frozen pytree that compares by value."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import numpy as np

Class = TypeVar("Class", bound=type)
Self = TypeVar("Self", bound="Value")


class Value:
    """A frozen pytree made by `rule`: its arrays are leaves, so new arrays never retrace. All else is structure.

    It compares by value, and hashes if it holds no arrays.
    """

    static: ClassVar[tuple[str, ...]] = ()  # fields whose NumPy arrays are part of the structure, not data
    _data: tuple[str, ...] = ()  # the fields that are pytree children, set by `rule`
    # The last axes of each field's arrays: batch rows (B), heads (N), queries (T), keys (S) or others (.). With
    # {"ids": "BT"}, each device holds the ids of its own rows. Name only arrays that are read through the sides: arrays
    # that are not named are replicated.
    array_axes: ClassVar[dict[str, str]] = {}
    _class_of_rule: ClassVar[type | None] = None  # the class that `rule` decorated: subclasses inherit it

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        # Without `rule` a class is not a pytree. JAX would refuse its objects only later, without naming the cause.
        if cls._class_of_rule is not cls:
            raise TypeError(
                f"The class {cls.__name__} has no `@rule`. Write `@longspan.masks.rule` above the class, and declare "
                "its fields as in a dataclass. `@rule` makes the class a frozen dataclass and a pytree, as JAX needs."
            )
        return object.__new__(cls)

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
        """Yields each field that holds an array, and one letter per axis of the array."""
        for name in self._data:
            ndim = getattr(getattr(self, name), "ndim", None)
            if ndim is None:
                continue
            letters = self.array_axes.get(name, "")
            if not letters and ndim == 1:
                letters = "B"
            letters = letters.rjust(ndim, ".")
            yield name, letters[len(letters) - ndim :]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._arguments())})"

    def _arguments(self) -> list[str]:
        return [f"{f.name}={short(getattr(self, f.name))}" for f in fields(self)]  # type: ignore[arg-type]


@dataclass_transform(frozen_default=True, eq_default=False)
def rule(cls: Class) -> Class:
    """Class decorator: makes a frozen dataclass and pytree of a subclass of `Mask`, `Rule` or `Bias`.

    Fields that hold arrays or masks are pytree children; all others are static.

    Example:
        >>> from longspan.masks import Mask, rule
        >>> @rule
        ... class Multiples(Mask):
        ...     of: int
        ...
        ...     def allowed(self, q, kv):
        ...         return (kv.position % self.of == 0) & (q.position >= 0)
        >>> print(Multiples(2).show(2, 5))
        #.#.#
        #.#.#
    """
    made: Any = dataclass(frozen=True, eq=False, repr=False)(cls)
    names = tuple(f.name for f in fields(made))
    dataclass_init = made.__init__

    @wraps(dataclass_init)
    def init(self, *args, **kwargs):
        dataclass_init(self, *args, **kwargs)
        # Decided once, here, because JAX rebuilds masks with placeholders (ints, None) instead of arrays.
        object.__setattr__(self, "_data", tuple(n for n in names if _is_data(getattr(self, n), n in made.static)))
        for name in names:
            if name not in self._data:
                _check_hashable(self, name)

    def structure(self):
        static = tuple((n, _hashable(getattr(self, n))) for n in names if n not in self._data)
        # The names of bool fields, because True equals 1 and False equals 0 in Python.
        return self._data, static, tuple(n for n, value in static if isinstance(value, bool))

    def flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in self._data], structure(self)

    def flatten(self):
        return [getattr(self, n) for n in self._data], structure(self)

    def unflatten(aux, children):
        data, static, _ = aux
        self = object.__new__(made)
        for name, value in (*zip(data, children, strict=True), *static):
            if isinstance(value, StaticArray):
                value = value.array
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_data", data)
        return self

    made.__init__ = init
    made._class_of_rule = made
    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made


def axes_of(tree: Any, letters: str = "") -> list[str]:
    """The axes of each array in a tree: one letter per axis, "." for axes without a name.

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
    found = []
    for key, child in flat[0]:
        child_letters = letters
        if own is not None:
            child_letters = own.get(getattr(key, "name", ""), "")
        found += axes_of(child, child_letters)
    return found


class StaticArray:
    """A NumPy array in a mask's static structure: it compares and hashes by value."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self._key = (array.shape, array.dtype.str, array.tobytes())

    def __eq__(self, other):
        return isinstance(other, StaticArray) and self._key == other._key

    def __hash__(self):
        return hash(self._key)


def short(value: Any) -> str:
    """A value in a repr: arrays by dtype and shape (`i32[2,7]`), tuples and masks in full."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = {"bool": "bool", "int": "i", "uint": "u", "float": "f", "bfloat": "bf"}
        name = value.dtype
        if not isinstance(name, str):
            name = np.dtype(name).name
        letters = name.rstrip("0123456789")
        return f"{kind.get(letters, letters)}{name[len(letters) :]}[{','.join(map(str, value.shape))}]"
    return repr(value)


def _is_data(value: Any, static_if_numpy: bool = False) -> bool:
    if value is None or isinstance(value, int | str):  # the common case first: every plan makes masks
        return False
    if isinstance(value, np.ndarray):
        return not static_if_numpy
    if isinstance(value, jax.Array | Value | jax.ShapeDtypeStruct):
        return True
    return isinstance(value, tuple) and any(_is_data(v) for v in value)


def _check_hashable(value: Value, name: str) -> None:
    """Checks that a static field hashes: it is part of the key of compiled programs, so it must not change."""
    entry = getattr(value, name)
    if entry is None or isinstance(entry, int | str | np.ndarray):
        return
    try:
        hash(entry)
    except TypeError:
        raise TypeError(
            f"{type(value).__name__}.{name} must be an array or a hashable value, got {type(entry).__name__}. "
            "For example, pass a tuple instead of a list."
        ) from None


def _hashable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return StaticArray(value)
    return value
