"""`Rule`: a mask defined by other masks, whose properties it has."""

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import islice
from typing import Any

import jax

from longspan.masks.base import NOT_INHERITED, Mask, Pinned
from longspan.masks.checks import check_lowered
from longspan.masks.pytree import Value

MANY_PARTS = 16  # masks with this many parts are not cached: comparing them takes as long as lowering them
MAX_REMEMBERED = 256  # lowered masks in the cache
_remembered_atoms: dict[Mask, Mask] = {}


def atoms_of(mask: Mask) -> Mask:
    """`mask.atoms()`, cached for small masks without arrays: one trace needs it several times."""
    parts = list(islice(mask.walk(), MANY_PARTS))
    if len(parts) == MANY_PARTS or not _is_of_numbers(mask, parts):
        return mask.atoms()
    atoms = _remembered_atoms.get(mask)
    if atoms is None:
        atoms = mask.atoms()
        # Arrays that `lower` makes inside `jit` are tracers, which must not outlive the trace.
        if _is_of_numbers(atoms, atoms.walk()):
            while len(_remembered_atoms) >= MAX_REMEMBERED:
                _remembered_atoms.pop(next(iter(_remembered_atoms)), None)
            _remembered_atoms[mask] = atoms
    return atoms


def _is_of_numbers(mask: Mask, parts: Iterable[Mask]) -> bool:
    """Whether a mask holds only masks, ints and strings. The cache would keep arrays and functions alive."""
    return all(map(_has_only_numbers, parts)) and not jax.tree.leaves(mask)


def _has_only_numbers(part: Mask) -> bool:
    if "_data" not in vars(part):
        return False  # not made by `rule`, so it may not compare by value
    for value in vars(part).values():
        entries = value
        if not isinstance(value, tuple):
            entries = (value,)
        if not all(entry is None or isinstance(entry, int | str | Value) for entry in entries):
            return False
    return True


class Rule(Mask):
    """Base of masks that are defined by other masks: subclass it with `@rule` and define `lower`.

    Such a mask skips tiles, runs natively on the cpu engine, and lets caches evict keys, like the mask it lowers to.

    Example:
        >>> from longspan.masks import Compare, Rule, position, rule
        >>> @rule
        ... class Diagonal(Rule):
        ...     shift: int
        ...
        ...     def lower(self):
        ...         return Compare(position() + self.shift, "==", position())
        >>> print(Diagonal(1).show(3, 4))
        .#..
        ..#.
        ...#
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "lower" in vars(cls):
            cls.lower = _returning_a_mask(cls.lower)  # type: ignore[method-assign]

    def lower(self) -> Mask:
        raise NotImplementedError(f"{type(self).__name__} must define `lower()`, or `allowed(q, kv)`.")

    def atoms(self):
        if type(self).allowed is not Rule.allowed:  # a subclass that overrides `allowed` is not its parent's `lower()`
            return self
        return self.lower().atoms()

    def allowed(self, q, kv):
        return self.lower().allowed(q, kv)

    def extents(self):
        yield from super().extents()
        yield from self.lower().extents()  # which may distinguish rows and heads that the rule's own arrays do not

    @property
    def is_strided(self):
        return any(part.is_strided for part in self.atoms().walk())

    def inexact(self):
        if self.lower().inexact():
            return (self,)
        return ()

    def pinned(self, length):
        found = self.lower().pinned(length)
        if not any(found[1:]):
            return Pinned(self)
        return found

    def of_head(self, head):
        if self.heads <= 1:
            return self
        return self.lower().of_head(head)

    def _cut(self, q, kv, q_len, kv_len):
        lowered = self.lower()
        cut = lowered._cut(q, kv, q_len, kv_len)
        if cut is lowered:
            return self
        return cut


class Leaf(Rule):
    """A rule made of comparisons only: the `array_axes` of its own arrays fix all sizes."""

    def extents(self):
        return Mask.extents(self)


def _returning_a_mask(lower: Callable[[Any], Mask]) -> Callable[[Any], Mask]:
    """Wraps a user's `lower` to check its result."""

    @wraps(lower)
    def checked(self):
        mask = lower(self)
        check_lowered(self, mask)
        return mask

    return checked


def _delegated(name: str) -> Any:
    """A property or method that calls the one of the lowered mask."""
    if isinstance(vars(Mask)[name], property) or not callable(vars(Mask)[name]):
        return property(lambda self: getattr(self.lower(), name))
    return lambda self, *args: getattr(self.lower(), name)(*args)


for _name in NOT_INHERITED:
    if _name not in vars(Rule):
        setattr(Rule, _name, _delegated(_name))
