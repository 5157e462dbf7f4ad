"""Rows and heads of a sharded call keep the numbers that they have in the whole call."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.masks import Rule, rule
from longspan.testing import Shape, make_qkv
from tests.engines import every_engine
from tests.selection import one_in

SHAPE = Shape(B=4, T=19, S=19, N=4, K=2, H=5)
Q, K, V = make_qkv(SHAPE, jnp.float32)
IDS = np.sort(np.random.default_rng(0).integers(0, 3, (4, 19))).astype(np.int32)
HERE = P("x", None, "y")
PER_HEAD = ls.PerHead(tuple(ls.Window(n, 0) for n in range(1, 5)))
BOOLS = np.random.default_rng(1).random((4, 4, 19, 19)) < 0.6


def by_number(b, h, q, k):
    return (q + b * 3 + h) % 4 != k % 3


def whole(part, *operands, engine, check=True, **names):
    """(out, lse) of a call in shards of 2 rows and 2 heads, over the axes "x" and "y" by default."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    names = dict(batch_axes="x", head_axis="y") | names

    def local(q, k, v, *rest):
        mask, bias, rate = part(*rest)
        key = jax.random.key(3) if rate else None
        options = dict(mask=mask, bias=bias, dropout_rate=rate, dropout_key=key, return_lse=True)
        return ls.attention(q, k, v, **options, **names, engine=engine)

    specs = (HERE, HERE, HERE, *[P("x")] * len(operands))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(HERE, HERE), check_vma=check)
    return jax.jit(run)(Q, K, V, *operands)


CASES = {
    "dropout": (lambda: (ls.Causal(), None, 0.4), ()),
    "Custom": (lambda: (ls.Custom(by_number, batch=4, heads=4), None, 0.0), ()),
    "bounded Custom and documents": (
        lambda ids: (
            ls.Segments(ids)
            & ls.Custom(by_number, bounds=lambda b, h, q, k: (k.first <= q.last + h + b, q.last < 0), batch=4, heads=4),
            None,
            0.0,
        ),
        (IDS,),
    ),
    "PerHead": (lambda: (PER_HEAD, None, 0.3), ()),
    "documents of all rows": (lambda: (ls.Causal() & ls.Segments(IDS), None, 0.0), ()),
    "bools of all rows and heads": (lambda: (ls.Dense(BOOLS), None, 0.2), ()),
    "a layout of all heads": (lambda: (PER_HEAD.layout(19, 19, q_tile=8, kv_tile=4), None, 0.0), ()),
    "ScoreBias": (
        lambda: (ls.Causal(), ls.ScoreBias(lambda b, h, q, k, x: x[b, h] * abs(q - k).astype(x.dtype), TABLE), 0.0),
        (),
    ),
}
TABLE = jnp.linspace(-1, 1, 16).reshape(4, 4)


@every_engine
@pytest.mark.parametrize("case", one_in(5, CASES))
def test_a_shard_of_a_call_has_the_numbers_of_its_rows_and_heads(case, engine):
    part, operands = CASES[case]
    mask, bias, rate = part(*operands)
    options = dict(mask=mask, bias=bias, dropout_rate=rate, dropout_key=jax.random.key(3) if rate else None)
    if engine == "cpu" and isinstance(bias, ls.Bias):
        engine = "auto"
    for got, want in zip(
        whole(part, *operands, engine=engine),
        ls.attention(Q, K, V, **options, engine="reference", return_lse=True),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@every_engine
def test_masks_of_a_shards_heads_apply_to_the_heads_of_every_shard(engine):
    """`PerHead` with a mask for each head of a shard ignores the numbers of the heads, also with dropout."""
    pair = ls.PerHead((ls.Window(1, 0), ls.Window(4, 0)))
    both = ls.PerHead(pair.masks * 2)
    for rate in (0.0, 0.3):
        key = dict(dropout_rate=rate, dropout_key=jax.random.key(3)) if rate else {}
        got = whole(lambda rate=rate: (pair, None, rate), engine=engine)
        want = ls.attention(Q, K, V, mask=both, **key, engine="reference", return_lse=True)
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@rule
class ByHead(Rule):
    def lower(self):
        return ls.PerHead((ls.Window(1, 0), ls.Window(4, 0)))


@rule
class Opposite(Rule):
    def lower(self):
        return ls.Causal() & ~ByHead()


@every_engine
def test_a_rule_that_lowers_to_masks_of_the_heads_here_is_that_of_every_such_head(engine):
    by_head = ls.PerHead(ByHead().lower().masks * 2)
    for mask, same in ((ByHead(), by_head), (Opposite(), ls.Causal() & ~by_head)):
        got, _ = whole(lambda mask=mask: (mask, None, 0.0), engine=engine)
        want = ls.attention(Q, K, V, mask=same, engine="reference")
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    "names",
    [dict(batch_axes=("dp", "fsdp"), head_axis="tp"), dict(batch_axes=(), head_axis=None)],
    ids=["others", "none"],
)
def test_axes_that_are_not_named_change_nothing(names, check):
    out, _ = whole(lambda: (PER_PART, None, 0.4), engine="xla", check=check, **names)
    want = counted_from_0(PER_PART, dropout_rate=0.4, dropout_key=jax.random.key(3))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@every_engine
@pytest.mark.parametrize("planned", [False, True], ids=["mask", "layout"])
def test_a_rule_with_as_many_rows_and_heads_as_a_shard_gets_those_of_the_shard(engine, planned):
    mask = PER_PART.layout(19, 19, q_tile=8, kv_tile=4) if planned else PER_PART
    out, _ = whole(lambda: (mask, None, 0.0), engine=engine)
    np.testing.assert_allclose(out, counted_from_0(PER_PART), rtol=1e-5, atol=1e-5)


PER_PART = ls.Custom(
    lambda b, h, q, k: (k <= q + 3 * h - 4 * b) & by_number(b, h, q, k),
    bounds=lambda b, h, q, k: (k.first <= q.last + 3 * h - 4 * b, q.last < 0),
    batch=2,
    heads=2,
)


def counted_from_0(mask, **options):
    """A call in shards of 2 rows and 2 heads, each of which numbers its own from 0."""
    parts = [
        [
            ls.attention(
                Q[b : b + 2, :, n : n + 2],
                K[b : b + 2, :, n // 2 : n // 2 + 1],
                V[b : b + 2, :, n // 2 : n // 2 + 1],
                mask=mask,
                **options,
                engine="reference",
            )
            for n in (0, 2)
        ]
        for b in (0, 2)
    ]
    return jnp.concatenate([jnp.concatenate(row, axis=2) for row in parts], axis=0)


def test_masks_that_fit_neither_a_shard_nor_the_whole_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"PerHead.masks has 3 query heads, but this shard has 2 of 4. Give 1, 2 or 4"):
        whole(lambda: (ls.PerHead((ls.Full(),) * 3), None, 0.0), engine="xla")
    with pytest.raises(ValueError, match=r"Segments.q_ids has 3 batch rows, but this shard has 2 of 4"):
        whole(lambda: (ls.Segments(IDS[:3]), None, 0.0), engine="xla")
    with pytest.raises(ValueError, match="The mesh axis 'x' is named twice in `batch_axes` and `head_axis`"):
        ls.attention(Q, K, V, batch_axes=("x", "y"), head_axis="x")
    with pytest.raises(TypeError, match="name of a mesh axis, a tuple or list of such names, or None, got 3"):
        ls.attention(Q, K, V, head_axis=3)


def test_the_names_of_axes_are_the_same_everywhere():
    patterns = (ls.longformer_attention, ls.bigbird_attention)
    for function in (ls.attention, ls.explain, ls.parallel.attention, ls.parallel.shard_batch, *patterns):
        names = inspect.signature(function).parameters
        assert names["batch_axes"].default == ("dp", "fsdp")
        assert "head_axis" not in names or names["head_axis"].default == "tp"
    info = ls.MaskInfo.from_segments(IDS)
    assert (info.batch_axis_name, info.qheads_axis_name, info.kvheads_axis_name) == (("dp", "fsdp"), "tp", "tp")
    assert ls.parallel.mesh().axis_names == ("dp", "fsdp", "tp", "sp")


def test_explain_inside_a_shard_map_counts_tiles_unless_numbers_decide_them():
    found = []

    def part(mask):
        def local(q):
            found.append(ls.explain(q, q, q, mask=mask, engine="xla", batch_axes="x", head_axis="y"))
            return q

        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
        jax.shard_map(local, mesh=mesh, in_specs=HERE, out_specs=HERE)(Q)

    part(ls.Causal())
    part(PER_HEAD)
    assert found[0].tiles_total == 1 and found[1].tiles_total is None


@pytest.mark.check
@every_engine
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_dropout_inside_a_shard_map_is_that_of_one_device(engine, check):
    mesh, here = ls.parallel.mesh(dp=2, fsdp=2, tp=2), P(("dp", "fsdp"), None, "tp")
    options = dict(mask=ls.Causal(), dropout_rate=0.4, dropout_key=jax.random.key(3))

    def both(run, *qkv):
        out, pull = jax.vjp(run, *qkv)
        return out, *pull(jnp.cos(out))

    run = jax.shard_map(
        lambda *x: ls.attention(*x, **options, engine=engine), mesh=mesh, in_specs=(here,) * 3, out_specs=here,
        check_vma=check,
    )  # fmt: skip
    got = jax.jit(lambda *x: both(run, *x))(Q, K, V)
    want = both(lambda *x: ls.attention(*x, **options, engine="reference"), Q, K, V)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_dropout_of_rows_that_all_devices_hold_is_the_same_on_all():
    mesh, options = ls.parallel.mesh(dp=2, tp=2), dict(dropout_rate=0.4, dropout_key=jax.random.key(3))
    run = jax.shard_map(
        lambda *x: ls.attention(*x, **options, engine="xla"), mesh=mesh, in_specs=(P("dp"),) * 3, out_specs=P("dp")
    )
    np.testing.assert_allclose(run(Q, K, V), ls.attention(Q, K, V, **options, engine="reference"), rtol=1e-5, atol=1e-5)
