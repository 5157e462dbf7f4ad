"""Sharded batch rows and heads under plain `jit`: each device computes its own, and nothing is gathered."""

import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.masks import rule
from longspan.testing import Shape, make_qkv
from tests.engines import RUNNING, available
from tests.selection import one_in

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

# Further arguments of a call, as (function from operands to arguments, operands, specs of the operands).
CASES = {
    "documents, lengths, windows and a bias by row": (
        lambda ids, lengths, bias: dict(
            mask=ls.Window(lengths, 0) & ls.Segments(ids) & ls.KvLengths(lengths), bias=bias
        ),
        (IDS, LENGTHS, normal(B, 1, 1, T)),
        (ROWS, ROWS, ROWS),
    ),
    "masks by head, dropout": (
        lambda ids: dict(mask=PER_HEAD & ls.Segments(ids), dropout_rate=0.3, dropout_key=KEY),
        (IDS,),
        (ROWS,),
    ),
    "global flags, blocks by head, traced and static, sinks, soft cap": (
        lambda flags, table, sinks: dict(
            mask=ls.Blocks(table, 4) | ls.Global((1,), q_flags=flags, kv_flags=flags) | ls.Blocks(BLOCKS[::-1], 4),
            sinks=sinks,
            soft_cap=2.0,
        ),
        (FLAGS, BLOCKS, normal(N)),
        (ROWS, P("y"), P("y")),
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


# The cpu engine calls no Python functions. The reference, which XLA shards, is tested where its program differs.
BY_XLA = ("a rule and dropout by number", "a MaskInfo, alibi and a table by head")
RUNS = [(case, engine) for case in CASES for engine in RUNNING if engine != "reference" or case in BY_XLA]
RUNS.remove(("scores by number", "cpu"))


@pytest.mark.parametrize("case, engine", one_in(5, available(*RUNS)))
def test_every_device_computes_its_own_rows_and_heads(case, engine, on_one_device):
    of, operands, specs = CASES[case]
    mesh, here = mesh_of(), (HEADS, HEADS, HEADS)
    qkv = make_qkv(Shape(B, T, T, N, K, H), jnp.float32)
    placed = place(mesh, (qkv, *operands), (here, *specs))
    program = gradients(of, engine).lower(placed).compile()
    assert collectives(program) <= {"all-reduce"}  # the loss, and gradients of values that rows or heads share
    got = (_, (out, lse)), grads = program(placed)
    close(got, on_one_device(case))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 4)
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 3)
    for gradient in grads[:3]:
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 4)


@pytest.mark.check
@pytest.mark.parametrize(
    "engine, shape, rows, heads, kv",
    [
        ("cpu", (4, 1), "x", None, None),
        ("cpu", (1, 4), None, "y", "y"),
        ("xla", (2, 4), "x", "y", None),
        ("xla", (1, 2), None, "y", None),
        ("reference", (2, 4), "x", "y", None),
        ("reference", (1, 2), None, "y", None),
    ],
    ids=["rows", "heads", "two devices share a kv head", "torn groups", "shared, reference", "torn, reference"],
)
def test_any_rows_and_any_heads_may_be_split(engine, shape, rows, heads, kv):
    heads_of = {(4, 1): (4, 2), (1, 4): (8, 4), (2, 4): (8, 2), (1, 2): (6, 3)}[shape]
    q, k, v = make_qkv(Shape(B, T, T, *heads_of, H), jnp.float32)
    specs = (P(rows, None, heads), P(rows, None, kv), P(rows, None, kv))
    mesh = mesh_of(AxisType.Auto, *shape)
    placed = place(mesh, ((q, k, v), IDS), (specs, P(rows)))

    def of(ids):
        return dict(mask=ls.Causal() & ls.Segments(ids), dropout_rate=0.2, dropout_key=KEY)

    program = gradients(of, engine).lower(placed).compile()
    # The reference is plain JAX: where devices share a kv head, XLA gathers the gradient that it would have to sum.
    assert collectives(program) <= {"all-reduce", *(["all-gather"] if engine == "reference" else [])}
    close(program(placed), gradients(of, "reference")(((q, k, v), IDS)))
    if shape == (2, 4):
        forward = jax.jit(lambda operands: loss(of, engine, operands)[1]).lower(placed).compile()
        assert not collectives(forward)


@pytest.mark.check
def test_grouped_keys_have_all_derivatives():
    (q, k, v), at = make_qkv(Shape(2, 5, 5, 6, 3, H), jnp.float32), normal(2, 5, 3, H)

    def value(k, v):
        return jnp.sum(jnp.sin(ls.attention(q, k, v, mask=ls.Causal(), engine="reference")))

    def repeated(k):
        return value(*(jnp.repeat(x, 2, axis=2) for x in (k, v)))

    def derivatives(of):
        def slope(k):
            return jax.jvp(of, (k,), (at,))[1]

        def mapped(ks):
            return jax.vmap(jax.grad(of), in_axes=1)(ks)

        return jax.jit(lambda k: (jax.grad(of)(k), jax.grad(slope)(k), jax.jvp(jax.grad(slope), (k,), (at,)))), mapped

    (got, got_mapped), (want, want_mapped) = derivatives(lambda k: value(k, v)), derivatives(repeated)
    ks = jnp.stack([k, 2 * k], axis=1)
    close((got(k), got_mapped(ks)), (want(k), want_mapped(ks)))


EXPLICIT = [
    ("documents, lengths, windows and a bias by row", "xla"),
    ("documents, lengths, windows and a bias by row", "reference"),
    ("a planned layout, intervals by head, positions", "cpu"),
]


@pytest.mark.check
@pytest.mark.parametrize("case, engine", available(*EXPLICIT), ids=[engine for _, engine in EXPLICIT])
def test_explicit_axes_are_kept_in_types(case, engine, on_one_device):
    of, operands, specs = CASES[case]
    mesh = mesh_of(AxisType.Explicit)
    placed = place(mesh, (make_qkv(Shape(B, T, T, N, K, H), jnp.float32), *operands), ((HEADS, HEADS, HEADS), *specs))
    typed = []

    def run(operands):
        (_, (out, lse)), grads = result = gradients(of, engine)(operands)
        typed.extend(jax.typeof(x).sharding.spec for x in (out, lse, *grads[:3]))
        return result

    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(placed).compile()
    assert typed == [P("x", None, "y", None), P("x", None, "y"), *[P("x", None, "y", None)] * 3]
    assert collectives(program) <= {"all-reduce"}
    close(program(placed), on_one_device(case))


@pytest.mark.check
def test_mapped_calls_are_split_too():
    mesh = mesh_of()
    q, k, v = (jnp.stack([x, x + 1, x * 2]) for x in make_qkv(Shape(B, T, T, N, K, H), jnp.float32))
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, *HEADS))) for x in (q, k, v)]

    def run(q, k, v, engine="xla"):
        return jax.vmap(lambda *x: ls.attention(*x, mask=ls.Causal(), engine=engine))(q, k, v)

    program = jax.jit(run).lower(*placed).compile()
    assert not collectives(program)
    close(program(*placed), run(q, k, v, "reference"))


def test_a_users_rule_reads_all_rows_unless_it_declares_their_axis():
    mesh, (q, k, v) = mesh_of(), make_qkv(Shape(B, T, T, N, K, H), jnp.float32)
    placed = place(mesh, ((q, k, v), IDS), ((HEADS, HEADS, HEADS), ROWS))
    want = ls.attention(q, k, v, mask=ls.Segments(IDS), engine="reference")
    for kind, gathers in ((Mine, True), (MineByRow, False)):
        program = jax.jit(lambda o, kind=kind: ls.attention(*o[0], mask=kind(o[1]), engine="xla"))
        program = program.lower(placed).compile()
        assert ("all-gather" in collectives(program)) == gathers
        close(program(placed), want)


@rule
class Mine(ls.Mask):
    ids: Any

    def allowed(self, q, kv):
        return q.take(self.ids) == kv.take(self.ids)


@rule
class MineByRow(Mine):
    array_axes: ClassVar = {"ids": "BT"}


def test_bigbird_and_longformer_gather_nothing():
    mesh, length = mesh_of(), 40
    q, k, v = make_qkv(Shape(B, length, length, N, K, H), jnp.float32)
    kinds = rng.integers(-1, 2, (B, length)).astype(np.int32)
    blocks = ls.bigbird_random_blocks(length, block_size=4, num_random_blocks=1, num_heads=N, seed=0)
    placed = place(mesh, ((q, k, v), kinds), ((HEADS, HEADS, HEADS), ROWS))

    def bigbird(qkv, kinds, engine):
        masks = dict(q_mask=kinds >= 0, kv_mask=kinds >= 0)
        return ls.bigbird_attention(*qkv, block_size=4, rand_attn=blocks, **masks, engine=engine)

    def longformer(qkv, kinds, engine):
        return ls.longformer_attention(*qkv, *qkv, window=3, token_kinds=kinds, engine=engine)

    for pattern, engine, allowed in ((bigbird, "xla", set()), (longformer, "cpu", {"all-reduce"})):  # of one bit
        step = jax.jit(jax.value_and_grad(lambda *x, p=pattern: jnp.sin(p(*x)).sum()), static_argnums=2)
        program = step.lower(*placed, engine).compile()
        assert collectives(program) <= {"all-reduce"}
        close(program(*placed), step((q, k, v), kinds, "reference"))
        forward = jax.jit(pattern, static_argnums=2).lower(*placed, engine).compile()
        assert collectives(forward) <= allowed
