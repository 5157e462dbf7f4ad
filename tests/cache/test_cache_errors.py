"""Calls that a cache refuses with a message, or marks as `overflowed` inside jit, where it cannot raise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("unchecked")]

WINDOW = ls.Causal() & ls.Window(3, 0)
PLAN = ls.cache.plan(WINDOW, 20, slack=1)


def empty(plan=PLAN, batch=2):
    return ls.cache.init(plan, batch, 3, 5, jnp.float32, v_head_dim=4)


def new(count=1, batch=2):
    return jnp.ones((batch, count, 3, 5)), jnp.ones((batch, count, 3, 4))


def after(count, plan=PLAN):
    return empty(plan).append(*new(count))[0]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        ((3, 1, 3, 5), (3, 1, 3, 4), r"`k` must have shape \[B, n, K, H\] with this cache's B, K and H = 2, 3 and 5"),
        ((2, 1, 2, 5), (2, 1, 2, 4), r"`k` must have .* got \(2, 1, 2, 5\)"),
        ((2, 1, 3, 5), (2, 1, 3, 5), r"`v` must have .* 2, 3 and 4, got \(2, 1, 3, 5\)"),
        ((2, 3, 5), (2, 1, 3, 4), r"`k` must have .* got \(2, 3, 5\)"),
        ((2, 2, 3, 5), (2, 1, 3, 4), "same number of new tokens, at least one, got 2 and 1"),
        ((2, 0, 3, 5), (2, 0, 3, 4), "same number of new tokens, at least one, got 0 and 0"),
    ],
)  # fmt: skip
def test_rows_heads_and_sizes_that_differ_are_refused(k, v, message):
    with pytest.raises(ValueError, match=message):
        empty().append(jnp.ones(k), jnp.ones(v))


def test_the_order_of_heads_and_slots_is_a_bool_and_that_of_arguments_is_fixed():
    for order, shown in ((1, "got 1"), (None, "got None"), (jnp.array(True), r"got bool\[\]")):
        with pytest.raises(TypeError, match="`heads_first` must be True or False, a Python bool, " + shown):
            ls.cache.init(PLAN, 2, 3, 5, jnp.float32, heads_first=order)  # type: ignore[arg-type]
    cache = ls.cache.init(PLAN, 2, 3, 5, jnp.float32, v_head_dim=4, heads_first=True)
    k, v = new(count=7)
    with pytest.raises(ValueError, match=r"`k` must have shape \[B, n, K, H\] .* 2, 3 and 5, got \(2, 3, 7, 5\)"):
        cache.append(k.swapaxes(1, 2), v.swapaxes(1, 2))


def test_arguments_that_are_not_float_arrays_are_refused():
    k, v = new()
    with pytest.raises(TypeError, match=r"`k` must be an array \[B, n, K, H\], got list"):
        empty().append([1.0], v)
    with pytest.raises(TypeError, match=r"`v` must be one of float16, .*, got int32"):
        empty().append(k, v.astype(int))
    with pytest.raises(TypeError, match=r"`dtype` must be one of float16, .*, got int32"):
        ls.cache.init(PLAN, 1, 1, 1, jnp.int32)
    with pytest.raises(TypeError, match=r"`plan` must be a CachePlan from .*, got And"):
        ls.cache.init(WINDOW, 1, 1, 1, jnp.float32)
    with pytest.raises(ValueError, match="`v_head_dim` must be a Python int >= 1, got 0"):
        ls.cache.init(PLAN, 1, 1, 1, jnp.float32, v_head_dim=0)


def test_lengths_beyond_the_chunk_are_refused_and_marked_inside_jit():
    for lengths in ([2, 4], [-1, 2]):
        with pytest.raises(ValueError, match=r"`lengths` must lie between 0 and the 3 tokens .* got \["):
            empty().append(*new(3), np.array(lengths))
    for lengths in ([1, 2], 2, np.array([1]), np.array([1.0, 2.0])):
        with pytest.raises(ValueError, match=r"`lengths` must be ints of shape \[2\], one per row, got"):
            empty().append(*new(3), lengths)
    append = jax.jit(lambda cache, lengths: cache.append(*new(3), lengths)[0])
    for lengths in ([2, 4], [2, -1]):
        cache = append(empty(), jnp.array(lengths))
        assert cache.overflowed.tolist() == [False, True] and cache.length.tolist() == [2, 0]


def test_more_positions_than_planned_are_refused_and_marked_inside_jit():
    cache = after(19)
    with pytest.raises(ValueError, match=r"planned for 20 positions, but a row would have 21. Plan a longer one"):
        cache.append(*new(2))
    ragged, _ = jax.jit(lambda c, n: c.append(*new(2), n))(cache, jnp.array([1, 2]))
    assert ragged.overflowed.tolist() == [False, True] and ragged.length.tolist() == [20, 19]
    for name in ("k", "v", "positions"):
        np.testing.assert_array_equal(getattr(ragged, name)[1], getattr(cache, name)[1])
    more, _ = jax.jit(lambda c: c.append(*new(1)))(ragged)
    assert more.overflowed.tolist() == [True, True], "once marked, a row stays marked"


@pytest.mark.parametrize(
    ("mask", "ends"), [(ls.Causal() | ls.Prefix(5), [5, 6, 7, 8]), (ls.Chunk(4), [4, 8, 20])], ids=repr
)
def test_tied_positions_come_in_one_append(mask, ends):
    plan = ls.cache.plan(mask, 20)
    append = jax.jit(lambda cache, lengths: cache.append(*new(20), lengths)[0])
    for n in range(1, 9):
        if n in ends:
            assert after(n, plan).length.tolist() == [n, n]
        else:
            with pytest.raises(ValueError, match=rf"lets position {n - 1} attend to position {n}, so both must"):
                after(n, plan)
        assert append(empty(plan), jnp.array([n, ends[0]])).overflowed.tolist() == [n not in ends, False]


def test_rollbacks_between_tied_positions_are_refused():
    plan = ls.cache.plan(ls.Causal() | ls.Prefix(5), 20)
    cache = after(7, plan)
    assert cache.rollback(2).length.tolist() == [5, 5] and cache.rollback(7).length.tolist() == [0, 0]
    with pytest.raises(
        ValueError, match="lets position 3 attend to position 4, so a rollback must keep both or remove both"
    ):
        cache.rollback(3)
    assert jax.jit(lambda c, n: c.rollback(n))(cache, jnp.array([3, 2])).overflowed.tolist() == [True, False]


def test_rollbacks_beyond_the_slack_are_refused_and_name_the_needed_slack():
    cache = after(12)
    with pytest.raises(ValueError, match="`n` must be at least 0, got -1"):
        cache.rollback(-1)
    with pytest.raises(
        ValueError,
        match=r"Row 1 cannot be rolled back to 9 tokens: it once held 12, .*=1 .* to 11 or more. Plan with `slack=3`",
    ):
        cache.rollback(np.array([1, 3]))
    with pytest.raises(ValueError, match="Row 0 has 12 tokens, so 13 cannot be rolled back"):
        cache.rollback(13)
    with pytest.raises(ValueError, match="Row 0 has 12 tokens, so 100 cannot"):
        cache.rollback(100)
    with pytest.raises(ValueError, match="Row 0 has 12 tokens"):
        cache.rollback(2**40)
    for n in (1.0, np.ones(3, int), True, "1"):
        with pytest.raises(ValueError, match=r"`n` must be an int, or ints of shape \[2\], one per row, got"):
            cache.rollback(n)
    with pytest.raises(ValueError, match="`n` must be at least 0, got -2"):
        jax.jit(lambda cache: cache.rollback(-2))(cache)  # an int is known inside jit, too
    back = jax.jit(lambda cache, n: cache.rollback(n))
    for n in ([3, 1], [-1, 1], [2**31 - 1, 1]):
        traced = back(cache, jnp.array(n))
        assert traced.overflowed.tolist() == [True, False] and traced.length.tolist() == [12, 11]


def test_a_cache_that_keeps_everything_can_go_back_to_its_beginning():
    cache = after(12, ls.cache.plan(ls.Causal(), 20))
    assert cache.rollback(np.array([12, 3])).length.tolist() == [0, 9]


def test_rows_of_a_fork_are_checked_and_marked_inside_jit():
    cache = after(3)
    for rows in (np.array([0, 2]), np.array([-1])):
        with pytest.raises(ValueError, match="`rows` must lie between 0 and 1, got"):
            cache.fork(rows)
    for rows in ([0], np.array(0), np.array([0.0])):
        with pytest.raises(ValueError, match=r"`rows` must be ints of shape \[n\], got"):
            cache.fork(rows)
    forked = jax.jit(lambda cache, rows: cache.fork(rows))(cache, jnp.array([1, 2, -1]))
    assert forked.overflowed.tolist() == [False, True, True]
    assert np.isfinite(forked.k).all()


def test_a_mask_that_allows_more_than_the_planned_one_is_refused_and_a_narrower_one_works():
    _, view = empty().append(*new(6))
    needs, sees = (
        r"Causal\(\) & Window\(3, 0\), which needs key 0 until query 3",
        r"With Causal\(\), later queries up to 19 may attend to key 0",
    )
    with pytest.raises(ValueError, match=rf"planned for {needs}. {sees}. Plan the cache with the mask of the call"):
        view.of(ls.Causal())
    with pytest.raises(ValueError, match="later queries up to 4 may attend to key"):
        view.of(ls.Causal() & ls.Window(4, 0))
    with pytest.raises(ValueError, match=r"lets queries attend to later keys. These keys must be appended together"):
        view.of(ls.Window(3, 1))
    with pytest.raises(TypeError, match="`mask` must be a Mask, got MaskInfo"):
        view.of(ls.MaskInfo.from_random(2, 20, 20))
    narrow = view.of(ls.Causal() & ls.Window(1, 0) & ls.Segments(np.zeros((2, 20), int)))
    assert ls.attention(jnp.ones((2, 6, 3, 5)), **narrow, engine="reference").shape == (2, 6, 3, 4)


def test_arrays_of_other_lengths_and_batches_are_refused():
    _, view = empty().append(*new(6))
    with pytest.raises(ValueError, match=r"Segments.q_ids covers 6 queries, but the call has 20"):
        view.of(WINDOW & ls.Segments(np.zeros((2, 6), int)))
    with pytest.raises(ValueError, match=r"Segments.q_ids has 3 batch rows, but the call has 2"):
        view.of(WINDOW & ls.Segments(np.zeros((3, 20), int)))
    with pytest.raises(ValueError, match=r"KvLengths.lengths has 3 batch rows, but the call has 2"):
        view.of(WINDOW & ls.KvLengths(np.zeros(3, int)))
