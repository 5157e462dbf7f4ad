"""The bytes of `explain` are those of the compiled program's collectives, with loops counted by their trips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.parallel.plan import jumps_home
from tests.parallel import hlo
from tests.selection import one_in

B, T, N, K, H = 1, 512, 4, 2, 8
ROW = 2 * K * H * 4  # one token's k and v, in float32
GATHER = 7 * (T // 8) * ROW
IDS, FLAGS = np.zeros((1, T), np.int32), np.zeros((1, T), bool)
RNG = np.random.default_rng(0)
ANYWHERE = RNG.integers(0, T // 4, (N, T // 4, 1))
NEAR = np.clip(np.arange(T // 4)[None, :, None] + RNG.integers(-24, 25, (N, T // 4, 1)), 0, T // 4 - 1)


def compiled(mask, order="contiguous", *, length=T, mesh=None, batch=B, backward=False, **more):
    """The compiled forward pass, or both passes, on eight devices unless a mesh is given."""
    mesh = mesh or ls.parallel.mesh(sp=8)
    here = NamedSharding(mesh, P("dp", "sp", "tp"))
    q, k = (jax.ShapeDtypeStruct((batch, length, n, H), jnp.float32, sharding=here) for n in (N, K))

    def forward(q, k, v, mask):
        return ls.parallel.attention(q, k, v, mask=mask, mesh=mesh, order=order, engine="cpu", **more)

    def both(q, k, v, mask, dout):
        return jax.vjp(lambda *x: forward(*x, mask), q, k, v)[1](dout)

    return (jax.jit(both).lower(q, k, k, mask, q) if backward else jax.jit(forward).lower(q, k, k, mask)).compile()


def report(mask, order="contiguous", *, length=T, mesh=None, batch=B, **more):
    mesh = mesh or ls.parallel.mesh(sp=8)
    q, k = (jax.ShapeDtypeStruct((batch, length, n, H), jnp.float32) for n in (N, K))
    return ls.explain(q, k, k, mask=mask, mesh=mesh, order=order, **more)


STATIC = {
    "window": (ls.Window(9, 5), "contiguous"),
    "window, zigzag": (ls.Window(9, 5), "zigzag"),
    "wide window": (ls.Window(200, 0), "contiguous"),
    "aligned chunks": (ls.Chunk(64), "contiguous"),
    "bounded documents": (ls.Segments(IDS) & ls.Window(20, 0), "contiguous"),
    "pinned columns": (ls.Causal() & (ls.Window(31, 0) | ls.Prefix(4)), "contiguous"),
    "global tokens": (ls.Window(16, 16) | ls.Global((0, 300)), "contiguous"),
    "causal": (ls.Causal(), "zigzag"),
    "pinned columns and documents": (
        ls.Causal() & (ls.Window(31, 0) | ls.Prefix(4)) & ls.Segments(IDS), "contiguous",
    ),
    "global tokens and documents, zigzag": (
        (ls.Window(16, 16) | ls.Global((0, 300))) & ls.Segments(IDS) & ls.TokenTypes(IDS), "zigzag",
    ),
    "blocks of everybody by head": (ls.Blocks(ANYWHERE, 4), "contiguous"),
    "blocks of everybody": (ls.Blocks(ANYWHERE[:1], 4), "contiguous"),
    "blocks of neighbours by head, and documents": (ls.Blocks(NEAR, 4) & ls.Segments(IDS), "contiguous"),
    "blocks that all list": (ls.Blocks(ANYWHERE % 5, 4), "contiguous"),
    "a bounded ring": (ls.Custom(lambda q, k: q == k) & ls.Window(150, 200), "contiguous"),
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(4, STATIC))
def test_a_program_sends_the_bytes_of_explain(name):
    mask, order = STATIC[name]
    said = report(mask, order)
    assert hlo.total(compiled(mask, order)) == said.sent_bytes
    both = compiled(mask, order, backward=True)
    assert hlo.total(both) == said.sent_bytes + said.sent_bytes_backward


@pytest.mark.check
def test_on_meshes_with_other_axes_too():
    mesh, mask = ls.parallel.mesh(dp=2, tp=2, sp=2), ls.Window(16, 16) | ls.Global((0, 300))
    said = report(mask, mesh=mesh, batch=2)
    both = compiled(mask, mesh=mesh, batch=2, backward=True)
    assert hlo.total(both) == said.sent_bytes + said.sent_bytes_backward


@pytest.mark.check
def test_on_six_devices_whose_shares_of_an_all_reduce_are_no_whole_numbers():
    mesh, mask = ls.parallel.mesh(sp=6), ls.Causal() & (ls.Window(31, 0) | ls.Prefix(5))
    said = report(mask, mesh=mesh, length=360)
    assert hlo.total(compiled(mask, mesh=mesh, length=360)) == said.sent_bytes == 5034
    both = compiled(mask, mesh=mesh, length=360, backward=True)
    assert hlo.total(both) == said.sent_bytes + said.sent_bytes_backward == 10069


def test_arrays_of_tokens_are_sent_as_the_keys_are_however_they_come():
    mask = STATIC["bounded documents"][0]
    assert report(mask).sent_bytes == 20 * (ROW + 4)
    there = jax.ShapeDtypeStruct((1, T), jnp.int32, sharding=NamedSharding(ls.parallel.mesh(sp=8), P(None, "sp")))
    split = ls.Segments(there) & ls.Window(20, 0)
    assert hlo.sent(compiled(split)) == {"collective-permute": report(mask).sent_bytes}


@pytest.mark.check
def test_dynamic_tables_send_their_capacity_or_all():
    mask = ls.Blocks(jnp.asarray(RNG.integers(0, 1024, (1, 1024, 1))), 1)
    said = report(mask, length=1024)
    assert "all-to-all" in str(said)
    assert "a device needs more than" in str(said)
    both = compiled(mask, length=1024, backward=True)
    assert hlo.total(both, branch=0) == said.sent_bytes + said.sent_bytes_backward


@pytest.mark.check
def test_devices_agree_on_the_ring_and_on_the_fallback():
    mask = (ls.Causal() & ls.Segments(IDS)) | ls.Global(kv_flags=FLAGS, rows=False)
    said = report(mask, global_capacity=2)
    forward = compiled(mask, global_capacity=2)
    assert hlo.total(forward, trips=7, branch=0) == said.sent_bytes


@pytest.mark.check
def test_other_bytes_that_xla_sends_are_named():
    odd = report(ls.Window(9, 5), length=509, mesh=ls.parallel.mesh(sp=4), sinks=jnp.zeros(N))
    assert (
        "not counted: replicating the output, because arrays of 509 tokens cannot be split evenly over 4 devices"
        in str(odd)
    )
    assert "If you pad the arrays with `ls.parallel.shard_batch`, the output stays sharded" in str(odd)
    assert "not counted: summing the gradients of sinks" in str(odd)
    repeated = report(ls.Window(9, 5), mesh=ls.parallel.mesh(tp=4, sp=2))
    assert "gradients of key/value heads, which are repeated 2 times" in str(repeated)
    assert "not counted" not in str(report(ls.Window(9, 5)))


def test_arrays_that_are_padded_as_advised_send_fewer_bytes():
    mesh, mask = ls.parallel.mesh(sp=4), ls.Window(9, 5)
    x = jnp.ones((1, 509, 2, 8))

    def bytes_of(x):
        run = jax.jit(lambda x: ls.parallel.attention(x, x, x, mask=mask, mesh=mesh))
        said = str(ls.explain(x, x, x, mask=mask, mesh=mesh))
        return hlo.total(run.lower(x).compile()), "cannot be split evenly over 4 devices" in said

    padded = ls.parallel.shard_batch(dict(x=x), mesh)["x"]
    (odd, said_of_odd), (even, said_of_even) = bytes_of(x), bytes_of(padded)
    assert even < odd and (said_of_odd, said_of_even) == (True, False)


@pytest.mark.check
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_a_ring_of_documents_sends_as_many_shards_as_they_reach(order):
    mask = ls.Causal() & ls.Segments(IDS)
    forward, both = (compiled(mask, order, backward=backward) for backward in (False, True))
    shard, agreed, ids = T // 8 * ROW, 2 * 8 * 7 // 8, 7 * T // 8 * 4
    for reach in (0, 2, 7):
        assert hlo.sent(forward, trips=reach)["collective-permute"] == reach * shard
        home = jumps_home(reach + 1, 8) if reach else 0
        # Keys twice, gradients once; then home, if they are not.
        assert hlo.sent(both, trips=reach, branch=0)["collective-permute"] == 3 * reach * shard
        most = report(mask, order)
        assert (3 * reach + home) * shard + agreed <= most.sent_bytes + most.sent_bytes_backward
    assert hlo.sent(forward, trips=7)["all-reduce"] == agreed
    assert hlo.sent(forward, trips=7)["all-gather"] == ids
    assert report(mask, order).sent_bytes == 7 * shard + agreed + ids


@pytest.mark.check
def test_flags_send_their_capacity():
    mask = ls.Window(8, 8) | ls.Global(q_flags=FLAGS, kv_flags=FLAGS)
    said, both = report(mask, global_capacity=5), compiled(mask, global_capacity=5, backward=True)
    assert hlo.total(both, branch=0) == said.sent_bytes + said.sent_bytes_backward
    assert any("if more than 5 tokens are global: " in line for line in said.sending)


def test_the_bytes_sent_are_near_the_lower_bound():
    window, pinned, tokens = (STATIC[name][0] for name in ("window", "pinned columns", "global tokens"))
    assert report(window).sent_bytes <= 1.05 * report(window).bound_bytes
    assert report(pinned).sent_bytes <= 1.3 * report(pinned).bound_bytes
    assert report(ls.Chunk(64)).sent_bytes == 0
    few = report(ls.Window(2, 2) | ls.Global((0, 300)))
    assert few.sent_bytes < 0.1 * GATHER == 0.1 * few.gather_bytes
    for mask in (window, pinned, tokens):
        assert report(mask).sent_bytes == report(mask, length=64 * T).sent_bytes


@pytest.mark.check
@pytest.mark.parametrize(
    "mask",
    [
        lambda T: ls.Window(9, 5),
        lambda T: ls.Causal() & (ls.Window(31, 0) | ls.Prefix(4)) & ls.Segments(np.zeros((1, T), np.int32)),
    ],
    ids=["window", "pinned columns and documents"],
)
def test_a_longer_sequence_sends_no_more(mask):
    assert hlo.sent(compiled(mask(T))) == hlo.sent(compiled(mask(4 * T), length=4 * T))


def test_explain_prints_order_load_transfers_and_the_worst_case():
    text = str(report(ls.Causal() & ls.Segments(IDS), "zigzag"))
    assert "8 share the sequence, zigzag, 64 tokens each; load max/mean depends on the mask's arrays" in text
    assert "ring of 7 shards: 448 rows" in text
    assert "in the worst case, because the mask's arrays or the given positions decide how many shards are sent" in text
    assert "ids, flags and positions of the received tokens: 1,792 B forward" in text
    text = str(report(ls.Dense(np.zeros((T, T), bool))))
    assert "the mask's tables are replicated, which sends 229,376 B if they are sharded before the call" in text
    text = str(report(ls.Window(9, 5)))
    assert "shift +1: 9 rows, keys from the device before: 1,152 B forward, 1,152 B backward" in text
    assert "each device receives " in text and "  the mask requires " in text
    assert "nothing" in str(report(ls.Chunk(64)))
    assert ls.explain(*[jax.ShapeDtypeStruct((1, 8, 1, 4), jnp.float32)] * 3).sent_bytes is None
