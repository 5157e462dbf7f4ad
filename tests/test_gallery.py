"""Every mask of the gallery: its truth against plain loops, the tiles it visits, and attention on each engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.engines import ENGINES, Request
from longspan.layout import count, plan_layout
from longspan.testing import Shape, assert_obeys_laws, make_qkv
from tests.engines import RUNNING, every_engine
from tests.gallery import GALLERY, SCORES

REALLY_SKIP = ("block diffusion", "flamingo", "natten", "sliding tiles 2d", "sliding tiles 3d", "chosen blocks")


@pytest.fixture(params=GALLERY)
def exhibit(request):
    return GALLERY[request.param]


def test_the_truth_is_that_of_a_plain_loop(exhibit):
    mask, truth, q_len, kv_len = exhibit.build(**exhibit.small)
    expected = np.zeros((1, mask.heads, q_len, kv_len), bool)
    for place in np.ndindex(*expected.shape):
        expected[place] = truth(*place[1:])
    np.testing.assert_array_equal(mask.dense(q_len, kv_len), expected)
    assert_obeys_laws(mask, q_len, kv_len, q_tile=5, kv_tile=4)
    assert exhibit.sentence.endswith(".")


@pytest.mark.check
def test_few_tiles_are_visited_without_an_allowed_pair(exhibit):
    mask, _, q_len, kv_len = exhibit.build(**exhibit.large)
    layout = plan_layout(mask, q_len, kv_len, exhibit.tile, exhibit.tile, xp=np)
    least, counts = tiles_with_a_pair(mask, layout), count(layout)
    assert least <= counts.partial + counts.full <= layout.visits() <= exhibit.slack * least


@pytest.mark.parametrize("name", REALLY_SKIP)
def test_sparse_exhibits_compute_just_the_tiles_that_hold_a_pair(name):
    exhibit = GALLERY[name]
    mask, _, q_len, kv_len = exhibit.build(**exhibit.large)
    layout = plan_layout(mask, q_len, kv_len, exhibit.tile, exhibit.tile, xp=np)
    assert layout.visits() == tiles_with_a_pair(mask, layout) < 0.6 * mask.heads * layout.q_tiles * layout.kv_tiles


@pytest.mark.check
@pytest.mark.parametrize("name", [name for name in RUNNING if name != "reference"])
def test_attention_is_that_of_the_reference(exhibit, name):
    mask, _, q_len, kv_len = exhibit.build(**exhibit.small)
    q, k, v = make_qkv(Shape(B=1, T=q_len, S=kv_len, N=2, K=1, H=5), jnp.float32)
    reason = ENGINES[name].unsupported(Request.of(q=q, k=k, v=v, mask=mask))
    if reason is not None:
        pytest.skip(reason)
    layout = mask.layout(q_len, kv_len, q_tile=8, kv_tile=4)
    got = jax.jit(lambda q, k, v, layout: ls.attention(q, k, v, mask=layout, engine=name))(q, k, v, layout)
    np.testing.assert_allclose(got, ls.attention(q, k, v, mask=mask, engine="reference"), rtol=0, atol=5e-6)


@every_engine
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_changed_as_a_plain_loop_changes_them(name, engine):
    scored = SCORES[name]
    q, k, v = make_qkv(Shape(B=1, T=23, S=29, N=2, K=1, H=5), jnp.float32)
    arguments = scored.arguments(2)
    reason = ENGINES[engine].unsupported(Request.of(q=q, k=k, v=v, **arguments))
    if reason is not None:
        pytest.skip(reason)
    raw = np.einsum("tnh,sh->nts", np.asarray(q, np.float64)[0], np.asarray(k, np.float64)[0, :, 0]) / np.sqrt(5)
    scores = np.array([[[scored.score(s, h, i, j) for j, s in enumerate(row)] for i, row in enumerate(rows)]
                       for h, rows in enumerate(raw)])  # fmt: skip
    powers = np.exp(scores)
    want = np.einsum("nts,sh->tnh", powers / powers.sum(-1, keepdims=True), np.asarray(v, np.float64)[0, :, 0])
    got = ls.attention(q, k, v, engine=engine, **arguments)
    np.testing.assert_allclose(got[0], want, rtol=0, atol=2e-5)
    assert scored.sentence.endswith(".")


def tiles_with_a_pair(mask, layout):
    """The least number of tiles that a layout could visit."""
    truth = np.asarray(mask.dense(layout.q_len, layout.kv_len))
    more = [(0, 0), (0, 0), (0, -layout.q_len % layout.q_tile), (0, -layout.kv_len % layout.kv_tile)]
    shape = (-1, layout.q_tiles, layout.q_tile, layout.kv_tiles, layout.kv_tile)
    return int(np.pad(truth, more).reshape(shape).any(axis=(2, 4)).sum())
