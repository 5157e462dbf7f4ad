"""`Mask`: an immutable rule for who may attend to whom, and what it answers about itself.

A rule is written once at three granularities: `allowed` for single tokens, `classify` for tiles, `kv_spans` (with its
mirror `q_spans`) for whole rows of tiles. The algebra combines all three, so a composition is as sound as its parts.

It also says what it is: which masks it is made of (`parts`), what it `reads`, how it is `cut` to some slots. What says
nothing is taken for the worst: a rule that reads everything and bounds nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from longspan.array_types import Array, Namespace, Positions, no_type_check
from longspan.checks import check_lengths, check_sides, is_known, renamed_argument
from longspan.constants import on_host
from longspan.masks.checks import check_bools, check_slots
from longspan.masks.count_pieces import CountPiece
from longspan.masks.pytree import Value
from longspan.masks.pytree import rule as rule
from longspan.masks.sides import Side, Slots, Tiles, two_sides
from longspan.masks.spans import Spans, everything

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from longspan.layout import BlockLayout

POSITION, SLOT = "position", "slot"  # what a rule may read of its tokens
BY_POSITION, BY_SLOT = frozenset({POSITION}), frozenset({SLOT})
FEW_PAIRS = 2**22  # whose truth NumPy computes sooner than JAX compiles an operation
NO_QUERY = 2**62  # `nearest_query` gives NO_QUERY * step where no query sees the key: beyond every position


# What holds for one `allowed` only: a class with another forgets what its parent said; a `Rule` asks what it lowers to.
NOT_INHERITED = (
    "reads", "reads_q_place", "by_token", "is_strided", "classify", "kv_spans", "q_spans", "nearest_query",
    "periodicity", "inexact", "unbounded", "provable_kinds", "pinned", "listing", "documents", "of_head", "negated",
    "_cut", "_count_pieces",
)  # fmt: skip


class Extent(NamedTuple):
    """One fact that an array in a mask fixes: `name` has `size` blocks of `unit` along `axis` (B, N, T or S)."""

    name: str
    axis: str
    size: int
    unit: int = 1


class Pinned(NamedTuple):
    """A rule taken apart: what it is where neither the key is one of `columns` nor the query one of `rows`.

    Both are positions, the same for every batch row and head. Flags [B or 1, L] name further keys and queries by slot.
    """

    rest: "Mask"
    columns: frozenset[int] = frozenset()
    rows: frozenset[int] = frozenset()
    kv_flags: tuple[Any, ...] = ()
    q_flags: tuple[Any, ...] = ()


class Periodicity(NamedTuple):
    """What `nearest_query` of a rule depends on, for keys and queries at any places.

    Whether query q may see key k depends on q and k modulo `period`, on which side of the `distances` k - q lies, give
    or take a period, and on which side of the `places` q and k lie.
    """

    period: int = 1
    distances: frozenset[int] = frozenset()
    places: frozenset[int] = frozenset()


class Listing(NamedTuple):
    """What is known of a table that lists blocks: who lists which is in it, and may be data."""

    block_size: int
    entries: int  # how many blocks each one lists
    by_head: bool
    unlisted: "Mask | None"  # if the table is data: the rule of one that lists nothing


class Mask(Value):
    """A rule for which query may attend to which key; `True` = may attend.

    Masks know no lengths. They compose with `&`, `|` and `~`, are pytrees whose leaves are their arrays (so new
    arrays never retrace), compare by value, and hash if they hold no arrays. `~` is plain negation: it opens padding,
    so add padding last, with `&`.

    Subclass with `@rule` and define `allowed`; `classify`, `kv_spans` and `q_spans` are optional and let engines skip.
    Read your arrays through the sides (`q.take(array)`, `q.number(value)`, `q.table(array)`). Say in `reads` what your
    rule compares, if not both positions and slots, and in `array_axes` which axes of your arrays are batch rows and
    heads (`{"ids": "BT"}`), or else every device needs all of them.

    Example:
        >>> from longspan import Causal, Window
        >>> print((Causal() & Window(1, 1)).show(4, 4))
        #...
        ##..
        .##.
        ..##
    """

    # What the rule compares: "position", "slot" or both. By position it holds for any slots, by slot it must be `cut`.
    reads: ClassVar[frozenset[str]] = BY_POSITION | BY_SLOT
    array_axes: ClassVar[dict[str, str]] = {}
    applied: ClassVar[str | None] = None  # what `MaskInfo.baked_in_masks` calls a rule of this kind
    # Its arrays hold one entry per token and nothing else is read of the slots: tokens in another order take it along.
    by_token: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """A class with an `allowed` of its own is another rule: what its parent said of the old one is forgotten."""
        super().__init_subclass__(**options)
        if "allowed" in vars(cls):
            cls.allowed = _of_bools(cls.allowed)
            for name in NOT_INHERITED:
                says = next(c for c in cls.__mro__ if name in vars(c))
                # A parent that has no rule of its own speaks of all rules of a kind.
                if says is not cls and says.allowed is not Mask.allowed:
                    setattr(cls, name, vars(Mask)[name])

    def allowed(self, q: Slots, kv: Slots) -> Bool[Array, "..."]:
        """The truth for each pair of slots, rank 4."""
        raise NotImplementedError(f"{type(self).__name__} must define `allowed(q, kv)`.")

    def classify(self, q: Tiles, kv: Tiles) -> tuple[Any, Any]:
        """(may_any, must_all) for each pair of tiles: sound bounds, so (True, False) is always legal."""
        return q.side.xp.full((1, 1, 1, 1), True), q.side.xp.full((1, 1, 1, 1), False)

    def kv_spans(self, q: Tiles, kv: Tiles) -> Spans:
        """Key slots that cover all that each query tile may see."""
        return everything(q.side.xp, kv.side.length)

    def q_spans(self, kv: Tiles, q: Tiles) -> Spans:
        """Query slots that cover all that may see each key tile."""
        return everything(q.side.xp, q.side.length)

    @property
    def reads_q_place(self) -> bool:
        """Whether it matters where a query stands: its position, or the index of its slot.

        A rule may look at the keys' alone, as `Prefix`, or at arrays along the queries, which are cut with them.
        """
        return bool(self.reads)

    def lower(self) -> "Mask":
        """The same rule, said by other masks: most are a comparison or two (`Compare`)."""
        return self

    def atoms(self) -> "Mask":
        """What plans and engines ask: comparisons, tables, arrays of bools, users' own rules, compositions of these.

        Ask once, and keep it: lowering computes numbers, which a program would compute again.
        """
        return self.lower()

    def negated(self) -> "Mask | None":
        """What the rule does not allow, as a rule that can be planned with; None if there is none."""
        return None

    def parts(self) -> tuple["Mask", ...]:
        """The masks that this one is made of, one level deep."""
        return ()

    def with_parts(self, parts: Sequence["Mask"]) -> "Mask":
        """The same composition of other parts, as many as before."""
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
        """The rules in it that bound nothing: they have neither `classify` nor `kv_spans`, so no tile is skipped."""
        if type(self).classify is Mask.classify and type(self).kv_spans is Mask.kv_spans:
            return (self,)
        return tuple(leaf for part in self.parts() for leaf in part.unbounded())

    def provable_kinds(self) -> tuple[bool, bool]:
        """Whether tiles of it can be known to be EMPTY, and whether they can be known to be FULL."""
        own = not self.unbounded()
        return own, own and type(self).classify is not Mask.classify

    def nearest_query(self, key: np.ndarray, at: np.ndarray, step: int) -> np.ndarray:
        """The last query up to `at` (step = -1), or the first from it on (step = 1), that may see each key.

        `NO_QUERY · step` if there is none. By this caches know how long to keep a key. What says nothing may be seen by
        everybody.
        """
        return at

    def inexact(self) -> tuple["Mask", ...]:
        """The rules in it of which `nearest_query` knows only a bound: those that hold data, and users' own."""
        if type(self).nearest_query is Mask.nearest_query:
            return (self,)
        return tuple(leaf for part in self.parts() for leaf in part.inexact())

    def periodicity(self) -> Periodicity | None:
        """What `nearest_query` depends on, if that repeats: caches then plan one period, not every position.

        None: not known. A rule of which `nearest_query` knows nothing allows every query, at any place.
        """
        return None if type(self).nearest_query is not Mask.nearest_query else Periodicity()

    @property
    def is_strided(self) -> bool:
        """Whether the queries that see a key lie apart at a fixed distance."""
        return False

    def pinned(self, length: int) -> Pinned:
        """The rule, and the few tokens among `length` that everybody sees or that see everybody, if they are known.

        Devices that share a sequence bring those together by themselves, and plan the rest without them.
        """
        return Pinned(self)

    def listing(self) -> Listing | None:
        """What a rule says of its table, if it is one that lists blocks.

        Devices that share a sequence then send each other blocks, for each head its own.
        """
        return None

    def of_head(self, head: int) -> "Mask":
        """The rule as one head has it."""
        return self.with_parts([part.of_head(head) for part in self.parts()])

    def documents(self) -> tuple[Any, Any] | None:
        """The ids of both sides, int [B or 1, T] and [B or 1, S], if it has some: pictures show them as bands."""
        return next((ids for part in self.parts() if (ids := part.documents()) is not None), None)

    def largest_number(self) -> int:
        """The largest number in it, as far as it holds numbers: how long a picture must be to show them."""
        own = [n for value in vars(self).values() for n in (value if isinstance(value, tuple) else (value,))]
        numbers = [abs(n) for n in own if isinstance(n, int) and not isinstance(n, bool)]
        # Numbers by batch row; longer arrays are along tokens, and what they hold are ids and flags.
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
        """The rule for some slots of each side: one decoding step, one shard.

        Rules by position stay as they are, so the positions that you attend with must be cut alike. Slots that grow
        keep what can be skipped.

        Args:
            q: the query slots that stay, int [n] or [B, n]: NumPy (static) or JAX (data, may be traced); None: all.
            kv: the key slots that stay, likewise.
            q_len: number of queries before the cut; only for a rule of your own that reads `side.length`.
            kv_len: number of keys before the cut.

        Example:
            >>> from longspan import Segments
            >>> print(Segments(np.array([[0, 0, 1, 1]])).cut(np.array([1, 2])).show(2, 4))
            ##..
            ..##
        """
        q, kv = check_slots(
            self,
            q,
            kv,
            self._length("T") if q_len is None else q_len,
            self._length("S") if kv_len is None else kv_len,
        )
        if (q is None and kv is None) or SLOT not in self.reads:
            return self
        return self._cut(q, kv, q_len, kv_len)

    def _cut(self, q, kv, q_len: int | None, kv_len: int | None) -> "Mask":
        """`cut` of a rule by slot, to int32 [B or 1, n] or None; by default it is looked at through the slots."""
        from longspan.masks.cut import cut_mask

        return cut_mask(self, q, kv, q_len, kv_len)

    def extents(self) -> Iterator[Extent]:
        """The sizes that this mask's arrays fix."""
        for name, letters in self._letters():
            for axis, size in zip(letters, getattr(self, name).shape, strict=True):
                if axis != ".":
                    yield Extent(f"{type(self).__name__}.{name}", axis, size)
        for part in self.parts():
            yield from part.extents()

    def _length(self, axis: str) -> int | None:
        """How many slots the mask's arrays fix along an axis (T or S), if any do; the last block may be too long."""
        return min(((e.unit, e.size * e.unit) for e in self.extents() if e.axis == axis), default=(1, None))[1]

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
    ) -> Bool[jax.Array, "B_or_1 N_or_1 T S"]:
        """The whole truth table, bool [B or 1, N or 1, T, S]. This is the T×S array that Longspan otherwise avoids.

        Args:
            q_len: number of queries, T.
            kv_len: number of keys, S.
            q_positions: int [T], [1, T] or [B, T] within ±(2**30 - 1); by default each slot's index. What lies further
                is refused, or, where it is traced, taken for the end of that range.
            kv_positions: int [S], [1, S] or [B, S], likewise; int32's maximum is legal too, and comes after all else.

        Example:
            >>> from longspan import Causal
            >>> Causal().dense(2, 3)[0, 0].astype(int).tolist()
            [[1, 0, 0], [1, 1, 0]]
        """
        check_lengths(q_len, kv_len)
        known = on_host((self, q_positions, kv_positions)) if q_len * kv_len <= FEW_PAIRS else None
        if known is None:
            return self._truth(q_len, kv_len, q_positions, kv_positions, jnp)
        mask, q_positions, kv_positions = known
        return jax.device_put(mask._truth(q_len, kv_len, q_positions, kv_positions, np))

    def _truth(self, q_len, kv_len, q_positions, kv_positions, xp: Namespace):
        q, kv = self._sides(q_len, kv_len, q_positions, kv_positions, xp)
        shape = (max(q.batch.size, *(_rows(s.positions) for s in (q, kv))), self.heads, q_len, kv_len)
        truth = self.allowed(q.slots(), kv.slots())
        # A user's rule may tell rows or heads apart without saying so in `extents`.
        return xp.broadcast_to(truth, np.broadcast_shapes(truth.shape, shape))

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
    ) -> "BlockLayout":
        """The `BlockLayout` of this mask: which key tiles each query tile visits.

        Example:
            >>> from longspan import Window
            >>> Window(1, 1).layout(512, 512, q_tile=128, kv_tile=128).visits()
            10
        """
        from longspan.layout import plan_layout

        return plan_layout(self, q_len, kv_len, q_tile, kv_tile, q_positions=q_positions, kv_positions=kv_positions)

    @renamed_argument("most", "max_cells")
    @no_type_check
    def show(
        self,
        q_len: int,
        kv_len: int,
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
        none to all. Token numbers are along the edges. Pairs are evaluated one by one only where tiles do not settle
        a block, so masks of a million tokens can be drawn.

        Args:
            q_len: number of queries, T.
            kv_len: number of keys, S.
            batch: which batch row.
            head: which head; None: if the mask tells heads apart, the first few side by side.
            max_cells: maximum number of cells along a side, one character each.
            axes: whether to write a caption, token numbers and a legend; by default where blocks are drawn.
            q_positions: int [T], [1, T] or [B, T]; by default each slot's index.
            kv_positions: int [S], [1, S] or [B, S]; by default each slot's index.

        Example:
            >>> from longspan import Window
            >>> print(Window(1, 0).show(3, 3))
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
            each 128 x 128 pairs: . none, : under a quarter, + about half, * over three quarters, # all
        """
        from longspan.render import draw

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
            head: which head; None: if the mask tells heads apart, the first few side by side.
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

        positions = dict(q_positions=q_positions, kv_positions=kv_positions)
        return plot(
            self,
            q_len,
            q_len if kv_len is None else kv_len,
            batch=batch,
            head=head,
            tile=tile,
            max_cells=max_cells,
            **positions,
        )

    def _repr_html_(self) -> str | None:
        from longspan.render.notebook import shown_html

        return shown_html(self)

    def __and__(self, other: "Mask") -> "Mask":
        from longspan.masks.algebra import And

        return And.of(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        from longspan.masks.algebra import Or

        return Or.of(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        from longspan.masks.algebra import Not

        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is a rule, neither true nor false: `and`, `or` and `not` would drop one mask in silence. "
            "Compose masks with `&`, `|` and `~`, and ask for none with `mask is None`."
        )

    def _count_pieces(self, q: Side, kv: Side) -> list[CountPiece] | None:
        """Disjoint pieces that are just what is allowed in one batch row and head (NumPy only); None: not known."""
        if SLOT in self.reads:
            return None
        return [CountPiece(within=self)]

    def _sides(self, q_len, kv_len, q_positions, kv_positions, xp: Namespace):
        batch = check_sides(self, q_len, kv_len, q_positions, kv_positions)
        positions = dict(q_positions=q_positions, kv_positions=kv_positions)
        return two_sides(q_len, kv_len, batch=batch, heads=self.heads, **positions, xp=xp)


def _of_bools(allowed: Callable) -> Callable:
    """The same rule. Numbers are an error: compositions would combine them bit by bit."""

    @wraps(allowed)
    def checked(self, q, kv):
        truth = allowed(self, q, kv)
        check_bools(self, "`allowed`", getattr(truth, "dtype", bool))
        return truth

    return checked


def _rows(positions) -> int:
    return 1 if positions is None else positions.shape[0]
