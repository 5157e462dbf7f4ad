"""`Rule`: a mask that is said by other masks, and answers what they answer."""

from functools import lru_cache
from itertools import islice
from typing import Any

from longspan.masks.base import NOT_INHERITED, Mask, Pinned

MANY_PARTS = 16  # larger masks are lowered again: comparing them takes about as long


def atoms_of(mask: Mask) -> Mask:
    """`mask.atoms()`. Of small masks without arrays it is remembered: a trace asks several times."""
    parts = list(islice(mask.walk(), MANY_PARTS))
    if len(parts) < MANY_PARTS and all(_is_of_numbers(part) for part in parts):
        return _remembered_atoms(mask)
    return mask.atoms()


@lru_cache(maxsize=256)
def _remembered_atoms(mask: Mask) -> Mask:
    return mask.atoms()


def _is_of_numbers(mask: Mask) -> bool:
    """Whether a mask holds masks, ints and strings alone: no array, and no function, which would be kept alive."""
    if "_data" not in vars(mask):
        return False  # not made by `rule`, so it may not compare by its contents
    for value in vars(mask).values():
        entries = value if isinstance(value, tuple) else (value,)
        if not all(entry is None or isinstance(entry, int | str | Mask) for entry in entries):
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


def _asked_of_the_lowered(name: str) -> Any:
    """A property or method of `Rule` that is its lowered rule's."""
    if isinstance(vars(Mask)[name], property) or not callable(vars(Mask)[name]):
        return property(lambda self: getattr(self.lower(), name))
    return lambda self, *args: getattr(self.lower(), name)(*args)


for _name in NOT_INHERITED:
    if _name not in vars(Rule):
        setattr(Rule, _name, _asked_of_the_lowered(_name))
