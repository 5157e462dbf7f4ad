"""Sharded batch rows and heads under plain `jit`: every device computes its own, and nothing is gathered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.engines import ENGINES
from longspan.testing import Shape, make_qkv

COLLECTIVE = re.compile(r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")
B, T, N, K, H = 4, 21, 4, 2, 5
ROWS, HEADS = P("x"), P("x", None, "y")
rng = np.random.default_rng(0)


def mesh_of(kind=AxisType.Auto, rows=2, heads=2):
    return jax.make_mesh((rows, heads), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[: rows * heads])


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def by_number(b, h, q, k):
    return (q + b * 3 + h) % 4 != k % 3


def score(b, h, q, k, table):
    return table[b, h] * abs(q - k).astype(table.dtype)


IDS = np.sort(rng.integers(0, 3, (B, T))).astype(np.int32)
LENGTHS = np.array([21, 17, 9, 20], np.int32)
FLAGS = rng.random((B, T)) < 0.1
BLOCKS = rng.integers(-1, 6, (N, 6, 2)).astype(np.int32)
DENSE = rng.random((B, N, T, T)) < 0.6
POSITIONS = np.cumsum(rng.integers(0, 3, (B, T)), 1).astype(np.int32)
ENDS = rng.integers(0, T, (B, N, T)).astype(np.int32)
PER_HEAD = ls.PerHead((ls.Window(3, 0), ls.Causal(), ls.Full(), ls.Window(2, 2, 2)))
KEY = jax.random.key(5)

# What a call is given besides q, k and v, made of operands, and how those are placed: (arguments, operands, specs).
CASES = {
    "documents, lengths, windows and a bias by row": (
        lambda ids, lengths, bias: dict(
            mask=ls.Window(lengths, 0) & ls.Segments(ids) & ls.KvLengths(lengths), bias=bias
        ),
        (IDS, LENGTHS, normal(B, 1, 1, T)),
        (ROWS, ROWS, ROWS),
    ),
    "blocks by head, sinks": (
        lambda table, sinks: dict(mask=ls.Blocks(table, 4) | ls.Window(2, 2), sinks=sinks),
        (BLOCKS, normal(N)),
        (P("y"), P("y")),
    ),
    "masks by head, dropout": (
        lambda ids: dict(mask=PER_HEAD & ls.Segments(ids), dropout_rate=0.3, dropout_key=KEY),
        (IDS,),
        (ROWS,),
    ),
    "global flags, static blocks, soft cap": (
        lambda flags: dict(
            mask=ls.Window(3, 3) | ls.Global((1,), q_flags=flags, kv_flags=flags) | ls.Blocks(BLOCKS, 4), soft_cap=2.0
        ),
        (FLAGS,),
        (ROWS,),
    ),
    "bools, a bias by head and one for all": (
        lambda mask, by_head, of_keys: dict(mask=mask, bias=(by_head, of_keys)),
        (DENSE, normal(1, N, T, T), normal(1, 1, 1, T)),
        (P("x", "y"), P(None, "y"), P()),
    ),
    "a rule and dropout by number": (
        lambda: dict(mask=ls.Custom(by_number, batch=B, heads=N), dropout_rate=0.3, dropout_key=KEY),
        (),
        (),
    ),
    "a MaskInfo, alibi and a table by head": (
        lambda ids, slopes, table: dict(
            mask=ls.MaskInfo.from_segments(ids, q_positions=POSITIONS, kv_positions=POSITIONS).apply_causal(),
            bias=(ls.alibi(slopes), ls.relative_bias(table)),
        ),
        (IDS, normal(N), normal(8, N)),
        (ROWS, P("y"), P(None, "y")),
    ),
    "a planned layout, intervals by head, positions": (
        lambda ids, ends, positions: dict(
            mask=(ls.Segments(ids) | ls.Between(ends - 5, ends)).layout(
                T, T, q_tile=8, kv_tile=4, q_positions=positions, kv_positions=positions
            )
        ),
        (IDS, ENDS, POSITIONS),
        (ROWS, P("x", "y"), ROWS),
    ),
    "scores by number": (
        lambda table: dict(mask=ls.Causal(), bias=ls.ScoreBias(score, table)),
        (normal(B, N),),
        (P(),),
    ),
}


def loss(of, engine, operands):
    (q, k, v), *rest = operands
    out, lse = ls.attention(q, k, v, **of(*rest), engine=engine, return_lse=True)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0)), (out, lse)


def gradients(of, engine):
    """A program of operands: (value, (out, lse)), and the gradients of all floats."""

    def run(operands):
        leaves, tree = jax.tree.flatten(operands)
        floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, np.floating)]

        def value(*given):
            filled = list(leaves)
            for i, x in zip(floats, given, strict=True):
                filled[i] = x
            return loss(of, engine, tree.unflatten(filled))

        return jax.value_and_grad(value, range(len(floats)), has_aux=True)(*(leaves[i] for i in floats))

    return jax.jit(run)


def place(mesh, operands, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), operands, specs)


def collectives(compiled):
    return set(COLLECTIVE.findall(compiled.as_text()))


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def on_one_device():
    known = {}

    def result(case):
        if case not in known:
            of, operands, _ = CASES[case]
            qkv = make_qkv(Shape(B, T, T, N, K, H), jnp.float32)
            known[case] = gradients(of, "reference")((qkv, *operands))
        return known[case]

    return result


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize("case", CASES)
def test_every_device_computes_its_own_rows_and_heads(case, engine, on_one_device):
    of, operands, specs = CASES[case]
    if case == "scores by number" and engine == "cpu":
        pytest.skip("the cpu engine calls no functions of Python")
    mesh, here = mesh_of(), (HEADS, HEADS, HEADS)
    qkv = make_qkv(Shape(B, T, T, N, K, H), jnp.float32)
    placed = place(mesh, (qkv, *operands), (here, *specs))
    program = gradients(of, engine).lower(placed).compile()
    assert collectives(program) <= {"all-reduce"}  # the loss, and gradients of what rows or heads share
    got = (_, (out, lse)), grads = program(placed)
    close(got, on_one_device(case))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 4)
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 3)
    for gradient in grads[:3]:
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 4)
    forward = jax.jit(lambda operands: loss(of, engine, operands)[1])
    assert not collectives(forward.lower(placed).compile())
