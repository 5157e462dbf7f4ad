"""`explain`: a report on a call of `attention`: its engine, tiles, FLOPs and memory, without running it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Bool, Float

from longspan import cache
from longspan.advice import PlannedCall, advice, estimate, facts, in_numpy
from longspan.array_types import Array, EngineName, Key, Positions, Query, Real, Value, no_type_check
from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.biases import AnyBias
from longspan.checks import is_abstract
from longspan.engines import Engine, PallasTpu, Request, choose, tried
from longspan.engines.pallas_tpu.report import ChipReport
from longspan.layout import BlockLayout, count
from longspan.maskinfo import MaskInfo
from longspan.masks import Mask
from longspan.parallel.order import Order, check_mesh
from longspan.parallel.report import sending
from longspan.parallel.specs import Axes
from longspan.render.html import page, table_html, tile_bar
from longspan.work import short, work


@no_type_check
def explain(
    q: Query | jax.ShapeDtypeStruct,
    k: Key | jax.ShapeDtypeStruct,
    v: Value | jax.ShapeDtypeStruct,
    *,
    mask: Mask | MaskInfo | BlockLayout | Bool[Array, "..."] | jax.ShapeDtypeStruct | None = None,
    bias: AnyBias | jax.ShapeDtypeStruct | None = None,
    scale: Real | None = None,
    soft_cap: Real | None = None,
    sinks: Float[Array, "N"] | jax.ShapeDtypeStruct | None = None,
    dropout_rate: Real = 0.0,
    dropout_key: jax.Array | None = None,
    q_positions: Positions | None = None,
    kv_positions: Positions | None = None,
    engine: EngineName | Engine = "auto",
    return_lse: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str = "sp",
    batch_axes: str | Sequence[str] = BATCH_AXES,
    head_axis: str | None = HEAD_AXIS,
    order: Order = "contiguous",
    global_capacity: int | None = None,
    chip: str | None = None,
) -> "Explanation":
    """Reports the engine, tiles, FLOPs and memory of a call of `attention` with the same arguments, without running it.

    Arrays may be `jax.ShapeDtypeStruct`s. With a `mesh`, it reports on `ls.parallel.attention` instead, with the bytes
    that devices send in each step; `axis`, `order` and `global_capacity` are arguments of that function.

    With a `chip` ("v4", "v5e", "v5p", "v6e" or "tpu7x"), the report is for the engine `pallas_tpu` on this kind of TPU,
    and no TPU is needed. It adds the memory that the kernels need, the chip's limits, and the bytes that the kernels
    copy. These are static counts. Nobody has run the kernels on a TPU, so there are no times.

    Example:
        >>> x = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.float32)
        >>> report = ls.explain(x, x, x, mask=ls.Causal(), engine="reference")
        >>> report.engine, report.tiles_empty, report.tiles_partial, report.tiles_full
        ('reference', 28, 8, 28)
        >>> report = ls.explain(x, x, x, mask=ls.Window(31, 0), mesh=ls.parallel.mesh(sp=8))
        >>> report.sent_bytes, report.sent_bytes_backward, report.bound_bytes, report.gather_bytes
        (31744, 31744, 31744, 917504)
        >>> x = jax.ShapeDtypeStruct((1, 65536, 4, 128), jnp.bfloat16)
        >>> report = ls.explain(x, x, x, mask=ls.Causal() & ls.Window(511, 0), chip="v5e")
        >>> report.engine, report.q_tile, report.kv_tile, f"{report.chip.row_share:.0%}"
        ('pallas_tpu', 512, 512, '28%')
    """
    chosen_for = engine
    if chip is not None:
        if mesh is not None:
            raise ValueError("`explain` takes a `mesh` or a `chip`, not both: the report on a chip is for one device.")
        chosen_for = _on_chip(engine, chip)
    request = Request.of(
        q=q, k=k, v=v, mask=mask, bias=bias, scale=scale, soft_cap=soft_cap, sinks=sinks, dropout_rate=dropout_rate,
        dropout_key=dropout_key, q_positions=q_positions, kv_positions=kv_positions,
        batch_axes=batch_axes, head_axis=head_axis,
    )  # fmt: skip
    check_mesh(order, mesh)
    chosen, refused = choose(chosen_for, request)
    layout, dims = request.layout, request.dims
    if layout is None:
        q_tile, kv_tile = chosen.tiles(request)
    else:
        q_tile, kv_tile = layout.q_tile, layout.kv_tile
    counts, advised = None, ()
    is_known = _is_known(request)
    if is_known and 0 not in dims.values():
        with jax.ensure_compile_time_eval():  # so that arrays with known values are not traced inside `jit`
            known = in_numpy(request)
            layout = known.plan_layout(q_tile, kv_tile, xp=np)
            counts = count(layout)
            done = work(dims, layout, counts)
            flops = done["useful_flops"], done["executed_flops"]
            advised = advice(PlannedCall(known, chosen, mask, layout, *flops, mesh is not None))
    sent = {}
    if mesh is not None:
        sent = sending(request, Axes.of(mesh, axis, batch_axes, head_axis), order, global_capacity)
    on_chip = None
    if isinstance(chosen, PallasTpu):
        on_chip = chosen.report(request, layout, counts)
    return Explanation(
        engine=chosen.name,
        reason=_reason(engine, chip, request.platform),
        refused=refused,
        mask=repr(request.mask),
        q_tile=q_tile,
        kv_tile=kv_tile,
        notes=(*facts(request, is_known, mesh is not None), *chosen.notes(request), *estimate(counts), *advised),
        temporary_bytes=chosen.temporary_bytes(request),
        chip=on_chip,
        **_cache_sizes(request),
        **sent,
        **_array_sizes(request),
        **work(dims, layout, counts),
    )


def _reason(asked: str | Engine, chip: str | None, platform: str) -> str:
    if asked != "auto":
        return "as requested"
    if chip is not None:
        return "the engine with kernels for TPUs"
    return f"the first of {', '.join(tried(platform))} that 'auto' accepts for this call, usually the fastest"


def _on_chip(engine: str | Engine, chip: str) -> PallasTpu:
    """The engine of a call on a chip."""
    if engine in ("auto", "pallas_tpu"):
        return PallasTpu(chip=chip)
    if isinstance(engine, PallasTpu):
        return replace(engine, chip=chip)
    raise ValueError(f"`chip` is for engine='pallas_tpu', but the call names engine={engine!r}. Leave out one of them.")


def _is_known(request: Request) -> bool:
    """Whether the visited tiles can be computed here: all arrays have values, and the mask is not of all shards."""
    arrays = jax.tree.leaves((request.mask, request.layout, request.q_positions, request.kv_positions))
    of_all_shards = request.mask.batch > request.dims["B"] or request.mask.heads > request.dims["N"]
    return not of_all_shards and not any(is_abstract(array) for array in arrays)


@dataclass(frozen=True)
class Explanation:
    """The report of `explain`; `print` shows it as a table. Counts are None where they depend on data.

    Tiles are counted once for all batch rows and heads that have the same mask. FLOPs and bytes are those of the whole
    call.

    Example:
        >>> x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float32)
        >>> ls.explain(x, x, x, mask=ls.Causal(), engine="reference").useful_flops
        16842752
    """

    engine: str
    reason: str  # for the choice of the engine
    refused: dict[str, str]  # engine tried before the chosen one -> the reason why it was not chosen
    mask: str
    q_tile: int
    kv_tile: int
    tiles_total: int | None
    tiles_empty: int | None
    tiles_partial: int | None
    tiles_full: int | None
    useful_flops: int | None  # 2·(H + Hv) for each allowed pair and head, forward
    executed_flops: int | None  # 2·(H + Hv) for each pair in a tile that is computed, forward
    array_bytes: int  # q, k, v, out, lse, bias and sinks
    temporary_bytes: int | None  # a lower bound of the engine's temporary memory; None: small, or not known in advance
    dense_mask_bytes: int  # the size of a dense mask of bools, which is not allocated
    notes: tuple[str, ...]
    cache_bytes: int | None = None  # of a KV cache; None: explicit positions, no self-attention, or no decoding
    full_cache_bytes: int | None = None  # of a cache of all keys
    useful_is_estimate: bool = False  # whether `useful_flops` is estimated from a sample of the partial tiles
    # With a mesh, of one device; the worst case where it depends on data:
    sent_bytes: int | None = None  # received from other devices, forward
    sent_bytes_backward: int | None = None
    bound_bytes: int | None = None  # a lower bound: the bytes that the busiest device must receive, forward
    gather_bytes: int | None = None  # received if all keys and values were gathered
    sent_is_worst_case: bool = False  # whether the mask's arrays decide how much is sent
    bound_is_worst_case: bool = False  # whether the mask's arrays decide how much must be received
    sending: tuple[str, ...] = ()  # order and load, then one line per step
    chip: ChipReport | None = None  # with `pallas_tpu`: memory and copies of its kernels

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _repr_html_(self) -> str:
        bar = ""
        if self.tiles_empty is not None and self.tiles_partial is not None and self.tiles_full is not None:
            counts = (self.tiles_empty, self.tiles_partial, self.tiles_full)
            bar = tile_bar(*counts)
        return page(table_html(self._rows(), before=bar))

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("engine", f"{self.engine}, {self.reason}"),
            *((f"  not {name}", why) for name, why in self.refused.items()),
            ("mask", self.mask),
            ("tiles", f"{self.q_tile} x {self.kv_tile}"),
            ("  empty", _share(self.tiles_empty, self.tiles_total)),
            ("  partial", _share(self.tiles_partial, self.tiles_total)),
            ("  full", _share(self.tiles_full, self.tiles_total)),
            ("useful FLOPs", "about " * self.useful_is_estimate + short(self.useful_flops, "FLOP", 1000)),
            ("executed FLOPs", short(self.executed_flops, "FLOP", 1000)),
            ("inputs and outputs", short(self.array_bytes, "B", 1024)),
            *self._temporary(),
            *self._kept(),
            *self._sent(),
            *self._on_chip(),
            ("dense mask (not allocated)", short(self.dense_mask_bytes, "B", 1024)),
            *(("note", note) for note in self.notes),
        ]

    def _temporary(self) -> list[tuple[str, str]]:
        if self.temporary_bytes is None:
            return []
        return [("temporary memory", f"at least {short(self.temporary_bytes, 'B', 1024)}")]

    def _on_chip(self) -> list[tuple[str, str]]:
        report = self.chip
        if report is None:
            return []
        known = "and run on it" if report.is_proven else "but never run on it"
        executed = "of the executed products, which include padding and forbidden pairs; forward"
        copied = short(report.copied_bytes, "B", 1024)
        if report.copied_bytes is not None:
            copied = f"{copied}, forward"
        return [
            ("chip", f"{report.chip}; the kernels of this engine were compiled for it, {known}"),
            ("  VMEM", _of_limit(report.vmem_bytes, report.vmem_limit)),
            ("  SMEM", _of_limit(report.smem_bytes, report.smem_limit)),
            ("  copied from and to HBM", copied),
            ("  lanes of heads in use", f"{report.lanes:.1%}; heads are padded to multiples of 128 lanes"),
            ("  useful products", _percent(report.useful_products, executed)),
            ("  start and end of query tiles", _percent(report.row_share, "of the modelled cycles, forward")),
        ]

    def _kept(self) -> list[tuple[str, str]]:
        if self.cache_bytes is None:
            return []
        kept, full = short(self.cache_bytes, "B", 1024), short(self.full_cache_bytes, "B", 1024)
        return [("KV cache for decoding", f"{kept}; a cache of all keys takes {full}")]

    def _sent(self) -> list[tuple[str, str]]:
        if self.sent_bytes is None:
            return []
        head, *steps = self.sending
        forward, backward = short(self.sent_bytes, "B", 1024), short(self.sent_bytes_backward, "B", 1024)
        bound, gather = short(self.bound_bytes, "B", 1024), short(self.gather_bytes, "B", 1024)
        at_most = "at most " * self.sent_is_worst_case
        required = "in the worst case, " * self.bound_is_worst_case + f"the mask requires {bound} forward"
        return [
            ("devices", head),
            *(("  sends", step) for step in steps),
            ("  total", f"each device receives {at_most}{forward} forward and {backward} backward"),
            ("  lower bound", f"{required}; an all-gather sends {gather}"),
        ]


def _array_sizes(request: Request) -> dict[str, int]:
    B, T, S, N, K, H, Hv = request.dims.values()
    item = np.dtype(request.q.dtype).itemsize
    arrays = item * B * (H + Hv) * (T * N + S * K) + max(item, 4) * B * T * N
    more = jax.tree.leaves((request.bias, request.sinks))
    arrays += sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in more)
    return dict(array_bytes=arrays, dense_mask_bytes=request.mask.batch * request.mask.heads * T * S)


def _cache_sizes(request: Request) -> dict[str, int]:
    """The bytes of a KV cache for this mask, if it allows decoding and positions are slot indices."""
    B, T, S, _, K, H, Hv = request.dims.values()
    if T != S or not S or request.has_positions:
        return {}
    try:
        plan = cache.plan(request.mask, S)
    except ValueError:  # queries see later keys
        return {}
    call = (B, K, H, request.k.dtype)
    return dict(cache_bytes=plan.nbytes(*call, v_head_dim=Hv), full_cache_bytes=plan.full_nbytes(*call, v_head_dim=Hv))


def _of_limit(used: dict[str, int], limit: int) -> str:
    each = ", ".join(f"{name} {short(size, 'B', 1024)}" for name, size in used.items())
    return f"{each}, of {short(limit, 'B', 1024)} for each"


def _percent(share: float | None, of: str) -> str:
    if share is None:
        return "depends on data"
    return f"{share:.1%} {of}"


def _share(part: int | None, total: int | None) -> str:
    if part is None or total is None:
        return "depends on data"
    return f"{part:,} ({part / max(total, 1):.1%})"
