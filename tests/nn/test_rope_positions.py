"""`rope_positions`: rotations by other positions than the mask's, in linen and NNX modules."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from test_rope_modules import OWN, POSITIONS, YARN, B, D, H, K, T, X, by_hand, runs

import longspan as ls
from longspan.engines import ENGINES, Engine

pytestmark = pytest.mark.check

IDS = np.repeat([[0, 1, 2, -1], [5, 5, 3, 3]], [5, 4, 4, 3], axis=1)
PACKED = np.asarray(ls.positions_from_segments(IDS))
MASK = ls.Causal() & ls.Window(4, 0) & ls.Segments(IDS)


class Noting(Engine):
    """The reference engine, which records the number of tiles to visit."""

    name = "noting"

    def __init__(self):
        self.visits = []

    def unsupported(self, request):
        places = dict(q_positions=request.q_positions, kv_positions=request.kv_positions)
        lengths = (request.dims["T"], request.dims["S"])
        self.visits.append(request.mask.layout(*lengths, q_tile=2, kv_tile=2, **places).visits())

    def run(self, request, layout):
        return ENGINES["reference"].run(request, layout)


def test_packed_rows_give_what_positions_give_with_fewer_tiles():
    engine = Noting()
    for run in runs("SelfAttention", rope=YARN, engine=engine)[:2]:
        want = run(X, mask=MASK, positions=PACKED)
        np.testing.assert_allclose(run(X, mask=MASK, rope_positions=PACKED), want, rtol=0, atol=2e-5)
    by_position, by_slot = engine.visits[-2:]
    assert by_slot < by_position


def test_the_mask_of_packed_rows_visits_a_third_less_by_slot():
    ids = np.repeat(np.arange(6), [200] * 5 + [24])[None]
    mask, positions = ls.Causal() & ls.Segments(ids), ls.positions_from_segments(ids)
    by_slot = mask.layout(1024, 1024).visits()
    by_position = mask.layout(1024, 1024, q_positions=positions, kv_positions=positions).visits()
    assert 1.4 * by_slot < by_position


def test_the_mask_goes_by_slots_or_by_positions_of_its_own():
    mask = ls.Causal() & ls.Window(4, 0)
    *calls, params = runs("SelfAttention", rope=YARN)
    for run in calls:
        # The distances are those of slots, so the result is that of rotations by slots.
        got = run(X, mask=mask, rope_positions=np.arange(T) + 100)
        np.testing.assert_allclose(got, by_hand(params, np.arange(T)), rtol=0, atol=2e-5)
        # The mask compares `positions`; the rotation uses others with the same distances.
        got = run(X, mask=mask, positions=POSITIONS, rope_positions=POSITIONS + 7)
        np.testing.assert_allclose(got, by_hand(params, POSITIONS), rtol=0, atol=2e-5)
        other = run(X, mask=mask, positions=POSITIONS, rope_positions=np.arange(T))
        assert np.abs(other - got).max() > 0.01


def test_they_replace_the_positions_of_a_bound_mask_in_the_rotation():
    layout = ls.Causal().layout(T, T, q_positions=PACKED, kv_positions=PACKED)
    for run in runs("SelfAttention", rope=YARN)[:2]:
        want = run(X, mask=ls.Causal(), positions=PACKED, rope_positions=np.arange(T))
        np.testing.assert_allclose(run(X, mask=layout, rope_positions=np.arange(T)), want, rtol=0, atol=2e-5)
        assert np.abs(run(X, mask=layout) - want).max() > 0.001


@pytest.mark.parametrize("rows", [slice(None), 1], ids=["by row", "for all rows"])
def test_new_tokens_of_a_cache_are_rotated_by_them(rows):
    mask = ls.Causal() & ls.Window(6, 0)
    at = PACKED[rows]
    for run in runs("SelfAttention", rope=YARN)[:2]:
        whole = run(X, mask=mask, rope_positions=at)
        assert np.abs(whole - run(X, mask=mask)).max() > 0.001
        cache, parts = ls.cache.init(ls.cache.plan(mask, T), B, K, H, jnp.float32), []
        for start, stop in ((0, 14), (14, 15), (15, T)):
            out, cache = run(X[:, start:stop], cache=cache, rope_positions=at[..., start:stop])
            parts.append(out)
        np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["LongformerSelfAttention", "BigBirdSelfAttention"])
def test_where_masks_go_by_slots_they_are_what_positions_are(name):
    for run in runs(name, rope=YARN)[:2]:
        np.testing.assert_array_equal(run(X, rope_positions=POSITIONS), run(X, positions=POSITIONS))
        text = "`positions` and `rope_positions` were both given. In this module both set the positions for `rope`"
        with pytest.raises(ValueError, match=re.escape(text)):
            run(X, positions=POSITIONS, rope_positions=POSITIONS)


@pytest.mark.parametrize("name", OWN)
def test_without_rope_they_are_refused(name):
    text = (
        "`rope_positions` are used only with `rope`, which this module does not have. Give `rope`, or leave "
        "`rope_positions` out."
    )
    for run in runs(name)[:2]:
        with pytest.raises(ValueError, match=re.escape(text)):
            run(X, rope_positions=POSITIONS)
        run(X, rope_positions=POSITIONS, rope=ls.rope.frequencies(YARN, H))


def test_positions_with_a_cache_are_refused_with_a_remedy():
    mask = ls.Causal()
    assert X.shape[2] == D
    for run in runs("SelfAttention", rope=YARN)[:2]:
        cache = ls.cache.init(ls.cache.plan(mask, T), B, K, H, jnp.float32)
        with pytest.raises(ValueError, match="and `rope_positions` to rotate by other positions"):
            run(X, cache=cache, positions=POSITIONS)
        run(X, cache=cache, rope_positions=POSITIONS)
