"""Rows and heads of a part of a call: they keep the numbers that they have in the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan._attention import answer, bind
from longspan.testing import Shape, make_qkv
from tests.engines import every_engine
from tests.selection import one_in

SHAPE = Shape(B=4, T=19, S=19, N=4, K=2, H=5)
Q, K, V = make_qkv(SHAPE, jnp.float32)
IDS = np.sort(np.random.default_rng(0).integers(0, 3, (4, 19))).astype(np.int32)
HERE = P("x", None, "y")


def by_number(b, h, q, k):
    return (q + b * 3 + h) % 4 != k % 3


def numbers(count, axis):
    return jax.lax.axis_index(axis) * count + jnp.arange(count, dtype=np.int32)


def whole(part, *operands, engine):
    """(out, lse) of a call in parts of 2 rows and 2 heads, all that goes by number told by the numbers of the whole."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def local(q, k, v, *rest):
        mask, bias, rate = part(*rest)
        key = jax.random.key(3) if rate else None
        ids = dict(rows=numbers(2, "x"), heads=numbers(2, "y"))
        request = bind(q, k, v, mask, bias, None, None, None, rate, key, None, None, **ids)
        return answer(request, engine, dropout_key=key)

    specs = (HERE, HERE, HERE, *[P("x")] * len(operands))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(HERE, HERE))
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
    "PerHead": (lambda: (ls.PerHead(tuple(ls.Window(n, 0) for n in range(1, 5))), None, 0.3), ()),
    "ScoreBias": (
        lambda: (ls.Causal(), ls.ScoreBias(lambda b, h, q, k, x: x[b, h] * abs(q - k).astype(x.dtype), TABLE), 0.0),
        (),
    ),
}
TABLE = jnp.linspace(-1, 1, 16).reshape(4, 4)


@every_engine
@pytest.mark.parametrize("case", one_in(5, CASES))
def test_a_part_of_a_call_is_told_the_numbers_of_its_rows_and_heads(case, engine):
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
