"""`Rule`: a mask that is said by other masks, and answers what they answer."""

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import islice
from typing import Any

import jax

from longspan.masks.base import NOT_INHERITED, Mask, Pinned
from longspan.masks.checks import check_lowered
from longspan.masks.pytree import Value

MANY_PARTS = 16  # larger masks are lowered again: comparing them takes about as long
MAX_REMEMBERED = 256
_remembered_atoms: dict[Mask, Mask] = {}


def atoms_of(mask: Mask) -> Mask:
    """`mask.atoms()`. Of small masks without arrays it is remembered: a trace asks several times."""
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
    """Whether a mask holds masks, ints and strings alone: no array, and no function, which would be kept alive."""
    return all(map(_has_only_numbers, parts)) and not jax.tree.leaves(mask)


def _has_only_numbers(part: Mask) -> bool:
    if "_data" not in vars(part):
        return False  # not made by `rule`, so it may not compare by its contents
    for value in vars(part).values():
        entries = value if isinstance(value, tuple) else (value,)
        if not all(entry is None or isinstance(entry, int | str | Value) for entry in entries):
            return False
    return True


class Rule(Mask):
    """A rule that other masks say: define `lower`, and what they answer is its answer.

    It then skips tiles, has the cpu engine's native speed, and tells caches how long to keep keys.

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
            cls.lower = _returning_a_mask(cls.lower)

    def lower(self) -> Mask:
        raise NotImplementedError(f"{type(self).__name__} must define `lower()`, or `allowed(q, kv)`.")

    def atoms(self):
        # A subclass with an `allowed` of its own is not what its parent lowers to.
        return self.lower().atoms() if type(self).allowed is Rule.allowed else self

    def allowed(self, q, kv):
        return self.lower().allowed(q, kv)

    def extents(self):
        yield from super().extents()
        yield from self.lower().extents()  # it may tell rows and heads apart of which its own arrays say nothing

    @property
    def is_strided(self):
        return any(part.is_strided for part in self.atoms().walk())

    def inexact(self):
        return (self,) if self.lower().inexact() else ()

    def pinned(self, length):
        found = self.lower().pinned(length)
        return found if any(found[1:]) else Pinned(self)

    def of_head(self, head):
        return self.lower().of_head(head) if self.heads > 1 else self

    def _cut(self, q, kv, q_len, kv_len):
        lowered = self.lower()
        cut = lowered._cut(q, kv, q_len, kv_len)
        return self if cut is lowered else cut


class Leaf(Rule):
    """A rule of comparisons alone: its own arrays, by their `array_axes`, say all that there is to say of sizes."""

    def extents(self):
        return Mask.extents(self)


def _returning_a_mask(lower: Callable[[Any], Mask]) -> Callable[[Any], Mask]:
    """A user's `lower`, checked."""

    @wraps(lower)
    def checked(self):
        mask = lower(self)
        check_lowered(self, mask)
        return mask

    return checked


def _asked_of_the_lowered(name: str) -> Any:
    """A property or method of `Rule` that is its lowered rule's."""
    if isinstance(vars(Mask)[name], property) or not callable(vars(Mask)[name]):
        return property(lambda self: getattr(self.lower(), name))
    return lambda self, *args: getattr(self.lower(), name)(*args)


for _name in NOT_INHERITED:
    if _name not in vars(Rule):
        setattr(Rule, _name, _asked_of_the_lowered(_name))
