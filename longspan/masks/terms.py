"""`Term`: a number for each token of one side. `Compare` compares it with a term of the other side."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import FAR, Array, Number, no_type_check
from longspan.checks import check_choice
from longspan.masks.base import NO_QUERY
from longspan.masks.checks import check_at_least, check_entries, check_indices, check_number
from longspan.masks.cut import gather
from longspan.masks.pytree import Value, rule, short

if TYPE_CHECKING:
    Valid: TypeAlias = Literal["all", ">=0", "!=0"]
else:
    Valid = str  # `Term` checks it, with a better message than the run-time checker

POSITION, SLOT, ARRAY, NUMBER, MEMBER = "position", "slot", "array", "number", "member"
NEAR = 2**28  # a position plus a few numbers of at most this size fits into an int32
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
VALID = {"all": None, ">=0": lambda ids: ids >= 0, "!=0": lambda ids: ids != 0}
INVALID = {">=0": lambda ids: ids < 0, "!=0": lambda ids: ids == 0}


@rule
class Term(Value):
    """A number for each token of a side: source // divide % modulo + plus.

    The functions `position`, `slot`, `array`, `number` and `member` make terms.

    Example:
        >>> from longspan.masks import position
        >>> position() // 4 + 1
        position // 4 + 1
    """

    of: str  # the source: POSITION; SLOT; ARRAY, an entry per token; NUMBER, the same for all; MEMBER, 1 if listed
    data: Any = None  # ARRAY: int or bool [B or 1, L] or [B or 1, N or 1, L]; NUMBER: int, () or [B]; MEMBER: positions
    divide: Number = 1
    modulo: Number | None = None
    plus: Number = 0
    valid: Valid = "all"  # ARRAY: the valid entries; comparisons with other entries are False

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
            raise ValueError(
                f"{self!r} cannot be divided. In a term, `//` must come before `%` and `+`, and only once, as in "
                "`position() // 4 % 2 + 1`."
            )
        return replace(self, divide=divide)

    def __mod__(self, modulo: Number) -> "Term":
        if self.modulo is not None or not is_static_number(self.plus, 0):
            raise ValueError(
                f"{self!r} cannot be followed by `%`. In a term, `%` must come before `+`, and only once, as in "
                "`position() // 4 % 2 + 1`."
            )
        return replace(self, modulo=modulo)

    def __add__(self, more: Number) -> "Term":
        return replace(self, plus=derived(lambda xp, a, b: a + b, self.plus, more))

    def __sub__(self, less: Number) -> "Term":
        return replace(self, plus=derived(lambda xp, a, b: a - b, self.plus, less))

    @property
    def array_axes(self):
        data = "B"
        if self.of == ARRAY:
            data = "B" + "N" * (self.data.ndim - 2) + "."
        return {"data": data, "divide": "B", "modulo": "B", "plus": "B"}

    @property
    def is_static(self) -> bool:
        """Whether it does not depend on data."""
        if self.of == ARRAY or (self.of == NUMBER and not isinstance(self.data, int)):
            return False
        return all(n is None or isinstance(n, int) for n in (self.divide, self.modulo, self.plus))

    @property
    def is_plain(self) -> bool:
        """Whether it equals its source."""
        return is_static_number(self.divide, 1) and self.modulo is None and is_static_number(self.plus, 0)

    @property
    def period(self) -> int:
        """The number of tokens after which a static term repeats; 1 if it does not."""
        if self.of not in (POSITION, SLOT) or self.modulo is None:
            return 1
        return within_reach(self.divide) * within_reach(self.modulo)

    @property
    def grows(self) -> bool:
        """Whether it never decreases as positions (or slots) increase."""
        return self.of in (POSITION, SLOT) and self.modulo is None

    @property
    def _is_near(self) -> bool:
        """Whether it is a position (or slot) plus a static number of at most NEAR: differences fit into an int32."""
        plain = self.grows and is_static_number(self.divide, 1)
        return plain and isinstance(self.plus, int) and abs(self.plus) <= NEAR

    def value(self, slots: Any) -> Any:
        """The term at single slots."""
        if self.of == POSITION:
            return self._formed(slots, slots.position)
        if self.of == SLOT:
            return self._formed(slots, slots.index)
        if self.of == NUMBER:
            return self._formed(slots, slots.number(self.data))
        if self.of == ARRAY:
            return self._formed(slots, slots.take(self.data))
        if not self.data:  # no position is listed
            return self._formed(slots, slots.position != slots.position)
        return self._formed(slots, slots.is_one_of(self.data))

    def defined(self, slots: Any) -> Any:
        """Whether the entry of each slot is valid; None if all are."""
        valid = VALID[self.valid]
        if valid is None:
            return None
        return valid(slots.take(self.data))

    def entries(self, side: Any) -> tuple[Any, Any] | None:
        """The term of an array, [B or 1, L] or [B or 1, N or 1, L], and which entries are valid (None: all).

        None if `divide`, `modulo` or `plus` is an array.
        """
        numbers = (self.divide, self.modulo, self.plus)
        if not all(n is None or isinstance(n, int) for n in numbers):
            return None
        array, valid = side.table(self.data), VALID[self.valid]
        term = self._formed(side, array)
        if valid is None:
            return term, None
        return term, valid(array)

    def range(self, tiles: Any) -> tuple[Any, Any, Any]:
        """(least, greatest, whether all are valid) of each tile; least > greatest if no entry is valid."""
        low, high, total = self._ends(tiles)
        if self.modulo is None:
            return self._formed(tiles, low), self._formed(tiles, high), total
        xp, plus = tiles.side.xp, tiles.number(self.plus)
        divide, modulo = no_less(tiles.number(self.divide), 1), no_less(tiles.number(self.modulo), 1)
        low, high = low // divide, high // divide
        one_round = low // modulo == high // modulo  # no number in between is a multiple of `modulo`
        last = modulo - 1
        if isinstance(modulo, int):
            last = np.int32(last)
        least = xp.where(one_round, low % modulo, np.int32(0))
        greatest = xp.where(one_round, high % modulo, last)
        return least + plus, greatest + plus, total

    def least(self, tiles: Any) -> Any:
        """The least number of each tile."""
        if not self.grows:
            return self.range(tiles)[0]
        if self.of == POSITION:
            return self._formed(tiles, tiles.first)
        return self._formed(tiles, tiles.start)

    def greatest(self, tiles: Any) -> Any:
        """The greatest number of each tile."""
        if not self.grows:
            return self.range(tiles)[1]
        if self.of == POSITION:
            return self._formed(tiles, tiles.last)
        return self._formed(tiles, tiles.stop - 1)

    def source_range(self, side: Any, low: Any, high: Any, *, of: "Term") -> tuple[Any, Any]:
        """The range of the source for which the term, which grows, is in [low, high]; None is no bound.

        Both bounds are numbers of the term `of`. If both terms are positions plus small static numbers, nothing can
        overflow, and a traced program needs no operations to prevent it.
        """
        if self._is_near and of._is_near:
            if is_static_number(self.plus, 0):
                return low, high
            if low is not None:
                low = low - self.plus
            if high is not None:
                high = high - self.plus
            return low, high
        xp, plus, unit = side.xp, side.number(self.plus), no_less(side.number(self.divide), 1)
        limit = FAR // unit  # the largest |position // unit|: bounds beyond it are clipped, so that nothing overflows
        if low is not None:
            low = (xp.clip(low, plus - limit - 1, plus + limit + 1) - plus) * unit
        if high is not None:
            high = (xp.clip(high, plus - limit - 2, plus + limit) - plus + 1) * unit - 1
        return low, high

    def cut(self, slots: Any) -> "Term":
        """The term cut to some slots of its side."""
        if slots is None or self.of not in (SLOT, ARRAY):
            return self
        if self.of == SLOT:
            return replace(self, of=ARRAY, data=slots)
        return replace(self, data=gather(self.data, slots))

    def at(self, token: np.ndarray) -> np.ndarray:
        """A static term at tokens whose position equals their slot."""
        if self.of == MEMBER:
            token = np.isin(token, self.data).astype(np.int64)
        if self.of == NUMBER:
            token = token * 0 + within_reach(self.data)
        value = token // within_reach(self.divide)
        if self.modulo is not None:
            value = value % within_reach(self.modulo)
        return value + within_reach(self.plus)

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
        if step < 0:
            found = np.minimum(at, high)
        else:
            found = np.maximum(at, low)
        return np.where((found >= low) & (found <= high), found, NO_QUERY * step)

    def places(self, other: "Term") -> frozenset[int]:
        """The tokens at which the comparison of a static term with a number, or a `member`, may change."""
        if self.of == MEMBER:
            return frozenset(place + side for place in self.data for side in (0, 1))
        if not self.grows:
            return frozenset()
        unit = within_reach(self.divide)
        if other.of == NUMBER:
            values = other.at(np.arange(1))
        else:
            values = other._of_members()
        starts = [(int(value) - within_reach(self.plus)) * unit for value in values]
        return frozenset(start + side for start in starts for side in (0, unit))

    def _nearest_member(self, at, step: int, low, high):
        """`nearest` of a `member` term: of the nearest member, the nearest token that is none, or both."""
        without, with_member = self._of_members()
        zero, one = (low <= without) & (without <= high), (low <= with_member) & (with_member <= high)
        members = np.unique(np.array(self.data, np.int64))
        # Consecutive members are a run. The nearest token that is no member is next to the end of the run.
        runs = np.cumsum(np.diff(members, prepend=members[:1]) > 1)
        if step < 0:
            index = np.searchsorted(members, at, side="right") - 1
            ends = members[np.searchsorted(runs, runs)] - 1
        else:
            index = np.searchsorted(members, at)
            ends = members[np.searchsorted(runs, runs, "right") - 1] + 1
        member = np.array([-NO_QUERY, *members, NO_QUERY])[index + 1]
        outside, inside = np.array(at), np.isin(at, members)
        outside[inside] = ends[np.searchsorted(members, outside[inside])]
        return np.where(zero & one, at, np.where(one, member, np.where(zero, outside, NO_QUERY * step)))

    def _of_members(self) -> np.ndarray:
        """The term of a token that is not a member, and of one that is."""
        return replace(self, of=POSITION, data=None).at(np.arange(2))

    def _ends(self, tiles) -> tuple[Any, Any, Any]:
        """(least, greatest, whether all are valid) of the source in each tile."""
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
        low, high = tiles.least(self.data, VALID[self.valid]), tiles.greatest(self.data, VALID[self.valid])
        return low, high, tiles.least(self.data, INVALID[self.valid]) == MOST

    def _formed(self, side, value):
        """The term, computed from the value of its source."""
        divide, plus = side.number(self.divide), side.number(self.plus)
        if self.of in (ARRAY, MEMBER) and value.dtype == np.bool_:
            value = value.astype(np.int32)
        if not is_static_number(divide, 1):
            value = value // no_less(divide, 1)
        if self.modulo is not None:
            value = value % no_less(side.number(self.modulo), 1)
        if is_static_number(plus, 0):
            return value
        if self.of == ARRAY:  # entries may be any int32: those beyond ±FAR are clipped, so that the sum fits
            value = value.clip(-FAR, FAR)
        return value + plus

    def __repr__(self):
        text = self.of
        if self.data is not None:
            text = short(self.data)
        if not is_static_number(self.divide, 1):
            text += f" // {short(self.divide)}"
        if self.modulo is not None:
            text += f" % {short(self.modulo)}"
        if is_static_number(self.plus, 0):
            return text
        if isinstance(self.plus, int) and self.plus < 0:
            return f"{text} - {-self.plus}"
        return f"{text} + {short(self.plus)}"


def position(*, divide: Number = 1, modulo: Number | None = None, plus: Number = 0) -> Term:
    """The term position // divide % modulo + plus.

    Args:
        divide: an int >= 1, or an int array of shape () or [B].
        modulo: likewise, or None.
        plus: an int, or an int array of shape () or [B].

    Example:
        >>> position(divide=4)
        position // 4
    """
    return Term(POSITION, None, divide, modulo, plus)


def slot(*, divide: Number = 1, modulo: Number | None = None, plus: Number = 0) -> Term:
    """The term slot // divide % modulo + plus, where a slot is a token's index in the array.

    Args:
        divide: an int >= 1, or an int array of shape () or [B].
        modulo: likewise, or None.
        plus: an int, or an int array of shape () or [B].

    Example:
        >>> slot() + 1
        slot + 1
    """
    return Term(SLOT, None, divide, modulo, plus)


@no_type_check
def array(
    entries: Array | jax.ShapeDtypeStruct | Sequence[Any],
    *,
    valid: Valid = "all",
    divide: Number = 1,
    modulo: Number | None = None,
    plus: Number = 0,
) -> Term:
    """The term entry // divide % modulo + plus, with one array entry per token.

    Args:
        entries: int or bool [B or 1, L] or [B or 1, N or 1, L]; True is 1.
        valid: the valid entries: "all", ">=0" or "!=0". Comparisons with other entries are False.
        divide: an int >= 1, or an int array of shape () or [B].
        modulo: likewise, or None.
        plus: an int, or an int array of shape () or [B]; if it is not 0, entries are clipped to ±(2**30 - 1).

    Example:
        >>> array(np.array([[3, 1, -1]]), valid=">=0")
        i32[1,3]
    """
    return Term(ARRAY, entries, divide, modulo, plus, valid)


def number(value: Number) -> Term:
    """The same number for every token.

    Args:
        value: an int, or an int array of shape () or [B].

    Example:
        >>> number(5)
        5
    """
    return Term(NUMBER, value)


@no_type_check
def member(positions: Sequence[int] | int) -> Term:
    """1 for the tokens at some positions, 0 for all others.

    Args:
        positions: the positions, a tuple of ints.

    Example:
        >>> member((0, 7))
        (0, 7)
    """
    return Term(MEMBER, positions)


def _nearest_residue(at: np.ndarray, step: int, low, high, divide: int, modulo: int) -> np.ndarray:
    """The token nearest to `at`, in direction `step`, for which token // divide % modulo is in [low, high]."""
    low, high, unit = np.maximum(low, 0), np.minimum(high, modulo - 1), at // divide
    residue = unit % modulo
    if step < 0:
        found = (unit - (residue - high) % modulo) * divide + divide - 1
    else:
        found = (unit + (low - residue) % modulo) * divide
    found = np.where((low <= residue) & (residue <= high), at, found)
    return np.where(low <= high, found, NO_QUERY * step)


def is_static_number(number: Any, value: Any) -> bool:
    """Whether a number is a Python int of this value."""
    return isinstance(number, int) and number == value


def within_reach(number: Any) -> int:
    """A static number clipped to ±FAR, the largest position: larger numbers have the same effect."""
    return max(-FAR, min(FAR, number))


def no_less(number: Any, least: int) -> Any:
    """A number, at least `least`. Static numbers were checked; a traced number below `least` is replaced by it."""
    if isinstance(number, int):
        return number
    return derived(lambda xp, n: xp.maximum(n, np.int32(least)), number)


def reach(count: Any, dilation: Any, sign: int = 1) -> Any:
    """Count · dilation · sign. The product is limited to FAR, so that it can be added to a position."""
    count, dilation = no_less(count, 0), no_less(dilation, 1)
    if isinstance(count, int) and isinstance(dilation, int):
        return sign * min(FAR, count * dilation)
    return derived(lambda xp, n, d: xp.minimum(n, FAR // d) * d * np.int32(sign), count, dilation)


def derived(function: Any, *numbers: Any) -> Any:
    """function(namespace, *numbers), or only its shape if only the shapes of numbers are known."""
    if any(isinstance(n, jax.ShapeDtypeStruct) for n in numbers):
        return jax.ShapeDtypeStruct(np.broadcast_shapes(*(getattr(n, "shape", ()) for n in numbers)), np.int32)
    if any(isinstance(n, jax.Array) for n in numbers):
        return function(jnp, *numbers)
    found = function(np, *numbers)
    if isinstance(found, int):
        return found
    return np.asarray(found)  # because NumPy turns arrays of shape () into scalars
