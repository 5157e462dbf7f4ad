"""`plan`: the rows of keys that each device must receive to attend with a mask, found from the mask's spans.

A row is one token's k and v. All devices run the same program, so a transfer brings the same rows of a neighbour to
every device: the hull (the smallest interval of rows) of those that any device needs.
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
from longspan.parallel.needs import MissingKeys, holds_arrays, missing_keys, without_arrays
from longspan.parallel.order import Order, check_order, padded
from longspan.parallel.picture import picture_html, picture_text
from longspan.parallel.specs import check_zigzag

MAX_PERMUTES = 20  # permutes in a program: beyond, a loop that sends whole shards sends at most 5% more
DEFAULT_CAPACITY = 128  # tokens that flags may make global before a ring is used, by default
CAPACITY_SHARE = 8  # and at most an eighth of a device's tokens
MAX_CACHED_PLANS = 64  # of masks without arrays: the 64 used last
QUERY_PRICE = 8  # rows that sending a query costs: it is sent in all heads, and its output returns in float32


@dataclass(frozen=True)
class Transfer:
    """One transfer between devices: each device receives `rows` rows."""

    kind: str  # "permute", "ring", "exchange", "columns" or "queries"
    rows: int
    why: str
    shift: int = 0  # permute: the source is this many devices before, if negative after; ring: shards from before
    run: int = 0  # permute: the source's run of tokens
    start: int = 0  # permute: the first row of that run
    after: int = 0  # ring: shards from after
    exchange: Exchange | None = None


@dataclass(frozen=True)
class ParallelPlan:
    """The transfers between devices that make attention with a mask exact. Static; can be hashed and printed.

    `sent_rows` and `sent_rows_backward` count the rows that each device receives. `bound_rows` is a lower bound: the
    rows that the device with the most missing keys needs. If they depend on the mask's arrays, all three are those of
    the worst case.

    Example:
        >>> plan = ls.parallel.plan(ls.Causal() & ls.Window(511, 0), 16384, 8)
        >>> plan.sent_rows, plan.bound_rows
        (511, 511)
    """

    mask: Mask  # without its arrays
    length: int
    shards: int
    order: Order
    steps: tuple[Transfer, ...]
    bound_rows: int
    columns: tuple[int, ...] = ()  # global keys: every device receives them
    queries: tuple[int, ...] = ()  # global queries: they are sent to every device
    capacity: int = 0  # further tokens that flags may make global
    by_flags: tuple[bool, bool] = (False, False)  # whether flags name global keys, and global queries
    fallback: "ParallelPlan | None" = None  # the plan that is used if there are more of them
    data: bool = False  # the number of shards in the ring depends on the mask's arrays
    sees_after: bool = False  # some device may need keys of devices after it
    pairs: tuple[int, ...] | None = field(default=None, compare=False)  # per device, without global tokens
    text: str = field(default="", compare=False)  # the mask, printed
    key: tuple = field(default=(), compare=False, repr=False)  # identifies the masks and calls of this plan

    @property
    def rows(self) -> int:
        """The number of tokens that a device holds, with padding."""
        return padded(self.length, self.shards, self.order) // self.shards

    @property
    def load(self) -> float | None:
        """The pairs of the busiest device divided by the mean; None if it depends on the mask's arrays."""
        if self.pairs is None:
            return None
        return load(self.pairs)

    @property
    def bound_is_worst_case(self) -> bool:
        """Whether the mask's arrays decide which keys are needed; `bound_rows` is then that of the worst case."""
        return self.pairs is None or any(self.by_flags)

    @property
    def ring(self) -> Transfer | None:
        return next((step for step in self.steps if step.kind == "ring"), None)

    @property
    def exchange(self) -> Exchange | None:
        return next((step.exchange for step in self.steps if step.exchange is not None), None)

    @property
    def halo(self) -> tuple[Transfer, ...]:
        return tuple(step for step in self.steps if step.kind == "permute")

    @property
    def sent_rows(self) -> int:
        """Rows of keys and values that each device receives in the forward pass."""
        return sum(self._forward(step) for step in self.steps)

    @property
    def sent_rows_backward(self) -> int:
        """Rows that each device receives in the backward pass, with the gradients of rows."""
        return sum(self._backward(step) for step in self.steps)

    @property
    def beyond(self) -> str:
        """The condition under which the fallback is used, in words."""
        cases = []
        if any(self.by_flags):
            cases.append(f"more than {self.capacity} tokens are global")
        if self.exchange is not None and self.exchange.data:
            cases.append(f"a device needs more than {self.exchange.blocks} blocks of another device")
        return " or ".join(cases)

    @property
    def gather_rows(self) -> int:
        """Rows that each device would receive in an all-gather of keys and values."""
        return (self.shards - 1) * self.rows

    def _forward(self, step: Transfer) -> int:
        if step.kind == "queries":
            return 0
        if step.kind == "columns":  # an all-reduce
            return 2 * step.rows * (self.shards - 1) // self.shards
        return step.rows

    def _backward(self, step: Transfer) -> int:
        if step.kind != "ring":
            return self._forward(step)
        return step.rows + gradient_hops(self, step) * self.rows

    def show(self, *, max_cells: int = 32, devices: int = 12) -> str:
        """A text picture of each device: the tokens that it holds and receives, and the pairs that it computes.

        For received tokens, the picture also names the device that sends them.

        Args:
            max_cells: the largest number of cells (characters) across.
            devices: the number of devices in the picture; devices in the middle are left out.

        Example:
            >>> print(ls.parallel.plan(ls.Causal() & (ls.Window(7, 0) | ls.Prefix(2)), 64, 4).show())
            Causal() & (Window(7, 0) | Prefix(2)): 64 tokens on 4 devices, contiguous, load max/mean 1.06
              a  all-reduce: 2 rows, keys that every device needs
              b  shift +1: 7 rows, keys from the device before
              each device receives 10 rows forward and 10 backward; a row is the key and value of one token
              the mask requires at least 9 rows forward; an all-gather sends 48
            device  holds  pairs  load  0       16      32      48        receives tokens from devices
                 0  0-15     100  0.83  ########........................  nothing
                 1  16-31    128  1.06  +...:+++########................  a 0-1 from 0; b 9-15 from 0
                 2  32-47    128  1.06  +...........:+++########........  a 0-1 from 0; b 25-31 from 1
                 3  48-63    128  1.06  +...................:+++########  a 0-1 from 0; b 41-47 from 2
            cells of 2 tokens: # held, + received, : some received, . neither held nor received
            pairs are counted per head, without those of global tokens
        """
        return picture_text(self, max_cells, devices)

    def _repr_html_(self) -> str:
        return picture_html(self)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self, marks: Iterable[str] = repeat("")) -> list[str]:
        busiest = "depends on the mask's arrays" if self.load is None else f"{self.load:.2f}"
        lines = [
            f"{self.text}: {self.length:,} tokens on {self.shards:,} devices, {self.order}, load max/mean {busiest}",
            *(f"  {mark}{describe(step)}" for mark, step in zip(marks, self.steps, strict=False)),
        ]
        if not self.steps:
            lines.append("  no communication")
        at_most = "at most " if self.data else ""
        sent = f"{at_most}{_rows(self.sent_rows)} forward and {self.sent_rows_backward:,} backward"
        lines.append(f"  each device receives {sent}; a row is the key and value of one token")
        required, gathered = _rows(self.bound_rows), f"{self.gather_rows:,}"
        needed = f"the mask requires at least {required} forward"
        if self.bound_is_worst_case:
            needed = f"in the worst case, the mask requires {required} forward"
        lines.append(f"  {needed}; an all-gather sends {gathered}")
        if self.fallback is not None:
            lines.append(f"  if {self.beyond}, each device receives {_rows(self.fallback.sent_rows)} forward")
        return lines


def describe(step: Transfer) -> str:
    """A transfer in words."""
    if step.kind == "queries":
        queries = "1 query" if step.rows == 1 else f"{step.rows:,} queries"
        return f"all-reduce of queries: {queries}, {step.why}"
    if step.kind == "permute":
        operation = f"shift {step.shift:+d}"
    elif step.kind == "ring" and step.after:
        operation = f"ring of {step.shift} shards before and {step.after} after"
    elif step.kind == "ring":
        operation = f"ring of {step.shift} shards" if step.shift > 1 else "ring of 1 shard"
    elif step.kind == "exchange":
        operation = _shifts(step) or "all-to-all"
    else:
        operation = "all-reduce"
    return f"{operation}: {_rows(step.rows)}, {step.why}"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _shifts(step: Transfer) -> str:
    """The shifts of an exchange; empty for an all-to-all."""
    if step.exchange is None or not step.exchange.shifts:
        return ""
    shifts = [f"{shift:+d}" for shift, _ in step.exchange.shifts]
    if len(shifts) > 6:
        shifts = [*shifts[:3], "..", *shifts[-3:]]
    return f"shifts {' '.join(shifts)}"


def gradient_hops(plan: ParallelPlan, step: Transfer) -> int:
    """The number of times that gradients are sent in a ring's backward pass until each is on its owner's device."""
    # Gradients move on with each step of the ring. After a full turn they are at home; otherwise one jump returns them.
    if not plan.data:
        return sum(d + (d < plan.shards - 1) for d in (step.shift, step.after) if d)
    # The distance is data. This is the worst case, with one jump for each bit of the distance home.
    before = max((d + jumps_home(d + 1, plan.shards) for d in range(1, step.shift + 1)), default=0)
    return before + max((d + jumps_home(-d - 1, plan.shards) for d in range(1, step.after + 1)), default=0)


def jumps_home(distance: int, shards: int) -> int:
    """The number of jumps by powers of two that cover a distance around the ring."""
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
    """Plans the transfers between devices that share a sequence, for a mask. The plan is static.

    The values in the mask's arrays are not read: the plan of `Causal() & Segments(ids)` allows for documents of any
    length. If you know more about them, add a rule: `& Window(d - 1, 0)` if no document is longer than d,
    `& Chunk(c)` if none crosses a multiple of c.

    Args:
        mask: any mask for `length` queries and keys, whose positions are their indices.
        length: the number of tokens.
        shards: the number of devices that share them.
        order: the order of tokens on devices, "contiguous" or "zigzag".
        global_capacity: the number of tokens that flags may make global; with more, all keys are sent. By default 128,
            and at most an eighth of a device's tokens.
        kv_heads: the number of key/value heads, for tables that list different blocks for each head; by default the
            number of heads of the mask.

    Example:
        >>> print(ls.parallel.plan(ls.Window(3, 2), 64, 4))
        Window(3, 2): 64 tokens on 4 devices, contiguous, load max/mean 1.02
          shift +1: 3 rows, keys from the device before
          shift -1: 2 rows, keys from the device after
          each device receives 5 rows forward and 5 backward; a row is the key and value of one token
          the mask requires at least 5 rows forward; an all-gather sends 48
        >>> ls.parallel.plan(ls.Chunk(8), 64, 4).sent_rows
        0
    """
    return plan_communication(mask, length, shards, order, global_capacity=global_capacity, kv_heads=kv_heads)


def plan_communication(
    mask, length, shards, order, *, global_capacity=None, kv_heads=None, positions=True, travel=True
) -> ParallelPlan:
    """`plan` for calls whose positions may differ from indices, and whose queries may not be sendable.

    Plans of masks without arrays are cached.
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
    inputs = PlanInputs.of(mask, length, shards, order, positions, travel, kv_heads, global_capacity)
    try:
        hash(inputs)
    except TypeError:  # the mask holds arrays
        return _make_plan(inputs)
    return cached_plan(inputs)


class PlanInputs(NamedTuple):
    """All that a plan depends on."""

    mask: Mask
    length: int
    shards: int
    order: Order
    positions: bool  # positions are indices, or the mask does not read them
    travel: bool  # global queries may be sent
    kv_heads: int  # heads for which tables list different blocks
    capacity: int | None  # `global_capacity` of the call

    @classmethod
    def of(cls, mask, length, shards, order, positions, travel, kv_heads, capacity) -> "PlanInputs":
        """Inputs that do not matter for this mask are set to their defaults, so that equal plans are cached once."""
        heads = 1
        if any(part.listing() is not None for part in mask.walk()):
            heads = mask.heads
            if kv_heads is not None:
                heads = math.gcd(kv_heads, mask.heads)
        positions = positions or POSITION not in mask.reads
        if not travel:
            pinned = mask.pinned(length)
            travel = not pinned.rows and not pinned.q_flags
        return cls(mask, length, shards, order, positions, travel, heads, capacity)

    def key(self) -> tuple[Any, ...]:
        """The part of a mask and a call, other than sizes and order, that decides a plan: equal keys, equal plans.

        Of arrays it contains their number and place in the mask, and the shapes of tables that list blocks.
        """
        found = [listing for part in self.mask.walk() if (listing := part.listing()) is not None]
        data = [listing._replace(unlisted=None) for listing in found if listing.unlisted is not None]
        sizes = (self.mask.batch, self.mask.heads) if data else ()
        return jax.tree.structure(self.mask), tuple(data), sizes, self.positions, self.travel, self.kv_heads


def _make_plan(inputs: PlanInputs) -> ParallelPlan:
    """The cheaper of two plans: with separate transfers for global tokens, and without."""
    rows = padded(inputs.length, inputs.shards, inputs.order) // inputs.shards
    capacity = inputs.capacity
    if capacity is None:
        capacity = min(DEFAULT_CAPACITY, -(-rows // CAPACITY_SHARE))
    whole = _cheapest(inputs, inputs.mask, GlobalTokens(), by_data=False)
    rest, tokens = _split_global_tokens(inputs, capacity)
    found = _cheapest(inputs, rest, tokens, by_data=True)
    if found.beyond:
        found = replace(found, fallback=whole)
    capacity_given = inputs.capacity is not None and any(tokens.by_flags)
    if not capacity_given and _price(found) >= _price(whole):
        found = whole
    return replace(found, key=inputs.key())


cached_plan = lru_cache(maxsize=MAX_CACHED_PLANS)(_make_plan)


def check_shared(mask: Mask, length: int, shards: int) -> None:
    """A mask for this number of tokens, and at least one token for each device."""
    if not isinstance(mask, Mask):
        raise TypeError(f"`mask` must be a Mask, got {type(mask).__name__}.")
    check_extents(mask, q_len=length, kv_len=length)
    if length < shards:
        raise ValueError(f"{length} tokens cannot be shared by {shards} devices. Give each device at least one token.")


def _price(plan: ParallelPlan) -> int:
    """Rows that are sent; a query counts as `QUERY_PRICE` rows."""
    return plan.sent_rows + sum(QUERY_PRICE * step.rows for step in plan.steps if step.kind == "queries")


class GlobalTokens(NamedTuple):
    """The global tokens of a mask that have transfers of their own."""

    columns: tuple[int, ...] = ()  # keys
    queries: tuple[int, ...] = ()
    capacity: int = 0
    by_flags: tuple[bool, bool] = (False, False)


def _split_global_tokens(inputs: PlanInputs, capacity: int) -> tuple[Mask, GlobalTokens]:
    """The mask without its global tokens, and these; the whole mask if there are none, or none that can be sent."""
    pinned = inputs.mask.pinned(inputs.length)
    by_flags = (bool(pinned.kv_flags), bool(pinned.q_flags))
    listed = bool(pinned.columns or pinned.rows)
    if (
        not (listed or any(by_flags))
        or (listed and not inputs.positions)
        or (not inputs.travel and (pinned.rows or by_flags[1]))
        or (any(by_flags) and not capacity)
    ):
        return inputs.mask, GlobalTokens()
    if not any(by_flags):
        capacity = 0
    return pinned.rest, GlobalTokens(tuple(sorted(pinned.columns)), tuple(sorted(pinned.rows)), capacity, by_flags)


def _cheapest(inputs: PlanInputs, rest: Mask, tokens: GlobalTokens, by_data: bool) -> ParallelPlan:
    """The plan of a mask without its global tokens, with or without an exchange of the blocks that tables list.

    `by_data` allows an exchange for tables that are data.
    """
    rows = padded(inputs.length, inputs.shards, inputs.order) // inputs.shards
    blocks = None
    if inputs.order == "contiguous":
        blocks = exchange(rest, inputs.length, inputs.shards, rows, inputs.kv_heads, inputs.positions, by_data)
    without = _plan_with(inputs, rest, tokens, None)
    if blocks is None:
        return without
    exchanging = _plan_with(inputs, rest, tokens, blocks)
    if _price(exchanging) < _price(without):
        return exchanging
    return replace(without, bound_rows=exchanging.bound_rows)


def _plan_with(inputs: PlanInputs, rest: Mask, tokens: GlobalTokens, blocks: Exchange | None) -> ParallelPlan:
    mask, length, shards, order, positions = inputs[:5]
    known = without_arrays(rest, positions)
    missing = missing_keys(known, length, shards, order)
    data = holds_arrays(rest) or not positions
    rows = padded(length, shards, order) // shards
    bound = missing.bound
    columns = len(tokens.columns) + tokens.capacity * tokens.by_flags[0]
    if blocks is not None:
        bound = min(bound, blocks.bound)
        tokens = tokens._replace(columns=tuple(sorted({*tokens.columns, *blocks.popular_tokens(length)})))
    steps = []
    if shards > 1:
        bound += columns
        steps += _token_transfers(tokens, blocks)
        steps += _key_transfers(missing, rest, shards, rows, order, data, blocks)
    pairs = None
    if not data:
        pairs = tuple(np.rint(pairs_of(known, length, shards, order)).astype(int).tolist())
    return ParallelPlan(
        mask=without_arrays(mask, positions),
        length=length,
        shards=shards,
        order=order,
        steps=tuple(steps),
        bound_rows=min(bound, (shards - 1) * rows),
        columns=tokens.columns,
        queries=tokens.queries,
        capacity=tokens.capacity,
        by_flags=tokens.by_flags,
        data=data and any(step.kind == "ring" for step in steps),
        sees_after=order == "contiguous" and missing.reach[1] > 0,
        pairs=pairs,
        text=repr(mask),
    )


def _token_transfers(tokens: GlobalTokens, blocks: Exchange | None) -> list[Transfer]:
    """The transfers of global keys and global queries."""
    steps = []
    if columns := len(tokens.columns) + tokens.capacity * tokens.by_flags[0]:
        who = "most devices need" if blocks is not None and blocks.popular else "every device needs"
        steps.append(Transfer("columns", columns, f"keys that {who}"))
    if queries := len(tokens.queries) + tokens.capacity * tokens.by_flags[1]:
        outputs = "its outputs" if queries == 1 else "the outputs of these queries"
        steps.append(Transfer("queries", queries, f"sent to all devices, which send back {outputs}"))
    return steps


def _key_transfers(
    missing: MissingKeys, rest: Mask, shards: int, rows: int, order: str, data: bool, blocks: Exchange | None
) -> list[Transfer]:
    """The transfers of the keys that devices lack: an exchange of blocks, permutes from neighbours, or a ring."""
    if blocks is not None:
        if not blocks.rows:
            return []
        by_head = ", different for each head" if blocks.heads > 1 else ""
        return [Transfer("exchange", blocks.rows, f"blocks that a table lists{by_head}", exchange=blocks)]
    before, after = _ring(missing, shards, order)
    hulls = missing.hulls
    if hulls is not None and len(hulls) <= MAX_PERMUTES:
        steps = [
            Transfer("permute", stop - start, f"keys from {_neighbour(shift)}", shift, run, start)
            for (shift, run), (start, stop) in hulls.items()
        ]
        # Permutes are chosen if they send less than a ring. If all shards are needed whole, both send as much, and the
        # ring is better: it holds at most two shards at a time, permutes hold all of them.
        more = sum(step.rows for step in steps) - (before + after) * rows
        if more < 0 or (more == 0 and before + after < shards - 1):
            return steps
    if not before + after:
        return []
    return [Transfer("ring", (before + after) * rows, _why_ring(rest, data), before, after=after)]


def _neighbour(shift: int) -> str:
    side = "before" if shift > 0 else "after"
    if abs(shift) == 1:
        return f"the device {side}"
    return f"{abs(shift)} devices {side}"


def _ring(missing: MissingKeys, shards: int, order: str) -> tuple[int, int]:
    """The number of shards that a ring brings from before and from after; all shards come from one side."""
    before, after = missing.reach
    if not before + after:
        return 0, 0
    if order == "zigzag" or before + after >= shards - 1:
        return shards - 1, 0
    return before, after


def _why_ring(rest: Mask, data: bool) -> str:
    unbounded = rest.unbounded()
    if unbounded:
        return f"{unbounded[0]!r} has no bounds"
    if data:
        return "in the worst case, because the mask's arrays or the given positions decide how many shards are sent"
    return "because separate shifts would be too many or send no fewer rows"
