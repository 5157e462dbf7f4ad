"""Chips, tiles, limits and reports of the engine `pallas_tpu`. No kernel is compiled or run."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
import longspan.engines.pallas_tpu as pallas_tpu
from longspan.engines import ENGINES, PallasTpu, Request, choose, tried
from longspan.engines.pallas_tpu.chips import CHIPS, MIB, chip_of_kind
from longspan.engines.pallas_tpu.sizes import call_sizes, fits
from longspan.layout import count

pytestmark = pytest.mark.quick

CAUSAL = ls.Causal()


def request_of(B=1, T=4096, S=None, N=4, K=4, H=128, dtype=jnp.bfloat16, platform="cpu", **call):
    S = T if S is None else S
    q, k = jax.ShapeDtypeStruct((B, T, N, H), dtype), jax.ShapeDtypeStruct((B, S, K, H), dtype)
    return replace(Request.of(q=q, k=k, v=k, **call), platform=platform)


def reason(request, **options):
    return PallasTpu(**{"chip": "v5e", **options}).unsupported(request)


def test_chips_are_found_by_the_kind_of_their_devices():
    kinds = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
    assert {kind: chip_of_kind(kind).name for kind in kinds} == kinds
    assert all(chip_of_kind(kind) is None for kind in ("TPU v2", "TPU v3", "TPU v4 lite", "TPU8i"))


def test_an_unknown_chip_is_an_error_that_lists_the_known_ones():
    x = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.float32)
    for call in (lambda: PallasTpu(chip="v3"), lambda: ls.explain(x, x, x, chip="v3")):
        with pytest.raises(ValueError, match=r"^chip='v3' is not one of 'v4', 'v5e', 'v5p', 'v6e', 'tpu7x'\.$"):
            call()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("window", [512, 1024, 4096, 16384])
def test_the_preferred_tiles_are_nearly_the_fastest_of_the_model(chip, window):
    found, length, sizes = CHIPS[chip], 16384, (256, 512, 1024)
    cycles = {}
    for rows in sizes:
        for keys in sizes:
            counts = count((CAUSAL & ls.Window(window - 1, 0)).layout(length, q_tile=rows, kv_tile=keys))
            bundles, copied = found.visit_bundles(rows, keys), 2 * keys * 128 * 2
            kinds = counts.full, counts.partial
            costs = found.model(kinds, length // rows, bundles, found.own_bundles(rows), copied)
            cycles[rows, keys] = costs.visits + costs.rows
    assert cycles[found.q_rows, found.keys] <= 1.08 * min(cycles.values())


def test_copies_that_take_longer_than_a_row_are_exposed():
    chip = CHIPS["v5e"]
    hidden = chip.model((0, 10), 5, (1000, 1000), 600, 0)
    assert hidden.visits == 10_000 and hidden.rows == 5 * 600  # 1 µs of latency is 1,500 cycles
    exposed = chip.model((0, 10), 5, (1000, 1000), 600, 819_000)  # copies of 1 µs
    assert exposed.visits == pytest.approx(10 * 1500) and exposed.rows == pytest.approx(5 * (600 + 1400))


@pytest.mark.parametrize(
    ("chip", "call", "tiles"),
    [
        ("v5e", dict(mask=CAUSAL), (512, 512)),
        ("v6e", dict(mask=CAUSAL), (1024, 512)),
        ("v5e", dict(mask=CAUSAL, N=8, K=2), (128, 512)),  # 4 heads per visit
        ("v6e", dict(mask=CAUSAL, N=8, K=2), (256, 512)),
        ("v5e", dict(mask=ls.PerHead((CAUSAL, ls.Full())), N=2, K=1), (512, 512)),  # heads visit different tiles
        ("v5e", dict(mask=CAUSAL, dtype=jnp.float32, H=256), (512, 512)),
        ("v5e", dict(T=1, S=32768, N=32, K=8), (16, 1024)),
        ("v5e", dict(T=1, S=1152), (16, 384)),  # divides the keys: a cache is read without padding
        ("v5e", dict(T=1, S=1000), (16, 512)),
        ("v5e", dict(T=5), (16, 128)),
        ("v5e", dict(T=100), (112, 128)),
        ("v5e", dict(T=1152), (512, 384)),
        ("v5e", dict(T=700), (512, 512)),
    ],
)
def test_tiles_fill_a_visit_and_divide_the_keys(chip, call, tiles):
    request, engine = request_of(**call), PallasTpu(chip=chip)
    assert engine.tiles(request) == tiles and engine.unsupported(request) is None


@pytest.mark.parametrize("chip", CHIPS)
def test_tiles_shrink_until_all_kernels_fit(chip):
    """64 query heads share a key/value head: 128 queries of each do not fit."""
    request = request_of(N=64, K=1, H=256)
    q_tile, kv_tile = PallasTpu(chip=chip).tiles(request)
    assert q_tile < 128 and q_tile % 16 == 0 and kv_tile % 128 == 0
    assert fits(request, CHIPS[chip], q_tile, kv_tile, fused=True)
    assert not fits(request, CHIPS[chip], 128, 512, fused=True)


def test_tiles_of_a_layout_stay():
    request = request_of(mask=CAUSAL.layout(4096, q_tile=256, kv_tile=128))
    assert PallasTpu(chip="v5e").tiles(request) == (256, 128) and reason(request) is None


def test_interpreted_tiles_are_small():
    assert PallasTpu(interpret=True).tiles(request_of()) == (128, 128)
    assert PallasTpu(interpret=True).tiles(request_of(T=20, S=500)) == (32, 128)


def test_memory_is_that_of_the_buffers_of_each_kernel():
    """Forward, v5e, heads of 128 in bfloat16: the compiler allocates 3.09 MiB, and 3.98 MiB backward."""
    sizes = call_sizes(request_of(N=1, K=1, mask=CAUSAL), 512, 512, fused=True)
    tile = 512 * 128
    keys, blocks = 2 * 2 * tile * 2, 2 * 2 * tile * 2  # two buffers of k and v; two blocks of q and out
    statistics, total = 2 * tile * 4, tile * 4  # max and sum of weights along lanes; the sum of values
    lse = 2 * 512 * 4
    assert sizes.forward.vmem == keys + blocks + statistics + total + lse + 8 * 512 * 512
    assert sizes.forward.visit == 2 * tile * 2
    assert 3.09 * MIB < sizes.forward.vmem < 4 * MIB and 3.98 * MIB < sizes.kernels["backward"].vmem < 5 * MIB
    apart = call_sizes(request_of(N=1, K=1, mask=CAUSAL), 512, 512, fused=False)
    assert set(apart.kernels) == {"forward", "dkv", "dq"}


def test_float32_and_streams_of_masks_and_biases_take_more_memory():
    plain = call_sizes(request_of(), 512, 512, fused=True).forward
    ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    segments = call_sizes(request_of(mask=ls.Segments(ids)), 512, 512, fused=True).forward
    bias = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    biased = call_sizes(request_of(bias=bias), 512, 512, fused=True).forward
    wide = call_sizes(request_of(dtype=jnp.float32), 512, 512, fused=True).forward
    assert plain.vmem < segments.vmem < biased.vmem and plain.smem < segments.smem
    assert biased.visit == plain.visit + 4 * 512 * 512 and wide.visit == 2 * plain.visit


LONG = 1 << 26
REFUSED = {
    "float16": (dict(dtype=jnp.float16), "it supports float32 and bfloat16, not float16"),
    "large heads": (dict(H=320), "it supports a head dimension of at most 256, not 320"),
    "pairs": (
        dict(T=20000, mask=jax.ShapeDtypeStruct((20000, 20000), bool)),
        "the mask needs 381.5 MiB for arrays with one byte per pair, and at most 256.0 MiB are supported. Define the "
        "rule by position or by arrays of one entry per token, or use engine='xla'",
    ),
    "tables": (
        dict(mask=ls.Custom(lambda q, k, table: table[q % 8] == k % 8, np.zeros(32768, np.int32))),
        "reads an array at indices that depend on the positions of queries or keys",
    ),
    "vmem": (
        dict(mask=CAUSAL.layout(4096, q_tile=1024, kv_tile=2048)),
        "its forward kernel needs 20.5 MiB of VMEM with tiles of 1024 x 2048, and v5e has 16.0 MiB for a kernel. Plan "
        "smaller tiles with `mask.layout(..., q_tile=, kv_tile=)`, or use engine='xla'",
    ),
    "smem": (
        dict(T=128, S=LONG, K=1, mask=ls.Segments(*[jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (128, LONG)])),
        "of SMEM with tiles of 128 x 512, and v5e has 1.0 MiB for a kernel. Plan larger tiles with `mask.layout(..., "
        "q_tile=, kv_tile=)`, or use engine='xla'",
    ),
    "tiles": (
        dict(mask=CAUSAL.layout(4096, q_tile=24, kv_tile=200)),
        "with bfloat16, q_tile must be a multiple of 16 and kv_tile a multiple of 16, but the layout has tiles of "
        "24 x 200. Plan it with `mask.layout(..., q_tile=32, kv_tile=208)`",
    ),
    "tiles with a bias": (
        dict(mask=CAUSAL.layout(4096, q_tile=64, kv_tile=192), bias=jax.ShapeDtypeStruct((4096, 4096), jnp.float32)),
        "with bfloat16 and a bias that has one number per pair or a table by distance, q_tile must be a multiple of 16 "
        "and kv_tile a multiple of 128, but the layout has tiles of 64 x 192. Plan it with `mask.layout(..., "
        "q_tile=64, kv_tile=256)`",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_chip_cannot_run_is_refused_with_the_number(what):
    call, message = REFUSED[what]
    request = request_of(**call)
    assert message in (reason(request) or "")
    with pytest.raises(NotImplementedError, match="engine='pallas_tpu' cannot run this: " + ".*" + re.escape(message)):
        choose(PallasTpu(chip="v5e"), request)


def test_float64_is_refused():
    with jax.enable_x64(True):
        assert reason(request_of(dtype=jnp.float64)) == "it supports float32 and bfloat16, not float64"


def test_tiles_of_8_queries_are_for_float32():
    layout = CAUSAL.layout(4096, q_tile=24, kv_tile=128)
    assert reason(request_of(mask=layout, dtype=jnp.float32)) is None
    assert reason(request_of(mask=layout, dtype=jnp.float32), chip=None, interpret=True) is None


def test_other_platforms_are_refused_with_what_runs_there():
    message = (
        "it needs a TPU, but JAX's default backend here is gpu. longspan.engines.PallasTpu(interpret=True) interprets "
        "the kernels on any platform, for tests; engine='xla' runs on every platform"
    )
    assert PallasTpu().unsupported(request_of(platform="gpu")) == message
    assert PallasTpu(interpret=True).unsupported(request_of(platform="gpu")) is None
    x = jnp.zeros((1, 8, 1, 8))
    with pytest.raises(NotImplementedError, match=r"engine='pallas_tpu' cannot run this: it needs a TPU, .* is cpu"):
        ls.attention(x, x, x, engine="pallas_tpu")


def test_chips_that_the_kernels_were_not_compiled_for_are_refused(monkeypatch):
    for kind in ("TPU v2", "TPU v3", "TPU v9"):
        monkeypatch.setattr(pallas_tpu, "_device_kind", lambda kind=kind: kind)
        assert PallasTpu().unsupported(request_of(platform="tpu")) == (
            f"its kernels were never compiled for {kind!r}, only for 'v4', 'v5e', 'v5p', 'v6e', 'tpu7x'. engine='xla' "
            "runs here"
        )


def test_auto_keeps_xla_on_a_tpu_until_somebody_ran_the_kernels(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "_device_kind", lambda: "TPU v5 lite")
    request = request_of(platform="tpu")
    chosen, refused = choose("auto", request)
    assert pallas_tpu.PROVEN == () and chosen.name == "xla" and list(refused) == ["cpu", "pallas_tpu"]
    assert refused["pallas_tpu"] == (
        "its kernels were compiled for v5e, but nobody has reported a run on this chip. To run the kernels, pass "
        "engine='pallas_tpu'"
    )
    assert choose("pallas_tpu", request)[0] == PallasTpu()
    monkeypatch.setattr(pallas_tpu, "PROVEN", ("v5e",))
    assert choose("auto", request)[0].name == "pallas_tpu"


def test_auto_tries_the_engines_of_the_platform_in_order():
    assert "pallas_tpu" in ENGINES and tried("cpu") == tried("gpu") == ("cpu", "xla", "reference")
    assert tried("tpu") == ("cpu", "pallas_tpu", "xla", "reference")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("tpu", "engine='pallas_tpu' runs kernels on TPUs; engine='xla' runs plain JAX there"),
        ("gpu", "no engine has kernels for GPUs; engine='xla' runs plain JAX there"),
        ("cuda", "no engine has kernels for GPUs; engine='xla' runs plain JAX there"),
    ],
)
def test_names_of_platforms_are_answered_with_what_exists(name, what):
    x = jnp.zeros((1, 8, 1, 8))
    with pytest.raises(ValueError, match=re.escape(f"engine={name!r} is not the name of an engine: {what}.")):
        ls.attention(x, x, x, engine=name)


def qkv(T=65536, N=4, K=2, H=80):
    q, k = (jax.ShapeDtypeStruct((1, T, heads, H), jnp.bfloat16) for heads in (N, K))
    return q, k, k


def rows_of(report):
    return {name.strip(): value for name, value in report._rows()}


def test_explain_reports_on_a_chip_from_any_machine():
    report = ls.explain(*qkv(), mask=CAUSAL & ls.Window(511, 0), chip="v5e")
    chip, rows = report.chip, rows_of(report)
    assert report.engine == "pallas_tpu" and (report.q_tile, report.kv_tile) == (256, 512)
    assert rows["engine"] == "pallas_tpu, the engine with kernels for TPUs"
    assert rows["chip"] == "v5e; the kernels of this engine were compiled for it, but never run on it"
    assert rows["lanes of heads in use"] == "62.5%; heads are padded to multiples of 128 lanes"
    assert re.fullmatch(r"forward kernel \S+ MiB, fused backward kernel \S+ MiB, of 16 MiB for each", rows["VMEM"])
    assert re.fullmatch(r"forward kernel \S+ KiB, fused backward kernel \S+ KiB, of 1 MiB for each", rows["SMEM"])
    visits = 2 * (report.tiles_partial + report.tiles_full)
    assert chip.copied_bytes == visits * 2 * 512 * 128 * 2 + 2 * 256 * (2 * 512 * 128 * 2 + 2 * 256 * 4)
    assert chip.useful_products == pytest.approx(0.625 * report.useful_flops / report.executed_flops)
    assert 0 < chip.row_share < 1 and rows["start and end of query tiles"].endswith("% of the modelled cycles, forward")
    assert rows["useful products"].endswith(
        "% of the executed products, which include padding and forbidden pairs; forward"
    )
    assert "never run on it" in report._repr_html_() and "seconds" not in str(report)


def test_a_row_of_a_narrow_window_costs_less_than_a_third_of_the_modelled_time():
    report = ls.explain(*qkv(N=2, H=128), mask=CAUSAL & ls.Window(511, 0), chip="v5e")
    assert report.chip.row_share <= 0.3
    long = ls.explain(*qkv(N=2, H=128), mask=CAUSAL, chip="v5e")
    assert long.chip.row_share < 0.05


def test_masks_without_values_are_reported_as_such():
    mask = CAUSAL & ls.Segments(jax.ShapeDtypeStruct((1, 65536), jnp.int32))
    report = ls.explain(*qkv(), mask=mask, chip="v6e", engine="pallas_tpu")
    rows = rows_of(report)
    assert report.reason == "as requested" and report.chip.copied_bytes is None
    for name in ("copied from and to HBM", "useful products", "start and end of query tiles"):
        assert rows[name] == "depends on data"
    assert max(report.chip.vmem_bytes.values()) <= report.chip.vmem_limit == 32 * MIB


def test_other_engines_and_meshes_have_no_chip():
    assert ls.explain(*qkv(64), mask=CAUSAL).chip is None
    message = "`chip` is for engine='pallas_tpu', but the call names engine='xla'. Leave out one of them."
    with pytest.raises(ValueError, match=re.escape(message)):
        ls.explain(*qkv(64), engine="xla", chip="v5e")
    mesh = jax.sharding.AbstractMesh((8,), ("sp",))
    with pytest.raises(ValueError, match="`explain` takes a `mesh` or a `chip`, not both"):
        ls.explain(*qkv(64), mesh=mesh, chip="v5e")
    assert ls.explain(*qkv(64), engine=PallasTpu(fused=False), chip="v5e").chip.vmem_bytes.keys() == {
        "forward kernel", "kernel of dk and dv", "kernel of dq"
    }  # fmt: skip


def test_interpreted_kernels_are_noted():
    report = ls.explain(*qkv(64), engine=PallasTpu(interpret=True))
    assert report.chip is None and "the kernels are interpreted: that is slow, and for tests only" in report.notes


def test_calls_without_keys_need_no_memory():
    request = request_of(T=8, S=0)
    assert reason(request) is None
    assert ls.explain(request.q, request.k, request.v, chip="v5e").chip is None


def test_temporary_memory_is_that_of_copies_with_heads_first():
    """A step of decoding from a cache [B, S, K, H] copies the cache: 512 MiB."""
    engine = PallasTpu(chip="v5e")
    assert engine.temporary_bytes(request_of(B=4, T=1, S=32768, N=32, K=8)) == 512 * MIB + 2 * 4 * 32 * 16 * 128 * 2
    assert engine.temporary_bytes(request_of(N=1, K=1)) is None
