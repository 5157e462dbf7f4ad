"""`Custom`: functions of positions, rows and heads as masks, and the tiles that their bounds skip."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.engines import ENGINES
from longspan.layout import count, plan_layout
from longspan.masks import Mask, rule
from longspan.testing import Shape, assert_matches_reference, assert_obeys_laws, make_qkv
from tests.selection import one_in

SHAPE = Shape(B=3, T=37, S=29, N=4, K=2, H=5)
B, T, S, N, K, H, _ = SHAPE


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def by_row_and_head(b, h, q, k):
    return (k <= q + b) & (q - k <= 3 * h + 1)


def bounds_by_row_and_head(b, h, q, kv):
    low, high = q.first - kv.last, q.last - kv.first
    return (high >= -b) & (low <= 3 * h + 1), (low >= -b) & (high <= 3 * h + 1)


def far(q, kv, *ends):
    """Exact bounds of q - k in any of some intervals [low, high]."""
    low, high = q.first - kv.last, q.last - kv.first
    some, every = ([test(a, z) for a, z in ends] for test in (
        lambda a, z: (high >= a) & (low <= z), lambda a, z: (low >= a) & (high <= z)
    ))  # fmt: skip
    return sum(some[1:], some[0]), sum(every[1:], every[0])


def plain(fn, batch=B, heads=N):
    """The truth of a function of (b, h, q, k), pair by pair."""
    truth = np.zeros((batch, heads, T, S), bool)
    for place in np.ndindex(*truth.shape):
        truth[place] = fn(*place)
    return truth


@pytest.fixture(params=ENGINES)
def engine(request):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    reason = ENGINES[request.param].unsupported(ls.engines.Request.of(q=q, k=k, v=v, mask=ls.Causal()))
    if reason is not None:
        pytest.skip(reason)
    return request.param


def test_a_mask_function_of_flex_attention_runs_unchanged_as_one_mask(engine):
    mask, (q, k, v) = ls.Custom(causal), make_qkv(SHAPE, jnp.float32)
    assert mask.dense(T, S).shape == (1, 1, T, S)
    assert mask == ls.Custom(causal, batch=1, heads=1) and repr(mask) == "Custom(causal)"
    two = ls.Custom(lambda q, k: q >= k)
    for what in ("temporary_bytes", "tiles_total", "dense_mask_bytes"):
        mine, others = (getattr(ls.explain(q, k, v, mask=m, engine=engine), what) for m in (mask, two))
        assert mine == others
    got, want = (ls.attention(q, k, v, mask=m, engine=engine) for m in (mask, ls.Causal()))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("heads", [1, N])
@pytest.mark.parametrize("bounds", [None, bounds_by_row_and_head], ids=["no bounds", "bounds"])
def test_distinct_rows_and_heads_have_distinct_masks(batch, heads, bounds):
    mask = ls.Custom(by_row_and_head, batch=batch, heads=heads, bounds=bounds)
    expected = plain(lambda b, h, q, k: by_row_and_head(b if batch > 1 else 0, h if heads > 1 else 0, q, k))
    np.testing.assert_array_equal(np.broadcast_to(mask.dense(T, S), expected.shape), expected)
    assert mask.dense(T, S).shape[:2] == (batch, heads) == (mask.batch, mask.heads)
    picture = "\n".join("".join(".#"[int(x)] for x in row) for row in expected[min(2, batch - 1), min(3, heads - 1)])
    assert mask.show(T, S, batch=2, head=3) == picture
    assert count(plan_layout(mask, T, S, 8, 4, xp=np)).pairs == expected[:batch, :heads].sum()
    assert_obeys_laws(mask, T, S)
    assert_obeys_laws(mask, T, S, q_positions=np.arange(T)[::-1] // 2, kv_positions=np.arange(S) * 2)


@pytest.mark.parametrize("bounds", [None, bounds_by_row_and_head], ids=["no bounds", "bounds"])
@pytest.mark.parametrize("sizes", one_in(3, [pytest.param(s, id=str(s)) for s in ((B, N), (1, N), (B, 1))]))
def test_engines_distinguish_rows_and_heads_in_both_passes(engine, sizes, bounds):
    mask = ls.Custom(by_row_and_head, batch=sizes[0], heads=sizes[1], bounds=bounds)
    q, k, v = make_qkv(SHAPE, jnp.float32)
    assert_matches_reference(engine, q, k, v, mask.layout(T, S, q_tile=8, kv_tile=4))
    expected = plain(lambda b, h, q, k: by_row_and_head(b * (sizes[0] > 1), h * (sizes[1] > 1), q, k))
    got, want = (ls.attention(q, k, v, mask=m, engine=engine) for m in (mask, jnp.asarray(expected)))
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)


def test_head_indices_are_the_same_inside_per_head_and_compositions(engine):
    own = ls.Custom(by_row_and_head, batch=B, heads=N, bounds=bounds_by_row_and_head)
    mask = ls.PerHead((own, ls.Window(3, 3), own & ls.Chunk(8), ~own)) & ls.KvLengths(np.array([29, 7, 20]))

    def truth(b, h, q, k):
        mine = by_row_and_head(b, h, q, k)
        return (mine, abs(q - k) <= 3, mine and q // 8 == k // 8, not mine)[h] and k < (29, 7, 20)[b]

    np.testing.assert_array_equal(mask.dense(T, S), plain(truth))
    assert_matches_reference(engine, *make_qkv(SHAPE, jnp.float32), mask)


def test_cutting_slots_keeps_rows_heads_and_bounds():
    mask = ls.Custom(by_row_and_head, batch=B, heads=N, bounds=bounds_by_row_and_head) & ls.KvLengths(np.full(B, 20))
    slots = np.array([1, 5, 30])
    cut = mask.cut(slots)
    np.testing.assert_array_equal(cut.dense(3, S, q_positions=slots), mask.dense(T, S)[:, :, slots])


def test_vmap_numbers_the_rows_of_each_example(engine):
    q, k, v = (jnp.stack([x, x[::-1]]) for x in make_qkv(SHAPE, jnp.float32))
    shifts = jnp.array([0, 5])

    def loss(q, k, v, shift, engine):
        mask = ls.Custom(lambda b, h, q, k, far: (k <= q + b) & (q - k <= h + far), shift, batch=B, heads=N)
        return jnp.sum(ls.attention(q, k, v, mask=mask, engine=engine) ** 2)

    got, want = (jax.vmap(jax.value_and_grad(partial(loss, engine=e)))(q, k, v, shifts) for e in (engine, "reference"))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.mesh
@pytest.mark.parametrize("bounds", [None, bounds_by_row_and_head], ids=["no bounds", "bounds"])
def test_a_sharded_batch_has_global_rows_and_heads(engine, bounds):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    q, k, v = make_qkv(Shape(B=4, T=37, S=29, N=4, K=2, H=5), jnp.float32)
    mask = ls.Custom(by_row_and_head, batch=4, heads=4, bounds=bounds)
    run = jax.jit(partial(ls.attention, mask=mask, engine=engine))
    there = NamedSharding(mesh, P("x", None, "y"))
    got = run(*(jax.device_put(x, there) for x in (q, k, v)))
    want = ls.attention(q, k, v, mask=mask.dense(37, 29), engine="reference")
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)


@pytest.mark.mesh
def test_inside_shard_map_rows_are_the_shards_and_the_first_is_given_as_data(engine):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    q, k, v = make_qkv(Shape(B=8, T=37, S=29, N=4, K=2, H=5), jnp.float32)

    def local(q, k, v):
        first = 2 * jax.lax.axis_index("x")
        mask = ls.Custom(lambda b, h, q, k, first: by_row_and_head(b + first, h, q, k), first, batch=2, heads=4)
        return ls.attention(q, k, v, mask=mask, engine=engine)

    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(q, k, v)
    whole = ls.Custom(by_row_and_head, batch=8, heads=4)
    np.testing.assert_allclose(got, ls.attention(q, k, v, mask=whole, engine="reference"), rtol=0, atol=5e-6)


def test_required_parameters_decide_the_form_of_a_function():
    same = np.asarray(ls.Causal().dense(T, S))
    width = np.array(3)
    for mask in (
        ls.Custom(lambda q, k, far=0: q >= k + far),
        ls.Custom(lambda q, k, *rest: q >= k),
        ls.Custom(lambda *given: given[0] >= given[1]),
        ls.Custom(lambda b, h, q, k, far=0: q >= k + far),
        ls.Custom(lambda b, h, q, k, *rest: q >= k),
        ls.Custom(lambda q, k, w: (q >= k) & (w == 3), width),
        ls.Custom(lambda b, h, q, k, w: (q >= k) & (w == 3), width),
        ls.Custom(lambda q, k, w, z: (q >= k) & (w == z), width, width),
        ls.Custom(np.greater_equal),
        ls.Custom(jnp.greater_equal),
        ls.Custom(partial(causal, None, None)),
    ):
        np.testing.assert_array_equal(np.asarray(mask.dense(T, S)), same)


def test_functions_that_fit_both_forms_or_none_are_errors():
    one = np.zeros(3)
    none = "With 0 arrays, the function must take 2 parameters, `(q, k)`, or 4, `(b, h, q, k)`"
    single = "With 1 array, the function must take 3 parameters, `(q, k, array)`, or 5, `(b, h, q, k, array)`"
    pair = "With 2 arrays, the function must take 4 parameters, `(q, k, array1, array2)`, or 6, `(b, h, q, k, array1,"
    for fn, arrays, message in (
        (lambda q: q, (), f"takes at most 1 parameter. {none}"),
        (lambda b, q, k: q >= k, (), f"has 3 required parameters. {none}"),
        (lambda b, h, q, k, w, *rest: q >= k, (), f"has 5 required parameters. {none}"),
        (lambda q, k: q >= k, (one,), f"takes at most 2 parameters. {single}"),
        (lambda b, h, q, k, w: q >= k, (one, one), f"has 5 required parameters. {pair}"),
    ):
        with pytest.raises(TypeError, match=re.escape(f"Custom.fn: <lambda> {message}")):
            ls.Custom(fn, *arrays)
    with pytest.raises(
        TypeError, match=r"accepts both `\(q, k, array1, array2\)` and `\(b, h, q, k, array1, array2\)`, so it is"
    ):
        ls.Custom(lambda b, h, q, k, *rest: q >= k, one, one)
    with pytest.raises(TypeError, match=r"Custom.bounds: .* must take"):
        ls.Custom(causal, bounds=lambda q: (True, False))
    with pytest.raises(ValueError, match=r"Custom.heads is 4, but the function takes only positions"):
        ls.Custom(lambda q, k: q >= k, heads=4)
    with pytest.raises(ValueError, match=r"Custom.batch must be a Python int >= 1, got 0"):
        ls.Custom(causal, batch=0)


NUMBERS = {
    "floats": (lambda q, k: -0.5 * abs(q - k).astype(np.float32), "the function must return bools, got float32"),
    "ints": (lambda q, k: -abs(q - k), "the function must return bools, got int32"),
    "an array of ints": (
        lambda q, k: jnp.arange(40)[q] - jnp.arange(40)[k],
        "the function must return bools, got int32",
    ),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_function_that_returns_numbers_is_an_error(kind):
    """Otherwise a bias given as a mask would allow every pair whose number is not 0."""
    fn, words = NUMBERS[kind]
    q, k, v = make_qkv(SHAPE, jnp.float32)
    mask = ls.Custom(fn)
    calls = [lambda: mask.dense(9, 9), lambda: (~mask).show(9, 9), lambda: (mask & ls.Causal()).dense(9, 9)]
    for engine in ("cpu", "xla", "reference"):
        calls.append(lambda engine=engine: ls.attention(q, k, v, mask=mask, engine=engine))
        calls.append(lambda engine=engine: jax.jit(lambda q: ls.attention(q, k, v, mask=mask, engine=engine))(q))
    for call in calls:
        with pytest.raises(TypeError) as caught:
            call()
        assert words in str(caught.value) and "`bias=ls.ScoreBias(fn)`" in str(caught.value)


def test_bounds_must_return_bools():
    mask = ls.Custom(lambda q, k: q >= k, bounds=lambda q, kv: (q.last - kv.first + 1, q.first >= kv.last))
    with pytest.raises(TypeError, match="`bounds` must return bools, got int32"):
        mask.layout(9, 9)
    certain = ls.Custom(lambda q, k: (q >= 0) | (k >= 0), bounds=lambda q, kv: (True, np.True_))
    assert certain.layout(9, 9).visits() == 1


def test_a_users_mask_that_returns_numbers_is_an_error():
    """`&` of ints combines bits: 2 & True is 0."""

    @rule
    class Twice(Mask):
        def allowed(self, q, kv):
            return 2 * (q.position >= kv.position).astype(np.int32)

    for mask in (Twice(), Twice() & ls.Causal(), ~Twice()):
        with pytest.raises(TypeError, match=r"Twice\(\): `allowed` must return bools, got int"):
            mask.dense(5, 5)


def test_rows_and_heads_are_one_or_the_calls():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    with pytest.raises(ValueError, match=r"Custom.batch has 2 batch rows, but the call has 3. Give 1 or 3"):
        ls.attention(q, k, v, mask=ls.Custom(by_row_and_head, batch=2))
    with pytest.raises(ValueError, match=r"Custom.heads has 3 query heads, but the call has 4"):
        ls.attention(q, k, v, mask=ls.Custom(by_row_and_head, heads=3))


def near(q, kv):
    return far(q, kv, (-300, 300))


BOUNDED = {
    "window": (ls.Custom(lambda q, k: abs(q - k) <= 300, bounds=near), ls.Band(-300, 300)),
    "jax.numpy": (
        ls.Custom(lambda q, k: jnp.abs(q - k) <= 300, bounds=lambda q, kv: tuple(map(jnp.asarray, near(q, kv)))),
        ls.Band(-300, 300),
    ),
    "two": (
        ls.Custom(
            lambda q, k: ((q - k >= 0) & (q - k < 9)) | ((q - k >= 4000) & (q - k < 4500)),
            bounds=lambda q, kv: far(q, kv, (0, 8), (4000, 4499)),
        ),
        ls.Window(8, 0) | ls.Band(-4499, -4000),
    ),
}


@pytest.mark.parametrize("length", [8192, 100_001, 1_000_000])
@pytest.mark.parametrize("name", BOUNDED)
def test_exact_bounds_visit_the_tiles_of_the_built_in_mask(name, length):
    mine, built_in = BOUNDED[name]
    for transposed in (False, True):
        layouts = [plan_layout(m, length, length, 128, 128, xp=np) for m in (mine, built_in)]
        got, want = (layout.transpose() if transposed else layout for layout in layouts)
        assert got.visits() == want.visits()


def test_gaps_beyond_the_maximum_of_intervals_are_left_to_classify():
    def six(q, kv):
        return far(q, kv, *((n * 1000, n * 1000) for n in range(6)))

    mask = ls.Custom(lambda q, k: ((q - k) % 1000 == 0) & (q >= k) & (q - k <= 5000), bounds=six)
    layout = plan_layout(mask, 8192, 8192, 16, 16, xp=np)
    counts = count(layout)
    assert layout.starts.shape[3] == 4
    assert counts.partial + counts.full < layout.visits() < 0.6 * 512 * 513 / 2
    assert_obeys_laws(mask, 67, 67)


def test_bounds_of_traced_arrays_skip_on_the_xla_engine():
    q, k, v = make_qkv(Shape(1, 2048, 2048, 1, 1, 4), jnp.float32)

    @jax.jit
    def visits(width):
        mask = ls.Custom(lambda q, k, w: abs(q - k) <= w, width, bounds=lambda q, kv, w: far(q, kv, (-w, w)))
        layout = mask.layout(2048, 2048)
        return jnp.maximum(layout.stops - layout.starts, 0).sum(), ls.attention(q, k, v, mask=layout, engine="xla")

    for width in (0, 200):
        got, out = visits(jnp.asarray(width))
        assert got == ls.Window(width, width).layout(2048, 2048).visits()
        want = ls.attention(q, k, v, mask=ls.Window(width, width), engine="xla")
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)


def test_bits_are_stored_only_for_the_tiles_that_bounds_allow():
    x = jax.ShapeDtypeStruct((1, 65536, 1, 8), jnp.float32)
    (mine, _), ids = BOUNDED["window"], jax.ShapeDtypeStruct((1, 65536), jnp.int32)
    try:
        needed = [ls.explain(x, x, x, mask=m, engine="cpu").temporary_bytes for m in (mine, mine & ls.Segments(ids))]
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    assert all(n <= 512 * 7 * 128 * 128 // 8 for n in needed)
