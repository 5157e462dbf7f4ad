"""The notes of `explain`: facts about a call, and advice that lowers its executed FLOPs.

Every advice is tested before it is given: `explain` plans the layout that follows from it and counts the tiles. It
advises bounds if they skip any tile, and another order of tokens or other tiles if they at least halve the FLOPs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from longspan.engines import Engine, Request
from longspan.engines.varying import varying_axes
from longspan.layout import BlockLayout, Counts, count_tiles, plan_layout, planes_of
from longspan.maskinfo import MaskInfo
from longspan.masks import Custom, Mask, rule
from longspan.masks.base import POSITION
from longspan.masks.by_slot import EqualIds
from longspan.masks.terms import VALID
from longspan.tile_kinds import classify_tiles, read_tiles, sample_partial
from longspan.work import short, work

WASTEFUL = 4  # the ratio of executed to useful FLOPs above which `explain` looks for another order or other tiles
TILE = 32  # the smaller tile that is tested
MAX_TESTED_VISITS = 1 << 20  # a layout with more visits is not tested, because counting its tiles takes seconds
SAMPLED_TILES = 1 << 8  # tiles whose pairs are evaluated to find out what bounds would skip


class PlannedCall(NamedTuple):
    """A call with NumPy arrays and a known layout, and its FLOPs."""

    request: Request
    engine: Engine
    given: Any  # the mask argument of the caller
    layout: BlockLayout
    useful: int
    executed: int
    shared: bool  # whether the devices of a mesh share the sequence

    @property
    def ratio(self) -> str:
        return f"the executed FLOPs are {self.executed / self.useful:.0f} times the useful FLOPs"

    def executed_with(self, layout: BlockLayout) -> int | None:
        """The FLOPs that another layout would execute; None if it has too many tiles to count."""
        counts = count_tiles(layout, MAX_TESTED_VISITS)
        if counts is None:
            return None
        return work(self.request.dims, layout, counts)["executed_flops"]

    def lowered_to(self, layout: BlockLayout) -> str | None:
        """The FLOPs that another layout would execute, as text; None if these are more than half."""
        flops = self.executed_with(layout)
        if flops is None or 2 * flops > self.executed:
            return None
        return short(flops, "FLOP", 1000)


def in_numpy(request: Request) -> Request:
    """The request with NumPy arrays in its mask, positions and layout, so that planning compiles nothing."""
    names = ("mask", "q_positions", "kv_positions", "layout")
    known = {name: jax.tree.map(np.asarray, getattr(request, name)) for name in names}
    return replace(request, **known, rows=None, heads=None)


def facts(request: Request, is_known: bool, shared: bool) -> tuple[str, ...]:
    """Notes that do not depend on the counts of tiles."""
    notes = [_cost(request.mask, part) for part in request.mask.unbounded()]
    if not is_known:
        notes.append(
            "the skipped tiles depend on data that is not known here: arrays of the mask, positions, or the rows and "
            "heads of this shard"
        )
    if request.has_positions:
        notes.append(
            "if the given positions do not increase along the row, rules that compare positions visit every tile"
        )
    if not shared:
        notes += _inside_shard_map(request)
    return tuple(notes)


def _inside_shard_map(request: Request) -> list[str]:
    """A note for calls inside `shard_map`, which see one shard: a sharded sequence looks like sharded rows there."""
    mesh = jax.sharding.get_abstract_mesh()
    of_keys, of_all = varying_axes(request.k), varying_axes((request.q, request.k, request.v))
    # Without `check_vma`, and for shapes without arrays, the axes along which keys vary are unknown: all axes count.
    axes = [axis for axis in mesh.manual_axes if mesh.shape[axis] > 1 and (axis in of_keys or not of_all)]
    if not axes:
        return []
    names = " and ".join(f"{axis!r} ({mesh.shape[axis]} devices)" for axis in axes)
    return [
        f"inside `shard_map` over {names}, queries attend only to the {request.dims['S']:,} keys of their own shard. "
        "That is correct for sharded batch rows and heads. For a sharded sequence, call `ls.parallel.attention` "
        "outside `shard_map`"
    ]


def estimate(counts: Counts | None) -> tuple[str, ...]:
    """A note if the useful FLOPs are an estimate."""
    if counts is None or counts.sampled is None:
        return ()
    return (
        f"useful FLOPs are an estimate from the pairs of {counts.sampled:,} of {counts.partial:,} partial tiles. The "
        "number is exact for masks whose rules all allow an interval of keys or compare ids or flags, and for masks "
        "with fewer partial tiles",
    )


def advice(call: PlannedCall) -> tuple[str, ...]:
    """Advice that lowers the executed FLOPs of a call; if there is none and they are many, a note about that."""
    if call.engine.dense:
        return ()
    notes = []
    if (note := bounds(call)) is not None:
        notes.append(note)
    if not call.useful or call.executed <= WASTEFUL * call.useful or call.layout.q_tiles * call.layout.kv_tiles == 1:
        return tuple(notes)
    for adviser in WASTE:
        if (note := adviser(call)) is not None:
            return (*notes, note)
    if not notes:
        notes.append(f"{call.ratio}: the mask forbids most pairs of the visited tiles")
    return tuple(notes)


def bounds(call: PlannedCall) -> str | None:
    """Advises bounds for rules that have none, if they would skip tiles."""
    rules = call.request.mask.unbounded()
    if not rules:
        return None
    skipped, read = _skipped_by_bounds(call.layout)
    if not skipped:
        return None
    how = []
    for part in rules:
        if isinstance(part, Custom):
            how.append(f"pass `bounds=` to {part!r}")
        else:
            how.append(f"define `classify` in {type(part).__name__}")
    how = list(dict.fromkeys(how))  # rules that hold arrays do not hash
    return (
        f"bounds would skip {skipped:,} of {read:,} sampled tiles. To add bounds, {' and '.join(how)}. Or add `& "
        "Band(lo, hi)` to the mask, if the mask only allows distances k - q from lo to hi"
    )


def sorted_by_id(call: PlannedCall) -> str | None:
    """Advises to sort the tokens by id, if ids recur after others."""
    request, mask = call.request, call.request.mask
    recurring = [r for r in mask.walk() if isinstance(r, EqualIds) and any(_recur(r, ids) for ids in r._ids())]
    if call.shared or call.layout.repeats or not recurring:
        return None
    T, S = request.dims["T"], request.dims["S"]
    q_ids, kv_ids = recurring[0]._ids()
    q_order = np.argsort(q_ids, axis=1, kind="stable")
    kv_order = q_order if T == S else np.argsort(kv_ids, axis=1, kind="stable")
    positions: dict[str, Any] = {}
    if POSITION in mask.reads:
        positions["q_positions"] = _reordered(request.q_positions, q_order)
        positions["kv_positions"] = _reordered(request.kv_positions, kv_order)
    mask = mask.cut(q_order, kv_order)
    flops = call.lowered_to(plan_layout(mask, T, S, call.layout.q_tile, call.layout.kv_tile, **positions, xp=np))
    if flops is None:
        return None
    with_positions = " and their positions" if positions else ""
    return (
        f"{call.ratio}: ids appear again after other ids, so tiles contain tokens of many documents. Sort the tokens "
        f"by id with `order = np.argsort(ids, kind='stable')`, and pass `mask.cut(order, order)`{with_positions}. The "
        f"call then executes {flops}"
    )


def smaller_tiles(call: PlannedCall) -> str | None:
    """Advises tiles of 32 x 32, if they hold far fewer forbidden pairs."""
    request, layout = call.request, call.layout
    if call.shared or layout.repeats or max(layout.q_tile, layout.kv_tile) <= TILE:
        return None
    T, S = request.dims["T"], request.dims["S"]
    q_tile, kv_tile = min(TILE, layout.q_tile), min(TILE, layout.kv_tile)
    positions = dict(q_positions=layout.q_positions, kv_positions=layout.kv_positions)
    flops = call.lowered_to(plan_layout(request.mask, T, S, q_tile, kv_tile, **positions, xp=np))
    if flops is None:
        return None
    arguments = [f"q_tile={q_tile}", f"kv_tile={kv_tile}"]
    if not isinstance(call.given, MaskInfo):
        given = [f"{name}={name}" for name, p in positions.items() if p is not None]
        arguments = [str(T), str(S), *arguments, *given]
    code = f"{_mask_code(call.given)}.layout({', '.join(arguments)})"
    return (
        f"{call.ratio}: the mask forbids most pairs of the visited tiles. This happens if documents or windows are "
        f"shorter than a tile. Smaller tiles, `mask={code}`, execute {flops}, but may take longer: compare the times"
    )


def _mask_code(given: Any) -> str:
    """The expression of the mask whose `layout` takes other tiles, for the mask argument of a call."""
    if isinstance(given, Mask | MaskInfo):
        return "mask"
    if isinstance(given, BlockLayout):
        return "mask.mask"
    return "ls.Dense(mask)"


WASTE: tuple[Callable[[PlannedCall], str | None], ...] = (sorted_by_id, smaller_tiles)  # the first advice is given


def _cost(mask: Mask, part: Mask) -> str:
    """A note on the effect of a rule without bounds on the whole mask."""
    empty, full = mask.provable_kinds()
    if not empty:
        effect = "no tile can be skipped"
    elif not full:
        effect = "no tile is known to be full, so every visited tile is masked pair by pair"
    else:
        effect = "tiles that depend on this rule are masked pair by pair"
    if isinstance(part, Custom):
        return f"{part!r} has no `bounds`: {effect}"
    return f"{type(part).__name__} does not define `classify` ({part!r}): {effect}"


@rule
class _Sampled(Mask):
    """A rule whose pairs were evaluated in some tiles: `classify` returns the results."""

    some: np.ndarray
    every: np.ndarray

    def classify(self, q, kv):
        return self.some.reshape(1, 1, -1, 1), self.every.reshape(1, 1, -1, 1)


def _skipped_by_bounds(layout: BlockLayout) -> tuple[int, int]:
    """(skipped, read): a sample of visited tiles, and how many are EMPTY when rules without bounds are evaluated."""
    skipped = read = 0
    for plane in planes_of(layout):
        most = max(1, SAMPLED_TILES // plane.planes)
        looks = layout.looks(plane.batch, plane.head)
        tiles = sample_partial(layout.mask, plane.q, plane.kv, looks, visits=plane.visits, max_tiles=most)
        if tiles.shape[1]:
            mask = _with_bounds(layout.mask, lambda part, at=plane, tiles=tiles: read_tiles(part, at.q, at.kv, tiles))
            some, _ = classify_tiles(mask, plane.q, plane.kv, tiles)
            skipped += int(np.count_nonzero(~some))
            read += len(some)
    return skipped, read


def _with_bounds(mask: Mask, classify: Callable[[Mask], tuple[np.ndarray, np.ndarray]]) -> Mask:
    """The mask with each rule that has no bounds replaced by one that returns the results of `classify`."""
    parts = mask.parts()
    if parts:
        return mask.with_parts([_with_bounds(part, classify) for part in parts])
    if mask.unbounded() == (mask,):
        return _Sampled(*classify(mask))
    return mask


def _recur(rule: EqualIds, ids: np.ndarray) -> bool:
    """Whether a valid id of some row of ids [B or 1, L] occurs again after another id."""
    return any(len(runs) > len(np.unique(runs)) for runs in _runs(rule, ids))


def _runs(rule: EqualIds, ids: np.ndarray) -> Iterator[np.ndarray]:
    """The valid ids of each row, each run of equal ids as one entry."""
    is_valid = VALID[rule._valid]
    for row in np.asarray(ids):
        valid = row if is_valid is None else row[is_valid(row)]
        yield valid[np.diff(valid, prepend=valid[:1] - 1) != 0]


def _reordered(positions: np.ndarray | None, order: np.ndarray) -> np.ndarray:
    """The positions of tokens in another order."""
    if positions is None:
        return order
    rows = len(order)
    if positions.ndim == 2:
        rows = max(rows, len(positions))
    full = (rows, order.shape[1])
    return np.take_along_axis(np.broadcast_to(positions, full), np.broadcast_to(order, full), axis=1)
