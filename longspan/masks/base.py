"""`Mask`: an immutable rule for which query may attend to which key.

A rule is defined at three granularities: `allowed` for single tokens, `classify` for tiles, and `kv_spans` (with its
mirror `q_spans`) for whole rows of tiles. The algebra combines all three, so the bounds of a composition hold if those
of its parts do.

A mask also has properties: the masks it is made of (`parts`), the data it `reads`, its `cut` to some slots. The
defaults are safe for every rule: it reads everything and bounds nothing.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from longspan.array_types import Array, Namespace, Positions, no_type_check
from longspan.checks import check_lengths, check_sides, is_known, renamed_argument
from longspan.constants import on_host
from longspan.masks.checks import check_bools, check_slots
from longspan.masks.count_pieces import CountPiece
from longspan.masks.properties import Extent as Extent
from longspan.masks.properties import Listing as Listing
from longspan.masks.properties import Periodicity as Periodicity
from longspan.masks.properties import Pinned as Pinned
from longspan.masks.pytree import Value
from longspan.masks.pytree import rule as rule
from longspan.masks.sides import Side, Slots, Tiles, two_sides
from longspan.masks.spans import Spans, everything

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from longspan.explorer.explore import MaskExplorer
    from longspan.layout import BlockLayout

POSITION, SLOT = "position", "slot"  # the two properties of a token that a rule may read
BY_POSITION, BY_SLOT = frozenset({POSITION}), frozenset({SLOT})
FEW_PAIRS = 2**22  # up to this many pairs, NumPy is faster than compiling a JAX operation
NO_QUERY = 2**62  # `nearest_query` gives NO_QUERY * step for a key that no query sees: it is beyond every position


# Attributes that a subclass must not inherit when it overrides `allowed`. A `Rule` takes them from its lowered mask.
NOT_INHERITED = (
    "reads", "reads_q_place", "by_token", "is_strided", "classify", "kv_spans", "q_spans", "nearest_query",
    "periodicity", "inexact", "unbounded", "provable_kinds", "pinned", "listing", "documents", "of_head", "negated",
    "_cut", "_count_pieces",
)  # fmt: skip


class Mask(Value):
    """A rule for which query may attend to which key; `True` = may attend.

    Masks do not depend on lengths. They compose with `&`, `|` and `~`. They are pytrees whose leaves are their arrays
    (new arrays never retrace), compare by value, and hash if they hold no arrays. `~mask` also allows pairs with
    padding. To exclude padding, add the padding rule after the negation: `~mask & KvLengths(lengths)`.

    Subclass with `@rule` and define `allowed`. `classify`, `kv_spans` and `q_spans` are optional: with them, engines
    skip tiles. Read arrays through the sides (`q.take(array)`, `q.number(value)`, `q.table(array)`). By default,
    Longspan assumes that a rule compares both positions and slots. If the rule compares only one of them, or neither,
    set `reads`. Set `array_axes` to name the axes of arrays that are batch rows and heads (`{"ids": "BT"}`); arrays
    without an entry there are replicated on every device.

    Example:
        >>> from longspan import Causal, Window
        >>> print((Causal() & Window(1, 1)).show(4, 4))
        #...
        ##..
        .##.
        ..##
    """

    # "position", "slot" or both. A rule by position applies to any slots unchanged; a rule by slot must be `cut`.
    reads: ClassVar[frozenset[str]] = BY_POSITION | BY_SLOT
    array_axes: ClassVar[dict[str, str]] = {}
    applied: ClassVar[str | None] = None  # the name of this rule in `MaskInfo.baked_in_masks`
    # The arrays have one entry per token, and slot indices are not read: if tokens are reordered, so are the entries.
    by_token: ClassVar[bool] = False
    is_monotone: ClassVar[bool] = True  # whether allowing more pairs in a part never forbids a pair of this mask

    def __init_subclass__(cls, **options: Any) -> None:
        """Resets the attributes in `NOT_INHERITED` to those of `Mask` if the class overrides `allowed`."""
        super().__init_subclass__(**options)
        if "allowed" in vars(cls):
            cls.allowed = _of_bools(cls.allowed)
            for name in NOT_INHERITED:
                defined_in = next(c for c in cls.__mro__ if name in vars(c))
                # An abstract parent without `allowed` defines the attribute for all of its subclasses.
                if defined_in is not cls and defined_in.allowed is not Mask.allowed:
                    setattr(cls, name, vars(Mask)[name])

    def allowed(self, q: Slots, kv: Slots) -> Bool[Array, "..."]:
        """Whether each pair of slots is allowed, of rank 4."""
        raise NotImplementedError(f"{type(self).__name__} must define `allowed(q, kv)`.")

    def classify(self, q: Tiles, kv: Tiles) -> tuple[Any, Any]:
        """Bounds (may_any, must_all) for each pair of tiles; (True, False) is always correct.

        `may_any` is True if any pair of tokens is allowed; `must_all` is True only if all are.
        """
        return q.side.xp.full((1, 1, 1, 1), True), q.side.xp.full((1, 1, 1, 1), False)

    def kv_spans(self, q: Tiles, kv: Tiles) -> Spans:
        """Spans of key slots that cover all keys that each query tile may see."""
        return everything(q.side.xp, kv.side.length)

    def q_spans(self, kv: Tiles, q: Tiles) -> Spans:
        """Spans of query slots that cover all queries that may see each key tile."""
        return everything(q.side.xp, q.side.length)

    @property
    def reads_q_place(self) -> bool:
        """Whether the mask depends on the position or the slot index of a query.

        It does not if it reads only the keys' (`Prefix`), or only arrays along the queries, which `cut` cuts.
        """
        return bool(self.reads)

    def lower(self) -> "Mask":
        """The same mask in terms of other masks: most leaves are one or two comparisons (`Compare`)."""
        return self

    def atoms(self) -> "Mask":
        """The same mask made of atoms only, which plans and engines evaluate.

        Atoms are comparisons, tables, arrays of bools and users' own rules. Call it once and keep the result: lowering
        computes numbers, which a program would compute again.
        """
        return self.lower()

    def negated(self) -> "Mask | None":
        """The negation as a mask that can skip tiles; None if there is none."""
        return None

    def parts(self) -> tuple["Mask", ...]:
        """The masks that this one is made of, one level deep."""
        return ()

    def with_parts(self, parts: Sequence["Mask"]) -> "Mask":
        """The same composition with other parts, in the same number."""
        assert not parts, f"{type(self).__name__} has no parts"
        return self

    def walk(self) -> Iterator["Mask"]:
        """The mask itself and all masks inside it.

        Example:
            >>> from longspan import Causal, Chunk, Window
            >>> list((Causal() & ~Chunk(4)).walk())
            [Causal() & ~Chunk(4), Causal(), ~Chunk(4), Chunk(4)]
        """
        yield self
        for part in self.parts():
            yield from part.walk()

    def unbounded(self) -> tuple["Mask", ...]:
        """The leaves without `classify` and `kv_spans`: they skip no tile."""
        if type(self).classify is Mask.classify and type(self).kv_spans is Mask.kv_spans:
            return (self,)
        return tuple(leaf for part in self.parts() for leaf in part.unbounded())

    def provable_kinds(self) -> tuple[bool, bool]:
        """Whether the mask can prove that a tile is EMPTY, and whether it can prove that a tile is FULL."""
        bounded = not self.unbounded()
        return bounded, bounded and type(self).classify is not Mask.classify

    def nearest_query(self, key: np.ndarray, at: np.ndarray, step: int) -> np.ndarray:
        """The last query <= `at` (step = -1), or the first query >= `at` (step = 1), that may see each key.

        It is NO_QUERY * step if there is none. Caches use this to decide when to evict a key. By default every query
        may attend to every key.
        """
        return at

    def inexact(self) -> tuple["Mask", ...]:
        """The leaves for which `nearest_query` is only a bound: those that hold data, and users' own rules."""
        if type(self).nearest_query is Mask.nearest_query:
            return (self,)
        return tuple(leaf for part in self.parts() for leaf in part.inexact())

    def periodicity(self) -> Periodicity | None:
        """The quantities `nearest_query` depends on: with them, caches plan one period instead of every position.

        None if they are not known. With the default `nearest_query` there are none: every query sees every key.
        """
        if type(self).nearest_query is not Mask.nearest_query:
            return None
        return Periodicity()

    @property
    def is_strided(self) -> bool:
        """Whether a key is seen by queries at a fixed distance from each other, and not by those between."""
        return False

    def pinned(self, length: int) -> Pinned:
        """Splits off the known tokens among `length` that every query sees, or that see every key.

        Devices that share a sequence gather these tokens separately, and plan only the rest.
        """
        return Pinned(self)

    def listing(self) -> Listing | None:
        """The properties of a table that lists blocks; None for other masks.

        Devices that share a sequence then send each other the listed blocks, per head.
        """
        return None

    def of_head(self, head: int) -> "Mask":
        """The mask of one head."""
        return self.with_parts([part.of_head(head) for part in self.parts()])

    def documents(self) -> tuple[Any, Any] | None:
        """The document ids of both sides, int [B or 1, T] and [B or 1, S], or None: pictures show them as bands."""
        return next((ids for part in self.parts() if (ids := part.documents()) is not None), None)

    def largest_number(self) -> int:
        """The largest number in the mask: a picture must be longer than this to show its effect."""
        own = []
        for value in vars(self).values():
            if isinstance(value, tuple):
                own += value
            else:
                own.append(value)
        numbers = [abs(n) for n in own if isinstance(n, int) and not isinstance(n, bool)]
        # Arrays of rank 0 and 1 hold numbers per batch row. Arrays of higher rank run along tokens: ids and flags.
        arrays = [n for n in own if isinstance(n, np.ndarray | jax.Array) and n.ndim <= 1 and is_known(n)]
        numbers += [int(np.abs(np.asarray(n)).max(initial=0)) for n in arrays if n.dtype.kind == "i"]
        return max([*numbers, *(part.largest_number() for part in self.parts())], default=0)

    @no_type_check
    def cut(
        self,
        q: Int[Array, "*B n"] | Sequence[int] | None = None,
        kv: Int[Array, "*B n"] | Sequence[int] | None = None,
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> "Mask":
        """The mask of some slots of each side: one decoding step, or one shard.

        Rules that compare positions (`Causal`, `Window`, `Chunk`, ...) are not changed by `cut`. For these rules, pass
        the positions of the kept slots to `attention`, as `q_positions` and `kv_positions`. If the slots are in
        increasing order, tiles can still be skipped.

        Args:
            q: the query slots to keep, int [n] or [B, n]: NumPy (static) or JAX (data, may be traced); None: all.
            kv: the key slots to keep, likewise.
            q_len: number of queries before the cut; needed only for your own rules that read `side.length`.
            kv_len: number of keys before the cut, likewise.

        Example:
            >>> from longspan import Segments
            >>> print(Segments(np.array([[0, 0, 1, 1]])).cut(np.array([1, 2])).show(2, 4))
            ##..
            ..##
        """
        q_limit, kv_limit = q_len, kv_len
        if q_limit is None:
            q_limit = self._length("T")
        if kv_limit is None:
            kv_limit = self._length("S")
        q, kv = check_slots(self, q, kv, q_limit, kv_limit)
        if (q is None and kv is None) or SLOT not in self.reads:
            return self
        return self._cut(q, kv, q_len, kv_len)

    def _cut(self, q, kv, q_len: int | None, kv_len: int | None) -> "Mask":
        """`cut` of a rule by slot, to int32 [B or 1, n] or None; by default the rule is evaluated at these slots."""
        from longspan.masks.cut import cut_mask

        return cut_mask(self, q, kv, q_len, kv_len)

    def extents(self) -> Iterator[Extent]:
        """Yields the sizes that the mask's arrays fix."""
        for name, letters in self._letters():
            for axis, size in zip(letters, getattr(self, name).shape, strict=True):
                if axis != ".":
                    yield Extent(f"{type(self).__name__}.{name}", axis, size)
        for part in self.parts():
            yield from part.extents()

    def _length(self, axis: str) -> int | None:
        """The length that the mask's arrays fix along an axis (T or S), or None; the last block may exceed it."""
        return min(((e.unit, e.size * e.unit) for e in self.extents() if e.axis == axis), default=(1, None))[1]

    @property
    def batch(self) -> int:
        """The number of batch rows that the mask distinguishes (1: all rows have the same mask)."""
        return max([e.size for e in self.extents() if e.axis == "B"], default=1)

    @property
    def heads(self) -> int:
        """The number of heads that the mask distinguishes (1: all heads have the same mask)."""
        return max([e.size for e in self.extents() if e.axis == "N"], default=1)

    @no_type_check
    def dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
    ) -> Bool[jax.Array, "B_or_1 N_or_1 T S"]:
        """The dense mask, bool [B or 1, N or 1, T, S]. This is the T×S array that Longspan otherwise avoids.

        Args:
            q_len: number of queries, T.
            kv_len: number of keys, S; by default T.
            q_positions: int [T], [1, T] or [B, T] within ±(2**30 - 1); by default each slot's index. Positions outside
                of this range are an error; traced ones are clipped to it.
            kv_positions: int [S], [1, S] or [B, S], likewise. The maximum of int32 is also legal: it is after every
                query.

        Example:
            >>> from longspan import Causal
            >>> Causal().dense(2, 3)[0, 0].astype(int).tolist()
            [[1, 0, 0], [1, 1, 0]]
        """
        if kv_len is None:
            kv_len = q_len
        check_lengths(q_len, kv_len)
        known = None
        if q_len * kv_len <= FEW_PAIRS:
            known = on_host((self, q_positions, kv_positions))
        if known is None:
            return self._truth(q_len, kv_len, q_positions, kv_positions, jnp)
        mask, q_positions, kv_positions = known
        return jax.device_put(mask._truth(q_len, kv_len, q_positions, kv_positions, np))

    def _truth(self, q_len, kv_len, q_positions, kv_positions, xp: Namespace):
        q, kv = self._sides(q_len, kv_len, q_positions, kv_positions, xp)
        shape = (max(q.batch.size, *(_rows(s.positions) for s in (q, kv))), self.heads, q_len, kv_len)
        truth = self.allowed(q.slots(), kv.slots())
        # A user's rule may distinguish rows or heads that are not in `extents`.
        return xp.broadcast_to(truth, np.broadcast_shapes(truth.shape, shape))

    @no_type_check
    def layout(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        q_tile: int = 128,
        kv_tile: int = 128,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
    ) -> "BlockLayout":
        """The `BlockLayout` of this mask: the key tiles that each query tile visits.

        Args:
            q_len: number of queries, T.
            kv_len: number of keys, S; by default T.
            q_tile: number of queries in a tile.
            kv_tile: number of keys in a tile.
            q_positions: int [T], [1, T] or [B, T]; by default each slot's index.
            kv_positions: int [S], [1, S] or [B, S]; by default each slot's index.

        Example:
            >>> from longspan import Window
            >>> Window(1, 1).layout(512, 512, q_tile=128, kv_tile=128).visits()
            10
        """
        from longspan.layout import plan_layout

        if kv_len is None:
            kv_len = q_len
        return plan_layout(self, q_len, kv_len, q_tile, kv_tile, q_positions=q_positions, kv_positions=kv_positions)

    @renamed_argument("most", "max_cells")
    @no_type_check
    def show(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int = 0,
        head: int | None = None,
        max_cells: int = 64,
        axes: bool | None = None,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
    ) -> str:
        """A picture in characters: one row per query, `#` = may attend, `.` = may not.

        Lengths over `max_cells` are drawn by blocks: `.:+*#` are the share of a block's pairs that is allowed, from
        none to all. Token numbers are along the edges. Single pairs are evaluated only in blocks that tiles do not
        classify as all allowed or all masked, so masks of a million tokens can be drawn.

        Args:
            q_len: number of queries, T.
            kv_len: number of keys, S; by default T.
            batch: which batch row.
            head: which head; None: if the mask distinguishes heads, the first few side by side.
            max_cells: maximum number of cells along a side, one character each.
            axes: whether to write a caption, token numbers and a legend; by default where blocks are drawn.
            q_positions: int [T], [1, T] or [B, T]; by default each slot's index.
            kv_positions: int [S], [1, S] or [B, S]; by default each slot's index.

        Example:
            >>> from longspan import Window
            >>> print(Window(1, 0).show(3))
            #..
            ##.
            .##
            >>> print(Window(300, 300).show(1024, 1024, max_cells=8))
            Window(300, 300)
            1,024 queries x 1,024 keys: 50.1% of the pairs are allowed, 68.8% of the 128 x 128 tiles are visited
                0   512
              0 ##*:....
            128 ###*:...
            256 *###*:..
            384 :*###*:.
            512 .:*###*:
            640 ..:*###*
            768 ...:*###
            896 ....:*##
            each character stands for 128 x 128 pairs, and shows the allowed share:
            . none, : under a quarter, + about half, * over three quarters, # all
        """
        from longspan.render import draw

        if kv_len is None:
            kv_len = q_len
        check_lengths(q_len, kv_len)
        positions = dict(q_positions=q_positions, kv_positions=kv_positions)
        return draw(self, q_len, kv_len, batch=batch, head=head, max_cells=max_cells, axes=axes, **positions)

    @no_type_check
    def plot(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int = 0,
        head: int | None = None,
        tile: int | tuple[int, int] | None = None,
        max_cells: int = 256,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
    ) -> "Figure":
        """A matplotlib figure: the share of allowed pairs, documents along the edges, and tiles by kind if asked for.

        `figure.savefig("mask.png")` or `.svg` writes it. Needs matplotlib: `pip install 'longspan[plot]'`.

        Args:
            q_len: number of queries, T.
            kv_len: number of keys, S; by default T.
            batch: which batch row.
            head: which head; None: if the mask distinguishes heads, the first few side by side.
            tile: also draw the tiles of this size, or (queries, keys), by kind: EMPTY, PARTIAL or FULL.
            max_cells: maximum number of cells along a side.
            q_positions: int [T], [1, T] or [B, T]; by default each slot's index.
            kv_positions: int [S], [1, S] or [B, S]; by default each slot's index.

        Example:
            >>> from longspan import Causal, Window
            >>> figure = (Causal() & Window(511, 0)).plot(4096, tile=128)
            >>> figure.savefig(f"{tempfile.mkdtemp()}/window.png")
        """
        from longspan.render.plot import plot

        if kv_len is None:
            kv_len = q_len
        positions = dict(q_positions=q_positions, kv_positions=kv_positions)
        return plot(self, q_len, kv_len, batch=batch, head=head, tile=tile, max_cells=max_cells, **positions)

    @overload
    def explore(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        path: None = None,
        tokens: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
        other: "Mask | None" = None,
        batch: int = 0,
        head: int | None = None,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
    ) -> "MaskExplorer": ...

    @overload
    def explore(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        path: str | os.PathLike[str],
        tokens: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
        other: "Mask | None" = None,
        batch: int = 0,
        head: int | None = None,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
    ) -> Path: ...

    @no_type_check
    def explore(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        tokens: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
        other: "Mask | None" = None,
        batch: int = 0,
        head: int | None = None,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
    ) -> "MaskExplorer | Path":
        """An interactive page of this mask, in one HTML file that needs no server and no other file.

        The page evaluates the mask in the browser, from a million tokens down to single pairs. It shows the rules that
        allow a pair, the tiles by kind, the keys in the cache after each step, and the tokens that devices send. The
        numbers of the expression have sliders. Without a path, the result is an object that notebooks show.

        Args:
            q_len: number of queries, T.
            kv_len: number of keys, S; by default T.
            path: the file to write. The method then returns its path.
            tokens: the text of each token: a list of strings, or a pair of lists, for queries and for keys.
            other: a second mask. The page shows the pairs that only one of the two masks allows.
            batch: which batch row.
            head: which head; by default the first one.
            q_positions: int [T], [1, T] or [B, T]; by default each slot's index.
            kv_positions: int [S], [1, S] or [B, S]; by default each slot's index.

        Example:
            >>> from longspan import Causal, Window
            >>> mask = Causal() & Window(511, 0)
            >>> mask.explore(4096, path=f"{tempfile.mkdtemp()}/window.html", other=Causal()).name
            'window.html'
            >>> mask.explore(4096)
            <MaskExplorer of Causal() & Window(511, 0): 4,096 queries x 4,096 keys>
        """
        from longspan.explorer.explore import explore

        options = dict(tokens=tokens, other=other, batch=batch, head=head)
        positions = dict(q_positions=q_positions, kv_positions=kv_positions)
        return explore(self, q_len, kv_len, path=path, **options, **positions)

    def _repr_html_(self) -> str | None:
        from longspan.render.notebook import shown_html

        return shown_html(self)

    def __and__(self, other: "Mask") -> "Mask":
        from longspan.masks.algebra import And

        if not isinstance(other, Mask):
            return NotImplemented
        return And.of(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        from longspan.masks.algebra import Or

        if not isinstance(other, Mask):
            return NotImplemented
        return Or.of(self, other)

    def __invert__(self) -> "Mask":
        from longspan.masks.algebra import Not

        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} has no truth value: `and`, `or` and `not` would silently drop one mask. "
            "Compose masks with `&`, `|` and `~`, and test for a missing mask with `mask is None`."
        )

    def _count_pieces(self, q: Side, kv: Side) -> list[CountPiece] | None:
        """Disjoint pieces whose union is the allowed pairs of one batch row and head (NumPy only); None: not known."""
        if SLOT in self.reads:
            return None
        return [CountPiece(within=self)]

    def _sides(self, q_len, kv_len, q_positions, kv_positions, xp: Namespace):
        batch = check_sides(self, q_len, kv_len, q_positions, kv_positions)
        positions = dict(q_positions=q_positions, kv_positions=kv_positions)
        return two_sides(q_len, kv_len, batch=batch, heads=self.heads, **positions, xp=xp)


def _of_bools(allowed: Callable) -> Callable:
    """Wraps `allowed` to check that it returns bools: compositions would combine the bits of numbers."""

    @wraps(allowed)
    def checked(self, q, kv):
        truth = allowed(self, q, kv)
        check_bools(self, "`allowed`", getattr(truth, "dtype", bool))
        return truth

    return checked


def _rows(positions) -> int:
    if positions is None:
        return 1
    return positions.shape[0]
