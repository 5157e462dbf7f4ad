"""`Mask`: an immutable rule for who may attend to whom, and its algebra `&`, `|`, `~`.

A rule is written once at three granularities: `allowed` for single tokens, `classify` for tiles, `kv_spans` (with its
mirror `q_spans`) for whole rows of tiles. The algebra combines all three, so a composition is as sound as its parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import reduce, wraps
from typing import Any, NamedTuple, dataclass_transform, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from longspan._checks import check_extents, check_lengths, check_positions
from longspan._types import Array, Namespace, Positions
from longspan.masks.side import KEYS, QUERIES, Slots, Tiles, two_sides

MOST_INTERVALS = 64  # a rule that needs more than this many intervals a row is covered by fewer, wider ones


class Extent(NamedTuple):
    """One fact that an array in a mask fixes: `name` has `size` blocks of `unit` along `axis` (B, N, T or S)."""

    name: str
    axis: str
    size: int
    unit: int = 1


class Spans(NamedTuple):
    """What a row of tiles may see: half-open slot intervals, and tiles that every row sees.

    `low`, `high`: [B or 1, N or 1, rows, P] (for `q_spans` [.., P, rows]); `common`: bool over the other side's
    tiles, rank 4, or None.
    """

    low: Any
    high: Any
    common: Any = None


class Mask:
    """A rule for which query may attend to which key; `True` = may attend.

    Masks know no lengths. They compose with `&`, `|` and `~`, are pytrees whose leaves are their arrays (so new
    arrays never retrace), compare by value, and hash if they hold no arrays. `~` is plain negation: it opens padding,
    so add padding last, with `&`.

    Subclass with `@rule` and define `allowed`; `classify`, `kv_spans` and `q_spans` are optional and let engines skip.

    Example:
        >>> from longspan import Causal, Window
        >>> print((Causal() & Window(1, 1)).show(4, 4))
        #...
        ##..
        .##.
        ..##
    """

    static: tuple[str, ...] = ()  # fields whose NumPy arrays belong to the structure, not to the data
    _data: tuple[str, ...] = ()  # fields that are pytree children, found by `rule`

    def allowed(self, q: Slots, kv: Slots) -> Bool[Array, "..."]:
        """The truth for each pair of slots, rank 4."""
        raise NotImplementedError(f"{type(self).__name__} must define `allowed(q, kv)`.")

    def classify(self, q: Tiles, kv: Tiles) -> tuple[Any, Any]:
        """(may_any, must_all) for each pair of tiles: sound bounds, so (True, False) is always legal."""
        return _constant(q.side.xp, True), _constant(q.side.xp, False)

    def kv_spans(self, q: Tiles, kv: Tiles) -> Spans:
        """Key slots that cover all that each query tile may see."""
        return everything(q.side.xp, kv.side.length)

    def q_spans(self, kv: Tiles, q: Tiles) -> Spans:
        """Query slots that cover all that may see each key tile."""
        return everything(q.side.xp, q.side.length)

    def band(self) -> tuple[Any, Any] | None:
        """(low, high) if the rule is just low <= k - q <= high, so that `&` can merge such rules into one."""
        return None

    def extents(self) -> Iterator[Extent]:
        """The sizes that this mask's arrays fix."""
        for name, value in self.__dict__.items():
            if name in self._data and getattr(value, "ndim", 0) == 1:
                yield Extent(f"{type(self).__name__}.{name}", "B", value.shape[0])

    @property
    def batch(self) -> int:
        """How many batch rows the mask's arrays tell apart (1: all rows alike)."""
        return max([e.size for e in self.extents() if e.axis == "B"], default=1)

    @property
    def heads(self) -> int:
        """How many heads the mask tells apart (1: all heads alike)."""
        return max([e.size for e in self.extents() if e.axis == "N"], default=1)

    @no_type_check
    def dense(
        self, q_len: int, kv_len: int, *, q_positions: Positions | None = None, kv_positions: Positions | None = None
    ) -> Bool[Array, "B_or_1 N_or_1 T S"]:
        """The whole truth table, bool [B or 1, N or 1, T, S]. This is the T×S array that Longspan otherwise avoids.

        Args:
            q_len: number of queries, T.
            kv_len: number of keys, S.
            q_positions: int [T], [1, T] or [B, T]; by default each slot's index.
            kv_positions: int [S], [1, S] or [B, S]; by default each slot's index.

        Example:
            >>> from longspan import Causal
            >>> Causal().dense(2, 3)[0, 0].astype(int).tolist()
            [[1, 0, 0], [1, 1, 0]]
        """
        q, kv = self._sides(q_len, kv_len, q_positions, kv_positions, jnp)
        shape = (max(q.batch.size, *(_rows(s.positions) for s in (q, kv))), self.heads, q_len, kv_len)
        return self._broadcast(self.allowed(q.slots(), kv.slots()), shape)

    @no_type_check
    def layout(
        self,
        q_len: int,
        kv_len: int,
        *,
        q_tile: int = 128,
        kv_tile: int = 128,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
    ):
        """The `BlockLayout` of this mask: which key tiles each query tile visits.

        Example:
            >>> from longspan import Window
            >>> Window(1, 1).layout(512, 512, q_tile=128, kv_tile=128).visits()
            10
        """
        from longspan.layout import plan

        return plan(self, q_len, kv_len, q_tile, kv_tile, q_positions=q_positions, kv_positions=kv_positions)

    @no_type_check
    def show(
        self,
        q_len: int,
        kv_len: int,
        *,
        batch: int = 0,
        head: int = 0,
        most: int = 64,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
    ) -> str:
        """A picture in characters: one row per query, `#` = may attend, `.` = may not.

        Lengths over `most` are drawn by blocks: `#` all of the block, `+` some, `.` none. The rule is asked about
        tiles, and about pairs only where tiles do not tell, so a million tokens can be drawn.

        Args:
            q_len: number of queries, T.
            kv_len: number of keys, S.
            batch: which batch row.
            head: which head.
            most: characters along a side.
            q_positions: int [T], [1, T] or [B, T]; by default each slot's index.
            kv_positions: int [S], [1, S] or [B, S]; by default each slot's index.

        Example:
            >>> from longspan import Window
            >>> print(Window(1, 0).show(3, 3))
            #..
            ##.
            .##
        """
        from longspan.render import draw

        positions = dict(q_positions=q_positions, kv_positions=kv_positions)
        return draw(self, q_len, kv_len, batch=batch, head=head, most=most, **positions)

    def __and__(self, other: "Mask") -> "Mask":
        return And(_flat(And, self, other)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return Or(_flat(Or, self, other)) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return Not(self)

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._arguments())})"

    def _arguments(self) -> list[str]:
        return [f"{f.name}={short(getattr(self, f.name))}" for f in fields(self)]  # type: ignore[arg-type]

    def _sides(self, q_len, kv_len, q_positions, kv_positions, xp: Namespace):
        check_lengths(q_len, kv_len)
        check_extents(self, q_len=q_len, kv_len=kv_len)
        batch = self.batch
        for name, positions, length in (("q_positions", q_positions, q_len), ("kv_positions", kv_positions, kv_len)):
            batch = max(batch, check_positions(name, positions, length, None if batch == 1 else batch))
        return two_sides(
            q_len, kv_len, batch=batch, heads=self.heads, q_positions=q_positions, kv_positions=kv_positions, xp=xp
        )

    def _broadcast(self, truth, shape):
        return jnp.broadcast_to(truth, shape)


@dataclass_transform(frozen_default=True, eq_default=False)
def rule(cls):
    """Makes a frozen pytree of a `Mask` subclass: fields that hold arrays or masks are data, all others are static."""
    cls = dataclass(frozen=True, eq=False, repr=False)(cls)
    names = tuple(f.name for f in fields(cls))
    plain_init = cls.__init__

    @wraps(plain_init)
    def init(self, *args, **kwargs):
        plain_init(self, *args, **kwargs)
        # Decided once, here: JAX rebuilds masks with placeholders (ints, None) where the arrays were.
        object.__setattr__(self, "_data", tuple(n for n in names if _is_data(getattr(self, n), n in cls.static)))

    def flatten_with_keys(self):
        data = [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in self._data]
        static = tuple((n, _hashable(getattr(self, n))) for n in names if n not in self._data)
        return data, (self._data, static)

    def flatten(self):
        static = tuple((n, _hashable(getattr(self, n))) for n in names if n not in self._data)
        return [getattr(self, n) for n in self._data], (self._data, static)

    def unflatten(aux, children):
        data, static = aux
        self = object.__new__(cls)
        for name, value in (*zip(data, children, strict=True), *static):
            object.__setattr__(self, name, value.array if isinstance(value, StaticArray) else value)
        object.__setattr__(self, "_data", data)
        return self

    cls.__init__ = init
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


class StaticArray:
    """A NumPy array as part of a mask's static structure: compared and hashed by its contents."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self._key = (array.shape, array.dtype.str, array.tobytes())

    def __eq__(self, other):
        return isinstance(other, StaticArray) and self._key == other._key

    def __hash__(self):
        return hash(self._key)


@rule
class And(Mask):
    """Allows what every one of `masks` allows; write it `a & b`.

    Example:
        >>> from longspan import Causal, Chunk
        >>> Causal() & Chunk(4)
        Causal() & Chunk(4)
    """

    masks: tuple[Mask, ...]

    def allowed(self, q, kv):
        return reduce(lambda a, b: a & b, [m.allowed(q, kv) for m in self.masks])

    def classify(self, q, kv):
        kinds = [m.classify(q, kv) for m in self._merged(q.side)]
        return reduce(lambda a, b: (a[0] & b[0], a[1] & b[1]), kinds)

    def kv_spans(self, q, kv):
        return reduce(_intersect(KEYS), [m.kv_spans(q, kv) for m in self._merged(q.side)])

    def q_spans(self, kv, q):
        return reduce(_intersect(QUERIES), [m.q_spans(kv, q) for m in self._merged(q.side)])

    def band(self):
        bands = [m.band() for m in self.masks]
        return _meet(bands) if all(b is not None for b in bands) else None

    def extents(self):
        for mask in self.masks:
            yield from mask.extents()

    def _merged(self, side) -> list[Mask]:
        """The parts, with all bands (causal, windows) merged into one: tighter than each on its own."""
        from longspan.masks.numbers import MergedBand

        bands = [m.band() for m in self.masks]
        if sum(b is not None for b in bands) < 2:
            return list(self.masks)
        others = [m for m, b in zip(self.masks, bands, strict=True) if b is None]
        low, high = _meet([tuple(None if n is None else side.number(n) for n in b) for b in bands if b is not None])
        return [MergedBand(low, high), *others]

    def __repr__(self):
        return " & ".join(_wrapped(m, Or) for m in self.masks)


@rule
class Or(Mask):
    """Allows what any one of `masks` allows; write it `a | b`.

    Example:
        >>> from longspan import Prefix, Window
        >>> Window(2, 0) | Prefix(1)
        Window(2, 0) | Prefix(1)
    """

    masks: tuple[Mask, ...]

    def allowed(self, q, kv):
        return reduce(lambda a, b: a | b, [m.allowed(q, kv) for m in self.masks])

    def classify(self, q, kv):
        kinds = [m.classify(q, kv) for m in self.masks]
        return reduce(lambda a, b: (a[0] | b[0], a[1] | b[1]), kinds)

    def kv_spans(self, q, kv):
        return reduce(_unite(KEYS), [m.kv_spans(q, kv) for m in self.masks])

    def q_spans(self, kv, q):
        return reduce(_unite(QUERIES), [m.q_spans(kv, q) for m in self.masks])

    def extents(self):
        for mask in self.masks:
            yield from mask.extents()

    def __repr__(self):
        return " | ".join(repr(m) for m in self.masks)


@rule
class Not(Mask):
    """Allows what `mask` does not; write it `~a`. Padding is opened too: add padding after it, with `&`.

    Example:
        >>> from longspan import Causal
        >>> print((~Causal()).show(3, 3))
        .##
        ..#
        ...
    """

    mask: Mask

    def allowed(self, q, kv):
        return ~self.mask.allowed(q, kv)

    def classify(self, q, kv):
        may_any, must_all = self.mask.classify(q, kv)
        return ~must_all, ~may_any

    def extents(self):
        yield from self.mask.extents()

    def __repr__(self):
        return f"~{_wrapped(self.mask, And, Or)}"


def everything(xp: Namespace, length: int) -> Spans:
    """One interval that covers a whole side."""
    return Spans(xp.zeros((1, 1, 1, 1), np.int32), xp.full((1, 1, 1, 1), length, np.int32))


def nothing(xp: Namespace) -> Spans:
    """One empty interval."""
    return Spans(xp.zeros((1, 1, 1, 1), np.int32), xp.zeros((1, 1, 1, 1), np.int32))


def whole_or_nothing(xp: Namespace, seen, length: int) -> Spans:
    """The whole other side for the tiles that are `seen`, nothing for the others."""
    return Spans(xp.zeros_like(seen, np.int32), xp.where(seen, np.int32(length), np.int32(0)))


def short(value: Any) -> str:
    """A value as it stands in a repr: arrays by dtype and shape (`i32[2,7]`), tuples and masks in full."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = {"bool": "bool", "int": "i", "uint": "u", "float": "f", "bfloat": "bf"}
        name = np.dtype(value.dtype).name if not isinstance(value.dtype, str) else value.dtype
        letters = name.rstrip("0123456789")
        return f"{kind.get(letters, letters)}{name[len(letters) :]}[{','.join(map(str, value.shape))}]"
    return repr(value)


def _constant(xp: Namespace, truth: bool):
    return xp.full((1, 1, 1, 1), truth)


def _rows(positions) -> int:
    return 1 if positions is None else positions.shape[0]


def _flat(kind, *masks: Mask) -> tuple[Mask, ...]:
    """Nested ands (ors) as one tuple, so that grouping does not show."""
    return tuple(part for m in masks for part in (getattr(m, "masks", ()) if type(m) is kind else (m,)))


def _wrapped(mask: Mask, *kinds) -> str:
    return f"({mask!r})" if isinstance(mask, kinds) else repr(mask)


def _is_data(value: Any, static_if_numpy: bool = False) -> bool:
    if isinstance(value, np.ndarray):
        return not static_if_numpy
    if isinstance(value, jax.Array | Mask | jax.ShapeDtypeStruct):
        return True
    return isinstance(value, tuple) and any(_is_data(v) for v in value)


def _hashable(value: Any) -> Any:
    return StaticArray(value) if isinstance(value, np.ndarray) else value


def _meet(bands):
    """The intersection of bands whose ends are ints, arrays or None (unbounded)."""
    lows = [low for low, _ in bands if low is not None]
    highs = [high for _, high in bands if high is not None]
    return (
        reduce(_pick(max, jnp.maximum, np.maximum), lows) if lows else None,
        reduce(_pick(min, jnp.minimum, np.minimum), highs) if highs else None,
    )


def _pick(of_ints, of_jax, of_numpy):
    def pick(a, b):
        if isinstance(a, int) and isinstance(b, int):
            return of_ints(a, b)
        return (of_numpy if all(isinstance(x, int | np.ndarray) for x in (a, b)) else of_jax)(a, b)

    return pick


def _unite(axis: int):
    def unite(a: Spans, b: Spans) -> Spans:
        low, high = (_join(axis, x, y) for x, y in ((a.low, b.low), (a.high, b.high)))
        return Spans(low, high, _either(a.common, b.common))

    return unite


def _intersect(axis: int):
    def intersect(a: Spans, b: Spans) -> Spans:
        # What both see lies in an interval of each, or in a tile common to one of them.
        common = _either(a.common, b.common)
        if a.low.shape[axis] * b.low.shape[axis] > MOST_INTERVALS:
            few, many = sorted((a, b), key=lambda s: s.low.shape[axis])
            return Spans(*_clip(axis, few, many), common)
        xp = np if all(isinstance(x, np.ndarray) for x in (a.low, b.low)) else jnp
        pairs = [(i, j) for i in range(a.low.shape[axis]) for j in range(b.low.shape[axis])]
        low = _stack(axis, [xp.maximum(_nth(axis, a.low, i), _nth(axis, b.low, j)) for i, j in pairs])
        high = _stack(axis, [xp.minimum(_nth(axis, a.high, i), _nth(axis, b.high, j)) for i, j in pairs])
        return Spans(low, high, common)

    return intersect


def _clip(axis: int, few: Spans, many: Spans):
    """The intervals of `few`, cut to what lies between the first and the last of `many`."""
    xp = np if all(isinstance(x, np.ndarray) for x in (few.low, many.low)) else jnp
    empty, never = many.low >= many.high, np.int32(np.iinfo(np.int32).max)
    first = xp.min(xp.where(empty, never, many.low), axis=axis, keepdims=True)
    last = xp.max(xp.where(empty, np.int32(0), many.high), axis=axis, keepdims=True)
    return xp.maximum(few.low, first), xp.minimum(few.high, last)


def _nth(axis: int, array, i: int):
    return array[:, :, :, i : i + 1] if axis == KEYS else array[:, :, i : i + 1, :]


def _join(axis: int, a, b):
    return _stack(axis, [a, b])


def _stack(axis: int, arrays):
    xp = np if all(isinstance(a, np.ndarray) for a in arrays) else jnp
    shape = np.broadcast_shapes(*[tuple(1 if i == axis else n for i, n in enumerate(a.shape)) for a in arrays])
    full = [tuple(a.shape[i] if i == axis else n for i, n in enumerate(shape)) for a in arrays]
    return xp.concatenate([xp.broadcast_to(a, s) for a, s in zip(arrays, full, strict=True)], axis=axis)


def _either(a, b):
    if a is None or b is None:
        return b if a is None else a
    return a | b
