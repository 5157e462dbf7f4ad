"""What `explain` notes of a call: facts, and advice.

Advice is tried before it is given: the layout that it leads to is planned, and its tiles are counted. Bounds are
advised if they skip any tile, another order of tokens or other tiles if they at least halve the executed FLOPs.
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

WASTEFUL = 4  # executed over useful FLOPs from which on tokens or tiles are advised about
TILE = 32  # the smaller tile that is tried
MOST_TRIED = 1 << 20  # visits: a layout with more is not tried, as counting its tiles would take seconds
SAMPLE = 1 << 8  # tiles whose pairs are read to see what bounds would skip


class Planned(NamedTuple):
    """A call whose layout is known, with NumPy's arrays in it, and what it executes."""

    request: Request
    engine: Engine
    given: Any  # the mask as the caller gave it
    layout: BlockLayout
    useful: int
    executed: int
    shared: bool  # by devices of a mesh

    @property
    def ratio(self) -> str:
        return f"{self.executed / self.useful:.0f} times as many FLOPs are executed as are useful"

    def executed_with(self, layout: BlockLayout) -> int | None:
        """The FLOPs that another layout would execute; None if too many tiles would have to be looked at."""
        counts = count_tiles(layout, MOST_TRIED)
        return None if counts is None else work(self.request.dims, layout, counts)["executed_flops"]

    def lowered_to(self, layout: BlockLayout) -> str | None:
        """What another layout executes, in words, if that is at most half."""
        flops = self.executed_with(layout)
        return None if flops is None or 2 * flops > self.executed else short(flops, "FLOP", 1000)


def in_numpy(request: Request) -> Request:
    """A request whose mask, positions and layout are NumPy's, so that planning it compiles nothing."""
    names = ("mask", "q_positions", "kv_positions", "layout")
    known = {name: jax.tree.map(np.asarray, getattr(request, name)) for name in names}
    return replace(request, **known, rows=None, heads=None)


def facts(request: Request, is_known: bool, shared: bool) -> tuple[str, ...]:
    """What there is to know of a call besides its numbers."""
    notes = [_cost(request.mask, part) for part in request.mask.unbounded()]
    if not is_known:
        notes.append("the mask's arrays are not known here: what is skipped depends on them")
    if request.has_positions:
        notes.append("with given positions, tiles are found by bisection only where positions grow with the slots")
    return (*notes, *([] if shared else _inside_shard_map(request)))


def _inside_shard_map(request: Request) -> list[str]:
    """That a call sees one shard, inside of `shard_map`: sharded keys and sharded rows look alike there."""
    mesh = jax.sharding.get_abstract_mesh()
    of_keys, of_all = varying_axes(request.k), varying_axes((request.q, request.k, request.v))
    # Without `check_vma`, or of shapes alone, it is not known along which axes the keys vary.
    axes = [axis for axis in mesh.manual_axes if mesh.shape[axis] > 1 and (axis in of_keys or not of_all)]
    if not axes:
        return []
    names = " and ".join(f"{axis!r} ({mesh.shape[axis]} devices)" for axis in axes)
    return [
        f"inside `shard_map` over {names}, queries attend to the {request.dims['S']:,} keys of their own shard alone. "
        "That is right for sharded batch rows and heads. For a sharded sequence call `ls.parallel.attention`, outside "
        "of `shard_map`"
    ]


def estimate(counts: Counts | None) -> tuple[str, ...]:
    """That a number is an estimate, if it is one."""
    if counts is None or counts.read is None:
        return ()
    return (
        f"useful FLOPs are an estimate: pairs were read in {counts.read:,} of {counts.partial:,} partial tiles. They "
        "are counted where rules are intervals of keys, ids or flags, and where fewer tiles are partial",
    )


def advice(call: Planned) -> tuple[str, ...]:
    """What lowers the executed FLOPs of a call; that they are many, where nothing is known to."""
    if call.engine.dense:
        return ()
    found = [said for said in (bounds(call),) if said]
    if not call.useful or call.executed <= WASTEFUL * call.useful or call.layout.q_tiles * call.layout.kv_tiles == 1:
        return tuple(found)
    waste = next((said for adviser in WASTE if (said := adviser(call))), None)
    if waste is None and not found:
        waste = f"{call.ratio}: most pairs of the visited tiles are not allowed"
    return (*found, *([] if waste is None else [waste]))


def bounds(call: Planned) -> str | None:
    """Bounds for rules that have none, if those would skip tiles."""
    rules = call.request.mask.unbounded()
    if not rules:
        return None
    skipped, read = _skipped_by_bounds(call.layout)
    if not skipped:
        return None
    how = [
        f"give {part!r} `bounds=`" if isinstance(part, Custom) else f"define `classify` in {type(part).__name__}"
        for part in dict.fromkeys(rules)
    ]
    return (
        f"bounds would skip {skipped:,} of {read:,} tiles that were read: {', '.join(how)}; or add `& Band(lo, hi)` to "
        "the mask, if it allows no distance k - q outside of lo and hi"
    )


def sorted_by_id(call: Planned) -> str | None:
    """Tokens in the order of their ids, if ids come back after others."""
    request, mask = call.request, call.request.mask
    comes_back = [r for r in mask.walk() if isinstance(r, EqualIds) and any(_come_back(r, ids) for ids in r._ids())]
    if call.shared or call.layout.repeats or not comes_back:
        return None
    T, S = request.dims["T"], request.dims["S"]
    q_ids, kv_ids = comes_back[0]._ids()
    q, kv = (np.argsort(ids, axis=1, kind="stable") for ids in (q_ids, q_ids if T == S else kv_ids))
    positions: dict[str, Any] = {}
    if POSITION in mask.reads:
        places = (("q_positions", request.q_positions, q), ("kv_positions", request.kv_positions, kv))
        positions = {name: _taken(given, order) for name, given, order in places}
    layout = plan_layout(mask.cut(q, kv), T, S, call.layout.q_tile, call.layout.kv_tile, **positions, xp=np)
    flops = call.lowered_to(layout)
    if flops is None:
        return None
    return (
        f"{call.ratio}: ids come back after others, so tiles hold tokens of many documents. Sort the tokens by id, "
        f"`order = np.argsort(ids, kind='stable')` and `mask.cut(order, order)`"
        f"{', and pass their positions' if positions else ''}: that executes {flops}"
    )


def smaller_tiles(call: Planned) -> str | None:
    """Tiles of 32 x 32, if they hold less that is not allowed."""
    request, layout = call.request, call.layout
    if call.shared or layout.repeats or max(layout.q_tile, layout.kv_tile) <= TILE:
        return None
    T, S = request.dims["T"], request.dims["S"]
    q_tile, kv_tile = min(TILE, layout.q_tile), min(TILE, layout.kv_tile)
    positions = dict(q_positions=layout.q_positions, kv_positions=layout.kv_positions)
    flops = call.lowered_to(plan_layout(request.mask, T, S, q_tile, kv_tile, **positions, xp=np))
    if flops is None:
        return None
    tiles = f"q_tile={q_tile}, kv_tile={kv_tile}"
    if isinstance(call.given, MaskInfo):
        how = f"mask.layout({tiles})"
    else:
        names = {Mask: "mask", BlockLayout: "mask.mask"}
        name = next((name for kind, name in names.items() if isinstance(call.given, kind)), "ls.Dense(mask)")
        named = ", ".join(f"{name}={name}" for name, p in positions.items() if p is not None)
        how = f"{name}.layout({', '.join([str(T), str(S), tiles, *([named] if named else [])])})"
    return (
        f"{call.ratio}: most pairs of the visited tiles are not allowed, as where documents or windows are shorter "
        f"than a tile. Smaller tiles, `mask={how}`, execute {flops}; compare times"
    )


WASTE: tuple[Callable[[Planned], str | None], ...] = (sorted_by_id, smaller_tiles)  # the first that helps is said


def _cost(mask: Mask, part: Mask) -> str:
    """What a part that bounds nothing costs the mask it is in."""
    empty, full = mask.provable_kinds()
    effect = (
        "no tile can be skipped" if not empty
        else "no tile is known to be full, so every visited one is masked pair by pair" if not full
        else "tiles that it decides are masked pair by pair"
    )  # fmt: skip
    name = type(part).__name__
    return f"{name} without bounds ({part!r} has no `classify` of its own): {effect}"


@rule
class _Read(Mask):
    """A rule of which it is known what it allows in some tiles."""

    some: np.ndarray
    every: np.ndarray

    def classify(self, q, kv):
        return self.some.reshape(1, 1, -1, 1), self.every.reshape(1, 1, -1, 1)


def _skipped_by_bounds(layout: BlockLayout) -> tuple[int, int]:
    """(skipped, read): how many of some visited tiles are EMPTY once rules without bounds are read in them."""
    skipped = read = 0
    for plane in planes_of(layout):
        most = max(1, SAMPLE // plane.planes)
        looks = layout.looks(plane.batch, plane.head)
        tiles = sample_partial(layout.mask, plane.q, plane.kv, looks, visits=plane.visits, most=most)
        if tiles.shape[1]:
            known = _with_bounds(layout.mask, lambda part, at=plane, tiles=tiles: read_tiles(part, at.q, at.kv, tiles))
            some, _ = classify_tiles(known, plane.q, plane.kv, tiles)
            skipped, read = skipped + int(np.count_nonzero(~some)), read + len(some)
    return skipped, read


def _with_bounds(mask: Mask, known: Callable[[Mask], tuple[np.ndarray, np.ndarray]]) -> Mask:
    """The mask with what is known in the place of each rule that has no bounds."""
    parts = mask.parts()
    if parts:
        return mask.with_parts([_with_bounds(part, known) for part in parts])
    return _Read(*known(mask)) if mask.unbounded() == (mask,) else mask


def _come_back(rule: EqualIds, ids: np.ndarray) -> bool:
    """Whether some valid id of a row [B or 1, L] occurs again after another one."""
    return any(len(runs) > len(np.unique(runs)) for runs in _runs(rule, ids))


def _runs(rule: EqualIds, ids: np.ndarray) -> Iterator[np.ndarray]:
    """The valid ids of each row, neighbours that are equal as one."""
    counts = VALID[rule._valid]
    for row in np.asarray(ids):
        valid = row if counts is None else row[counts(row)]
        yield valid[np.diff(valid, prepend=valid[:1] - 1) != 0]


def _taken(positions: np.ndarray | None, order: np.ndarray) -> np.ndarray:
    """The positions of tokens in another order."""
    if positions is None:
        return order
    rows = max(len(order), 1 if positions.ndim == 1 else len(positions))
    full = (rows, order.shape[1])
    return np.take_along_axis(np.broadcast_to(positions, full), np.broadcast_to(order, full), axis=1)
