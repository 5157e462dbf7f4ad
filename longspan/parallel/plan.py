"""`plan`: which rows of keys a device must receive to attend with a mask, found from the mask's spans alone.

A row is one token's k and v. Whatever the mask, every device runs the same program, so a step brings the same rows of
a neighbour to every device: the hull of what any of them needs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import jax
import numpy as np

from longspan.array_types import no_type_check
from longspan.checks import check_extents, check_static_size
from longspan.masks import Mask
from longspan.masks.base import POSITION
from longspan.parallel.balance import load, pairs_of
from longspan.parallel.exchange import Exchange, exchange
from longspan.parallel.needs import Needs, holds_arrays, needs_of, without_arrays
from longspan.parallel.order import Order, check_order, padded
from longspan.parallel.picture import picture_html, picture_text
from longspan.parallel.specs import check_zigzag

MOST_STEPS = 20  # permutes that are written out: beyond, a loop that sends whole shards is at most 5% over
CAPACITY = 128  # tokens that flags may make global before the ring takes over, if nobody says
FEWEST = 8  # and at most one of so many that a device holds
REMEMBERED = 64  # plans of masks without arrays: those used last
TRAVELLING = 8  # rows that a travelling query is worth: it goes out in all heads, and comes back in float32


@dataclass(frozen=True)
class Step:
    """One thing that devices send: `rows` is what each of them receives of it."""

    kind: str  # "permute", "ring", "exchange", "columns" or "queries"
    rows: int
    why: str
    shift: int = 0  # permute: from how many devices before, negative: after; ring: how many shards before
    run: int = 0  # permute: of which of the neighbour's runs
    start: int = 0  # permute: from which of its rows on
    after: int = 0  # ring: how many shards after
    exchange: Exchange | None = None


@dataclass(frozen=True)
class ParallelPlan:
    """What each device sends so that attention with a mask is exact; static, hashable, prints itself.

    `sent_rows` and `sent_rows_backward` count what a device receives, `bound_rows` what the device that needs most
    cannot do without. Where that depends on data, they are the most that may come.

    Example:
        >>> plan = ls.parallel.plan(ls.Causal() & ls.Window(511, 0), 16384, 8)
        >>> plan.sent_rows, plan.bound_rows
        (511, 511)
    """

    mask: Mask  # without its arrays
    length: int
    shards: int
    order: Order
    steps: tuple[Step, ...]
    bound_rows: int
    columns: tuple[int, ...] = ()  # keys that everybody sees
    queries: tuple[int, ...] = ()  # queries that see everything
    capacity: int = 0  # how many tokens flags may make global, besides
    by_flags: tuple[bool, bool] = (False, False)  # whether flags name columns, and queries
    fallback: "ParallelPlan | None" = None  # what is done if they are more
    data: bool = False  # how far the ring goes depends on arrays
    sees_after: bool = False  # some device may need keys of devices after it
    pairs: tuple[int, ...] | None = field(
        default=None, compare=False
    )  # what each device computes, but with global tokens
    text: str = field(default="", compare=False)
    key: tuple = field(default=(), compare=False, repr=False)  # what of a mask and a call it is for: `Asked.key`

    @property
    def rows(self) -> int:
        """How many tokens a device holds, padding included."""
        return padded(self.length, self.shards, self.order) // self.shards

    @property
    def load(self) -> float | None:
        """What the busiest device computes over the mean; None where it depends on data."""
        return None if self.pairs is None else load(self.pairs)

    @property
    def ring(self) -> Step | None:
        return next((step for step in self.steps if step.kind == "ring"), None)

    @property
    def exchange(self) -> Exchange | None:
        return next((step.exchange for step in self.steps if step.exchange is not None), None)

    @property
    def halo(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.kind == "permute")

    @property
    def sent_rows(self) -> int:
        """Rows of keys and values that a device receives, forward."""
        return sum(self._forward(step) for step in self.steps)

    @property
    def sent_rows_backward(self) -> int:
        """The same for the backward pass: gradients of rows count as rows."""
        return sum(self._backward(step) for step in self.steps)

    @property
    def beyond(self) -> str:
        """What makes the fallback necessary."""
        cases = [f"more than {self.capacity} tokens are global"] if any(self.by_flags) else []
        if self.exchange is not None and self.exchange.data:
            cases.append(f"more than {self.exchange.blocks} blocks of a device are listed for another")
        return " or ".join(cases)

    @property
    def gather_rows(self) -> int:
        """What gathering all keys and values would send."""
        return (self.shards - 1) * self.rows

    def _forward(self, step: Step) -> int:
        if step.kind == "columns":  # an all-reduce
            return 2 * step.rows * (self.shards - 1) // self.shards
        return 0 if step.kind == "queries" else step.rows

    def _backward(self, step: Step) -> int:
        if step.kind != "ring":
            return self._forward(step)
        hops = hops_home(self, step)
        return step.rows + hops * self.rows

    def show(self, *, max_cells: int = 32, devices: int = 12) -> str:
        """A picture in characters: what each device holds, computes and receives, and from whom.

        Args:
            max_cells: width of the picture in characters.
            devices: how many are shown; those in the middle are left out.

        Example:
            >>> print(ls.parallel.plan(ls.Causal() & (ls.Window(7, 0) | ls.Prefix(2)), 64, 4).show())
            Causal() & (Window(7, 0) | Prefix(2)): 64 tokens on 4 devices, contiguous, load 1.06
              a  all-reduce: 2 rows, keys that everybody sees
              b  shift +1: 7 rows, keys before
              a device receives 10 rows forward, 10 backward; bound 9, a gather 48
            device  holds  pairs  load  0       16      32      48        receives
                 0  0-15     100  0.83  ########........................  nothing
                 1  16-31    128  1.06  +...:+++########................  a 0-1 of 0; b 9-15 of 0
                 2  32-47    128  1.06  +...........:+++########........  a 0-1 of 0; b 25-31 of 1
                 3  48-63    128  1.06  +...................:+++########  a 0-1 of 0; b 41-47 of 2
            each 2 tokens: # holds, + receives, : receives some, . neither; pairs are of one head, without global tokens
        """
        return picture_text(self, max_cells, devices)

    def _repr_html_(self) -> str:
        return picture_html(self)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self, marks: Iterable[str] = repeat("")) -> list[str]:
        busiest = "depends on data" if self.load is None else f"{self.load:.2f}"
        head = f"{self.text}: {self.length} tokens on {self.shards} devices, {self.order}, load {busiest}"
        lines = [head, *(f"  {mark}{line(step)}" for mark, step in zip(marks, self.steps, strict=False))]
        if not self.steps:
            lines.append("  nothing is sent")
        most = "at most " * self.data
        sent = f"{most}{self.sent_rows:,} rows forward, {self.sent_rows_backward:,} backward"
        lines.append(f"  a device receives {sent}; bound {self.bound_rows:,}, a gather {self.gather_rows:,}")
        if self.fallback is not None:
            lines.append(f"  if {self.beyond}: {self.fallback.sent_rows:,} rows")
        return lines


def line(step: Step) -> str:
    """A step in words."""
    where = {
        "permute": f"shift {step.shift:+d}",
        "ring": f"ring -{step.shift} +{step.after}" if step.after else f"ring -{step.shift}",
        "exchange": f"shifts {shifts}" if (shifts := _shifts(step)) else "all-to-all",
        "columns": "all-reduce",
        "queries": "queries travel",
    }[step.kind]
    return f"{where}: {step.rows:,} rows, {step.why}"


def _shifts(step: Step) -> str:
    """The shifts of an exchange in words, if it is not one of all with all."""
    shifts = [f"{shift:+d}" for shift, _ in step.exchange.shifts] if step.exchange is not None else []
    return " ".join(shifts if len(shifts) <= 6 else [*shifts[:3], "..", *shifts[-3:]])


def hops_home(plan: ParallelPlan, step: Step) -> int:
    """How often gradients are sent on in a ring's backward pass until they are all at home."""
    # They travel on with each step; those that went all the way round are home then, others take a leap.
    if not plan.data:
        return sum(d + (d < plan.shards - 1) for d in (step.shift, step.after) if d)
    # How far they go is data: the most that it may come to, with a leap for each bit of the way home.
    before = max((d + leaps(d + 1, plan.shards) for d in range(1, step.shift + 1)), default=0)
    return before + max((d + leaps(-d - 1, plan.shards) for d in range(1, step.after + 1)), default=0)


def leaps(distance: int, shards: int) -> int:
    """How many leaps of powers of two lead home from so many devices behind."""
    return (distance % shards).bit_count()


@no_type_check
def plan(
    mask: Mask,
    length: int,
    shards: int,
    order: Order = "contiguous",
    *,
    global_capacity: int | None = None,
    kv_heads: int | None = None,
) -> ParallelPlan:
    """What devices send that share a sequence, for a mask: static, whatever the mask's arrays hold.

    Arrays are not looked at. `Causal() & Segments(ids)` may see all that comes before; say what you know of documents
    with a rule: `& Window(d - 1, 0)` if none is longer than d, `& Chunk(c)` if none crosses a multiple of c.

    Args:
        mask: any mask for `length` queries and as many keys, whose positions are their indices.
        length: the number of tokens.
        shards: how many devices share them.
        order: how tokens lie on devices: "contiguous" or "zigzag".
        global_capacity: how many tokens flags may make global before all keys are sent; by default 128, or an eighth
            of what a device holds.
        kv_heads: how many key/value heads the calls have, for tables that list other blocks for every head; by default
            as many as the mask tells apart.

    Example:
        >>> print(ls.parallel.plan(ls.Window(3, 2), 64, 4))
        Window(3, 2): 64 tokens on 4 devices, contiguous, load 1.02
          shift +1: 3 rows, keys before
          shift -1: 2 rows, keys after
          a device receives 5 rows forward, 5 backward; bound 5, a gather 48
        >>> ls.parallel.plan(ls.Chunk(8), 64, 4).sent_rows
        0
    """
    return plan_communication(mask, length, shards, order, global_capacity=global_capacity, kv_heads=kv_heads)


def plan_communication(
    mask, length, shards, order, *, global_capacity=None, kv_heads=None, positions=True, travel=True
) -> ParallelPlan:
    """`plan`, where positions may be other than indices, and queries may have to stay where they are.

    The plans of masks without arrays are remembered.
    """
    length, shards = check_static_size("length", length, 1), check_static_size("shards", shards, 1)
    check_order(order)
    check_shared(mask, length, shards)
    if order == "zigzag":
        check_zigzag(mask)
    if global_capacity is not None:
        global_capacity = check_static_size("global_capacity", global_capacity, 0)
    if kv_heads is not None:
        kv_heads = check_static_size("kv_heads", kv_heads, 1)
    asked = Asked.of(mask, length, shards, order, positions, travel, kv_heads, global_capacity)
    try:
        hash(asked)
    except TypeError:  # the mask holds arrays
        return _plan_of(asked)
    return remembered(asked)


class Asked(NamedTuple):
    """All that decides a plan."""

    mask: Mask
    length: int
    shards: int
    order: Order
    positions: bool  # they are indices, or not read
    travel: bool  # queries that see everything may be sent
    kv_heads: int  # that are told apart by tables of blocks
    capacity: int | None  # as it was given

    @classmethod
    def of(cls, mask, length, shards, order, positions, travel, kv_heads, capacity) -> "Asked":
        """With what does not matter for this mask at its default."""
        tables = any(part.listing() is not None for part in mask.walk())
        heads = 1 if not tables else mask.heads if kv_heads is None else math.gcd(kv_heads, mask.heads)
        positions = positions or POSITION not in mask.reads
        if not travel:
            pinned = mask.pinned(length)
            travel = not pinned.rows and not pinned.q_flags
        return cls(mask, length, shards, order, positions, travel, heads, capacity)

    def key(self) -> tuple[Any, ...]:
        """What of a mask and a call, besides sizes and order, decides a plan: equal keys, equal plans.

        Of arrays that is their number and places in the mask, and the shape of tables that list blocks.
        """
        found = [listing for part in self.mask.walk() if (listing := part.listing()) is not None]
        data = [listing._replace(unlisted=None) for listing in found if listing.unlisted is not None]
        sizes = (self.mask.batch, self.mask.heads) if data else ()
        return jax.tree.structure(self.mask), tuple(data), sizes, self.positions, self.travel, self.kv_heads


def _plan_of(asked: Asked) -> ParallelPlan:
    """The cheaper of two plans: with global tokens brought together by themselves, and without."""
    mask, length, shards, order, positions, travel, _, given = asked
    rows = padded(length, shards, order) // shards
    capacity = min(CAPACITY, -(-rows // FEWEST)) if given is None else given
    whole = _cheapest(asked, mask, Apart(), by_data=False)
    rest, taken = _taken_apart(mask, length, positions, travel, capacity) or (mask, Apart())
    found = _cheapest(asked, rest, taken, by_data=True)
    if found.beyond:
        found = replace(found, fallback=whole)
    wanted = given is not None and any(taken.by_flags)
    found = found if wanted or _price(found) < _price(whole) else whole
    return replace(found, key=asked.key())


remembered = lru_cache(maxsize=REMEMBERED)(_plan_of)


def check_shared(mask: Mask, length: int, shards: int) -> None:
    """A mask for so many tokens, and at least one of them for every device."""
    if not isinstance(mask, Mask):
        raise TypeError(f"`mask` must be a Mask, got {type(mask).__name__}.")
    check_extents(mask, q_len=length, kv_len=length)
    if length < shards:
        raise ValueError(f"{length} tokens cannot be shared by {shards} devices: give each at least one.")


def _price(plan: ParallelPlan) -> int:
    """Rows, where a travelling query counts for several."""
    return plan.sent_rows + sum(TRAVELLING * step.rows for step in plan.steps if step.kind == "queries")


class Apart(NamedTuple):
    """The tokens that are brought together by themselves."""

    columns: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    capacity: int = 0
    by_flags: tuple[bool, bool] = (False, False)


def _taken_apart(mask: Mask, length, positions: bool, travel: bool, capacity: int) -> tuple[Mask, Apart] | None:
    """The mask without its global tokens, and these; None if there are none, or none that can be told."""
    pinned = mask.pinned(length)
    by_flags = (bool(pinned.kv_flags), bool(pinned.q_flags))
    if not (pinned.columns or pinned.rows or any(by_flags)):
        return None
    if not positions and (pinned.columns or pinned.rows):
        return None
    if not travel and (pinned.rows or by_flags[1]):
        return None
    if any(by_flags) and not capacity:
        return None
    columns, rows = (tuple(sorted(found)) for found in (pinned.columns, pinned.rows))
    return pinned.rest, Apart(columns, rows, capacity if any(by_flags) else 0, by_flags)


def _cheapest(asked: Asked, rest: Mask, taken: Apart, by_data: bool) -> ParallelPlan:
    """The plan of a mask without what is taken from it; tables that are data make devices exchange blocks, or not."""
    rows = padded(asked.length, asked.shards, asked.order) // asked.shards
    blocks = None
    if asked.order == "contiguous":
        blocks = exchange(rest, asked.length, asked.shards, rows, asked.kv_heads, asked.positions, by_data)
    found = _made(asked, rest, taken, None)
    if blocks is None:
        return found
    other = _made(asked, rest, taken, blocks)
    return other if _price(other) < _price(found) else replace(found, bound_rows=other.bound_rows)


def _made(asked: Asked, rest: Mask, taken: Apart, blocks: Exchange | None) -> ParallelPlan:
    mask, length, shards, order, positions = asked[:5]
    known = without_arrays(rest, positions)
    needs = needs_of(known, length, shards, order)
    data = holds_arrays(rest) or not positions
    rows = padded(length, shards, order) // shards
    columns = len(taken.columns) + taken.capacity * taken.by_flags[0]
    bound = needs.bound if blocks is None else min(needs.bound, blocks.bound)
    if blocks is not None:
        taken = taken._replace(columns=tuple(sorted({*taken.columns, *blocks.popular_tokens(length)})))
    steps = (
        [*_token_steps(taken, blocks), *_key_steps(needs, rest, shards, rows, order, data, blocks)]
        if shards > 1
        else []
    )
    return ParallelPlan(
        mask=without_arrays(mask, positions),
        length=length,
        shards=shards,
        order=order,
        steps=tuple(steps),
        bound_rows=min(bound + columns * (shards > 1), (shards - 1) * rows),
        columns=taken.columns,
        queries=taken.queries,
        capacity=taken.capacity,
        by_flags=taken.by_flags,
        data=data and any(step.kind == "ring" for step in steps),
        sees_after=order == "contiguous" and needs.reach[1] > 0,
        pairs=None if data else tuple(np.rint(pairs_of(known, length, shards, order)).astype(int).tolist()),
        text=repr(mask),
    )


def _token_steps(taken: Apart, blocks: Exchange | None) -> list[Step]:
    """How tokens come together that do so by themselves."""
    steps = []
    if columns := len(taken.columns) + taken.capacity * taken.by_flags[0]:
        who = "most devices list" if blocks is not None and blocks.popular else "everybody sees"
        steps.append(Step("columns", columns, f"keys that {who}"))
    if queries := len(taken.queries) + taken.capacity * taken.by_flags[1]:
        steps.append(Step("queries", queries, "queries that see everything, and what they saw"))
    return steps


def _key_steps(
    needs: Needs, rest: Mask, shards: int, rows: int, order: str, data: bool, blocks: Exchange | None
) -> list[Step]:
    """How the keys that a device lacks come to it: blocks of all, rows of a few neighbours, or shard after shard."""
    if blocks is not None:
        why = "blocks that a table lists" + ", by head" * (blocks.heads > 1)
        return [Step("exchange", blocks.rows, why, exchange=blocks)] if blocks.rows else []
    ring = _ring(needs, shards, order)
    hulls = needs.hulls
    if hulls is not None and len(hulls) <= MOST_STEPS:
        steps = [
            Step("permute", stop - start, "keys before" if shift > 0 else "keys after", shift, run, start)
            for (shift, run), (start, stop) in hulls.items()
        ]
        # A ring sends no more than two shards at a time; if all must go round, it holds far fewer than they are.
        less = sum(step.rows for step in steps) - sum(ring) * rows
        if less < 0 or (less == 0 and sum(ring) < shards - 1):
            return steps
    return [Step("ring", sum(ring) * rows, _why(rest, data), ring[0], after=ring[1])] if sum(ring) else []


def _ring(needs: Needs, shards: int, order: str) -> tuple[int, int]:
    """How many shards must come from before and from after; all of them go round one way."""
    before, after = needs.reach
    if order == "zigzag" or before + after >= shards - 1:
        return (shards - 1 if before + after else 0), 0
    return before, after


def _why(rest: Mask, data: bool) -> str:
    unbounded = rest.unbounded()
    if unbounded:
        return f"{unbounded[0]!r} has no bounds"
    return "as far as the arrays say" if data else "every shard is seen"
