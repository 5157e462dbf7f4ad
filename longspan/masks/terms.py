"""`Term`: a number for each token of one side, which `Compare` holds against a number for each token of the other."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import FAR, Number
from longspan.checks import check_choice
from longspan.masks.base import NO_QUERY
from longspan.masks.checks import check_at_least, check_entries, check_indices, check_number
from longspan.masks.cut import gather
from longspan.masks.pytree import Value, rule, short

POSITION, SLOT, ARRAY, NUMBER, MEMBER = "position", "slot", "array", "number", "member"
NEAR = 2**28  # a position and a few numbers up to this one add up to an int32
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
VALID = {"all": None, ">=0": lambda ids: ids >= 0, "!=0": lambda ids: ids != 0}
INVALID = {">=0": lambda ids: ids < 0, "!=0": lambda ids: ids == 0}


@rule
class Term(Value):
    """source // divide % modulo + plus, a number for each token of a side.

    `position`, `slot`, `array`, `number` and `member` make one.

    Example:
        >>> from longspan.masks import position
        >>> position() // 4 + 1
        position // 4 + 1
    """

    of: str  # POSITION, SLOT; ARRAY: an entry for each token; NUMBER: the same for all; MEMBER: 1 if listed, else 0
    data: Any = None  # ARRAY: int or bool [B or 1, L] or [B or 1, N or 1, L]; NUMBER: int, () or [B]; MEMBER: positions
    divide: Number = 1
    modulo: Number | None = None
    plus: Number = 0
    valid: str = "all"  # ARRAY: which entries count; a comparison with any other is not allowed

    def __post_init__(self):
        check_choice("valid", self.valid, tuple(VALID))
        checks = {ARRAY: check_entries, NUMBER: check_number, MEMBER: check_indices}
        if self.of in checks:
            checks[self.of](self, "data")
        check_at_least(self, "divide", 1)
        if self.modulo is not None:
            check_at_least(self, "modulo", 1)
        check_number(self, "plus")

    def __floordiv__(self, divide: Number) -> "Term":
        if self.modulo is not None or not is_static_number(self.plus, 0) or not is_static_number(self.divide, 1):
            raise ValueError(f"{self!r} cannot be divided: a term is source // divide % modulo + plus, in this order.")
        return replace(self, divide=divide)

    def __mod__(self, modulo: Number) -> "Term":
        if self.modulo is not None or not is_static_number(self.plus, 0):
            raise ValueError(f"{self!r} has no remainder: a term is source // divide % modulo + plus, in this order.")
        return replace(self, modulo=modulo)

    def __add__(self, more: Number) -> "Term":
        return replace(self, plus=derived(lambda xp, a, b: a + b, self.plus, more))

    def __sub__(self, less: Number) -> "Term":
        return replace(self, plus=derived(lambda xp, a, b: a - b, self.plus, less))

    @property
    def array_axes(self):
        tokens = ".".rjust(max(self.data.ndim - 1, 1), "N") if self.of == ARRAY else ""
        return {"data": f"B{tokens}", "divide": "B", "modulo": "B", "plus": "B"}

    @property
    def is_static(self) -> bool:
        """Whether it is known without data."""
        numbers = (self.divide, self.modulo, self.plus, self.data if self.of == NUMBER else 0)
        return self.of != ARRAY and all(n is None or isinstance(n, int) for n in numbers)

    @property
    def is_plain(self) -> bool:
        """Whether it is its source and nothing else."""
        return is_static_number(self.divide, 1) and self.modulo is None and is_static_number(self.plus, 0)

    @property
    def period(self) -> int:
        """After how many tokens a static term repeats; 1 if it does not."""
        repeats = self.of in (POSITION, SLOT) and self.modulo is not None
        return within_reach(self.divide) * within_reach(self.modulo) if repeats else 1

    @property
    def grows(self) -> bool:
        """Whether it never falls where positions, or slots, grow."""
        return self.of in (POSITION, SLOT) and self.modulo is None

    @property
    def _is_near(self) -> bool:
        """Whether it is a position, or slot, plus a static number that is small beside the largest int32."""
        plain = self.grows and is_static_number(self.divide, 1)
        return plain and isinstance(self.plus, int) and abs(self.plus) <= NEAR

    def value(self, slots: Any) -> Any:
        """The term of single slots."""
        if self.of == MEMBER:
            nobody = slots.position != slots.position
            return self._formed(slots, slots.is_one_of(self.data) if self.data else nobody)
        if self.of == NUMBER:
            return self._formed(slots, slots.number(self.data))
        if self.of == ARRAY:
            return self._formed(slots, slots.take(self.data))
        return self._formed(slots, slots.position if self.of == POSITION else slots.index)

    def defined(self, slots: Any) -> Any:
        """Where it is defined; None: everywhere."""
        valid = VALID[self.valid]
        return None if valid is None else valid(slots.take(self.data))

    def entries(self, side: Any) -> tuple[Any, Any] | None:
        """An array's term, [B or 1, L] or [B or 1, N or 1, L], and where it is defined (None: everywhere).

        None if what is added, say, differs from row to row.
        """
        numbers = (self.divide, self.modulo, self.plus)
        if not all(n is None or isinstance(n, int) for n in numbers):
            return None
        array, valid = side.table(self.data), VALID[self.valid]
        divide, modulo, plus = (None if n is None else side.number(n) for n in numbers)
        return self._form(array, divide, modulo, plus), None if valid is None else valid(array)

    def range(self, tiles: Any) -> tuple[Any, Any, Any]:
        """(least, greatest, whether it is defined everywhere) of each tile; least > greatest if it is nowhere."""
        low, high, total = self._ends(tiles)
        if self.modulo is None:
            return self._formed(tiles, low), self._formed(tiles, high), total
        xp, plus = tiles.side.xp, tiles.number(self.plus)
        divide, modulo = (no_less(tiles.number(n), 1) for n in (self.divide, self.modulo))
        low, high = low // divide, high // divide
        one_round = low // modulo == high // modulo
        last = np.int32(modulo - 1) if isinstance(modulo, int) else modulo - 1
        least, most = xp.where(one_round, low % modulo, np.int32(0)), xp.where(one_round, high % modulo, last)
        return least + plus, most + plus, total

    def least(self, tiles: Any) -> Any:
        """The least number of each tile."""
        if self.grows:
            return self._formed(tiles, tiles.first if self.of == POSITION else tiles.start)
        return self.range(tiles)[0]

    def greatest(self, tiles: Any) -> Any:
        """The greatest number of each tile."""
        if self.grows:
            return self._formed(tiles, tiles.last if self.of == POSITION else tiles.stop - 1)
        return self.range(tiles)[1]

    def source_range(self, side: Any, low: Any, high: Any, *, of: "Term") -> tuple[Any, Any]:
        """The range of the source where the term, which grows, is in [low, high]; None leaves an end open.

        Both ends are numbers of the term `of`. Where both terms are positions plus small static numbers, nothing can
        overflow, and a traced program needs no operations to prevent it.
        """
        if self._is_near and of._is_near:
            if isinstance(self.plus, int) and self.plus == 0:
                return low, high
            return None if low is None else low - self.plus, None if high is None else high - self.plus
        xp, plus, unit = side.xp, side.number(self.plus), no_less(side.number(self.divide), 1)
        most = FAR // unit  # no position divided lies further: so that nothing overflows
        if low is not None:
            low = (xp.clip(low, plus - most - 1, plus + most + 1) - plus) * unit
        if high is not None:
            high = (xp.clip(high, plus - most - 2, plus + most) - plus + 1) * unit - 1
        return low, high

    def cut(self, slots: Any) -> "Term":
        """The term of some slots of its side."""
        if slots is None or self.of not in (SLOT, ARRAY):
            return self
        return replace(self, of=ARRAY, data=slots if self.of == SLOT else gather(self.data, slots))

    def at(self, token: np.ndarray) -> np.ndarray:
        """A static term of tokens whose position and slot are one."""
        if self.of == MEMBER:
            token = np.isin(token, self.data).astype(np.int64)
        if self.of == NUMBER:
            token = token * 0 + within_reach(self.data)
        value = token // within_reach(self.divide)
        return (value if self.modulo is None else value % within_reach(self.modulo)) + within_reach(self.plus)

    def nearest(self, at: np.ndarray, step: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """The token nearest to `at`, in direction `step`, whose static term is in [low, high]; else NO_QUERY * step."""
        if self.of == NUMBER:
            value = self.at(at)
            return np.where((low <= value) & (value <= high), at, NO_QUERY * step)
        if self.of == MEMBER:
            return self._nearest_member(at, step, low, high)
        low, high, divide = low - within_reach(self.plus), high - within_reach(self.plus), within_reach(self.divide)
        if self.modulo is not None:
            return _nearest_residue(at, step, low, high, divide, within_reach(self.modulo))
        low = np.where(low <= -NO_QUERY // 2, -NO_QUERY, low * divide)
        high = np.where(high >= NO_QUERY // 2, NO_QUERY, high * divide + divide - 1)
        found = np.minimum(at, high) if step < 0 else np.maximum(at, low)
        return np.where((found >= low) & (found <= high), found, NO_QUERY * step)

    def places(self, other: "Term") -> frozenset[int]:
        """Where the comparison of a static term with a number, or with few of them, may change."""
        if self.of == MEMBER:
            return frozenset(place + side for place in self.data for side in (0, 1))
        if not self.grows:
            return frozenset()
        unit = within_reach(self.divide)
        values = other.at(np.arange(1)) if other.of == NUMBER else other._of_members()
        starts = [(int(value) - within_reach(self.plus)) * unit for value in values]
        return frozenset(start + side for start in starts for side in (0, unit))

    def _nearest_member(self, at, step: int, low, high):
        zero, one = ((low <= value) & (value <= high) for value in self._of_members())
        members = np.unique(np.array(self.data, np.int64))
        index = np.searchsorted(members, at, side="right") - 1 if step < 0 else np.searchsorted(members, at)
        member = np.array([-NO_QUERY, *members, NO_QUERY])[index + 1]
        # Members that are neighbours are a run, and the nearest token that is none is beside its end.
        runs = np.cumsum(np.diff(members, prepend=members[:1]) > 1)
        last = np.searchsorted(runs, runs, "right") - 1
        ends = members[np.searchsorted(runs, runs)] - 1 if step < 0 else members[last] + 1
        outside, inside = np.array(at), np.isin(at, members)
        outside[inside] = ends[np.searchsorted(members, outside[inside])]
        return np.where(zero & one, at, np.where(one, member, np.where(zero, outside, NO_QUERY * step)))

    def _of_members(self) -> np.ndarray:
        """The term of a token that is not listed, and of one that is."""
        return replace(self, of=POSITION, data=None).at(np.arange(2))

    def _ends(self, tiles) -> tuple[Any, Any, Any]:
        """The source's (least, greatest, whether all of it counts)."""
        if self.of == POSITION:
            return tiles.first, tiles.last, True
        if self.of == SLOT:
            return tiles.start, tiles.stop - 1, True
        if self.of == NUMBER:
            return tiles.number(self.data), tiles.number(self.data), True
        if self.of == MEMBER:
            inside = tiles.count_of(self.data)
            return (inside == tiles.last - tiles.first + 1).astype(np.int32), (inside > 0).astype(np.int32), True
        if self.valid == "all":
            return tiles.least(self.data), tiles.greatest(self.data), True
        low, high = (bound(self.data, VALID[self.valid]) for bound in (tiles.least, tiles.greatest))
        return low, high, tiles.least(self.data, INVALID[self.valid]) == MOST

    def _formed(self, side, value):
        """The term, of what its source is."""
        modulo = None if self.modulo is None else side.number(self.modulo)
        return self._form(value, side.number(self.divide), modulo, side.number(self.plus))

    def _form(self, value: Any, divide: Any, modulo: Any, plus: Any) -> Any:
        if self.of in (ARRAY, MEMBER) and value.dtype == np.bool_:
            value = value.astype(np.int32)
        if not is_static_number(divide, 1):
            value = value // no_less(divide, 1)
        if modulo is not None:
            value = value % no_less(modulo, 1)
        if is_static_number(plus, 0):
            return value
        # Entries of an array may be any int32: those beyond all positions are as good as the last of these.
        return (value.clip(-FAR, FAR) if self.of == ARRAY else value) + plus

    def __repr__(self):
        source = self.of if self.data is None else short(self.data)
        divided = "" if is_static_number(self.divide, 1) else f" // {short(self.divide)}"
        rest = "" if self.modulo is None else f" % {short(self.modulo)}"
        less = isinstance(self.plus, int) and self.plus < 0
        more = "" if is_static_number(self.plus, 0) else f" - {-self.plus}" if less else f" + {short(self.plus)}"
        return source + divided + rest + more


def position(*, divide: Number = 1, modulo: Number | None = None, plus: Number = 0) -> Term:
    """Each token's position // divide % modulo + plus.

    Example:
        >>> position(divide=4)
        position // 4
    """
    return Term(POSITION, None, divide, modulo, plus)


def slot(*, divide: Number = 1, modulo: Number | None = None, plus: Number = 0) -> Term:
    """Each token's slot, which is its index along the array, // divide % modulo + plus.

    Example:
        >>> slot() + 1
        slot + 1
    """
    return Term(SLOT, None, divide, modulo, plus)


def array(
    entries: Any, *, valid: str = "all", divide: Number = 1, modulo: Number | None = None, plus: Number = 0
) -> Term:
    """An entry for each token // divide % modulo + plus.

    Args:
        entries: int or bool [B or 1, L] or [B or 1, N or 1, L]; True is 1.
        valid: which entries count: "all", ">=0" or "!=0". A comparison with any other is not allowed.
        divide: an int >= 1, or an int array of shape () or [B].
        modulo: likewise, or None.
        plus: an int, or an int array of shape () or [B]; then entries beyond ±(2**30 - 1) are as good as these.

    Example:
        >>> array(np.array([[3, 1, -1]]), valid=">=0")
        i32[1,3]
    """
    return Term(ARRAY, entries, divide, modulo, plus, valid)


def number(value: Number) -> Term:
    """The same number for every token: an int, or an int array of shape () or [B].

    Example:
        >>> number(5)
        5
    """
    return Term(NUMBER, value)


def member(positions: Any) -> Term:
    """1 for the tokens at these positions, a tuple of ints; 0 for all others.

    Example:
        >>> member((0, 7))
        (0, 7)
    """
    return Term(MEMBER, positions)


def _nearest_residue(at: np.ndarray, step: int, low, high, divide: int, modulo: int) -> np.ndarray:
    """The nearest token from `at` on in one direction where token // divide % modulo is in [low, high]."""
    low, high, unit = np.maximum(low, 0), np.minimum(high, modulo - 1), at // divide
    residue = unit % modulo
    unit = unit + step * ((residue - high) % modulo if step < 0 else (low - residue) % modulo)
    found = unit * divide + (divide - 1 if step < 0 else 0)
    found = np.where((low <= residue) & (residue <= high), at, found)
    return np.where(low <= high, found, NO_QUERY * step)


def is_static_number(number: Any, value: Any) -> bool:
    """Whether it is this number, and known to be."""
    return isinstance(number, int) and number == value


def within_reach(number: Any) -> int:
    """A static number as far as it matters: further than FAR is further than any two positions lie apart."""
    return max(-FAR, min(FAR, number))


def no_less(number: Any, least: int) -> Any:
    """A number as rules read it. Only a traced one can be less than is legal: then it stands for the least that is."""
    return number if isinstance(number, int) else derived(lambda xp, n: xp.maximum(n, np.int32(least)), number)


def reach(count: Any, dilation: Any, sign: int = 1) -> Any:
    """Count · dilation, or as many dilations as fit into FAR: small enough to be added to a position."""
    count, dilation = no_less(count, 0), no_less(dilation, 1)
    if isinstance(count, int) and isinstance(dilation, int):
        return sign * min(FAR, count * dilation)
    return derived(lambda xp, n, d: xp.minimum(n, FAR // d) * d * np.int32(sign), count, dilation)


def derived(function: Any, *numbers: Any) -> Any:
    """A number made of others, of which only the shapes may be known."""
    if any(isinstance(n, jax.ShapeDtypeStruct) for n in numbers):
        return jax.ShapeDtypeStruct(np.broadcast_shapes(*(getattr(n, "shape", ()) for n in numbers)), np.int32)
    if any(isinstance(n, jax.Array) for n in numbers):
        return function(jnp, *numbers)
    found = function(np, *numbers)
    return found if isinstance(found, int) else np.asarray(found)  # NumPy makes scalars of arrays of shape ()
