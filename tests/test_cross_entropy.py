"""`ls.chunked_cross_entropy` equals the plain loss in value and gradients, and holds the logits of one chunk."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan import cross_entropy

EPS = dict(f64=2.0**-52, f32=2.0**-23, bf16=2.0**-8, f16=2.0**-10)
DTYPES = dict(f64=jnp.float64, f32=jnp.float32, bf16=jnp.bfloat16, f16=jnp.float16)
PLAIN = dict()
CAPPED = dict(scale=0.7, soft_cap=1.3)
rng = np.random.default_rng(0)


def make(tokens, vocab, features, ignored=0.3, ignore_label=-100):
    """Hidden states, weights and labels; hidden states of ignored tokens are NaN."""
    labels = rng.integers(0, vocab, tokens).astype(np.int32)
    hidden = rng.normal(size=(*tokens, features)).astype(np.float32)
    labels[rng.random(tokens) < ignored] = ignore_label
    return hidden, rng.normal(size=(vocab, features)).astype(np.float32), labels


def plain(hidden, weights, labels, *, scale=1.0, soft_cap=None, ignore_label=-100):
    """The definition, with all logits."""
    z = jnp.einsum("...d,vd->...v", hidden, weights, preferred_element_type=np.promote_types(hidden.dtype, np.float32))
    z = z * scale
    if soft_cap is not None:
        z = jnp.tanh(z / soft_cap) * soft_cap
    valid = labels != ignore_label
    of_label = jnp.take_along_axis(z, jnp.where(valid, labels, 0)[..., None], axis=-1)[..., 0]
    losses = jnp.where(valid, jax.nn.logsumexp(z, axis=-1) - of_label, 0)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(valid), 1).astype(z.dtype)


@cache  # one program per shape, not per test
def differentiated(loss, options):
    return jax.jit(jax.value_and_grad(partial(loss, **dict(options)), (0, 1)))


def both_passes(loss, hidden, weights, labels, **options):
    value, gradients = differentiated(loss, tuple(options.items()))(hidden, weights, labels)
    return [np.asarray(x, np.float64) for x in (value, *gradients)]


def assert_matches_plain(got, hidden, weights, labels, dtype, **options):
    """Each result is as close to float64 as the plain loss of the dtype is, within a factor of 2 and rounding."""
    small = [jnp.asarray(x, DTYPES[dtype]) for x in (hidden, weights)]
    with jax.enable_x64(True):
        exact = both_passes(plain, *(jnp.asarray(np.asarray(x), jnp.float64) for x in small), labels, **options)
    other = both_passes(plain, *small, labels, **options)
    for mine, theirs, truth in zip(got, other, exact, strict=True):
        unit = EPS[dtype] if truth.ndim else EPS["f32"]
        allowed = 2 * np.abs(theirs - truth).max() + 8 * unit * np.abs(truth).max()
        np.testing.assert_allclose(mine, truth, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    ("dtype", "chunk", "options"),
    [
        *((dtype, 5, CAPPED) for dtype in DTYPES),
        ("f32", 1, PLAIN),
        ("f32", 1000, CAPPED),
        ("bf16", 1000, PLAIN),
    ],
)
def test_loss_and_gradients_equal_the_plain_ones(dtype, chunk, options):
    hidden, weights, labels = make((3, 7), 13, 5)
    with jax.enable_x64(dtype == "f64"):
        cast = [jnp.asarray(x, DTYPES[dtype]) for x in (hidden, weights)]
        loss = partial(ls.chunked_cross_entropy, chunk_size=chunk, **options)
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*cast, labels)
        assert value.dtype == jnp.float32 and [x.dtype for x in gradients] == [x.dtype for x in cast]
        got = [np.asarray(x, np.float64) for x in (value, *gradients)]
        assert_matches_plain(got, hidden, weights, labels, dtype, **options)


def test_a_vocabulary_of_several_tiles_and_a_rest():
    vocab = cross_entropy.VOCAB_TILE + 13
    hidden, weights, labels = make((9,), vocab, 3)
    labels[:3] = vocab - 1, cross_entropy.VOCAB_TILE - 1, 13
    got = both_passes(ls.chunked_cross_entropy, hidden, weights, labels, chunk_size=4, **CAPPED)
    assert_matches_plain(got, hidden, weights, labels, "f32", **CAPPED)
    np.testing.assert_allclose(ls.chunked_cross_entropy(hidden, weights, labels, **CAPPED), got[0], rtol=1e-6)


def test_hidden_states_and_weights_of_different_dtypes():
    hidden, weights, labels = make((11,), 7, 3)
    hidden = jnp.asarray(hidden, jnp.bfloat16)
    got = both_passes(ls.chunked_cross_entropy, hidden, weights, labels)
    want = both_passes(plain, hidden.astype(np.float32), weights, labels)
    for mine, theirs, unit in zip(got, want, (1e-6, EPS["bf16"], 1e-6), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=unit * np.abs(theirs).max())


def test_ignored_tokens_with_nan_change_nothing():
    hidden, weights, labels = make((3, 7), 13, 5, ignore_label=4)
    other = np.where((labels == 4)[..., None], np.nan, hidden)
    results = [both_passes(ls.chunked_cross_entropy, x, weights, labels, ignore_label=4) for x in (hidden, other)]
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("tokens", [(), (0,), (2, 3)])
def test_loss_is_zero_if_all_tokens_are_ignored(tokens):
    hidden, weights, _ = make(tokens, 5, 3)
    value, dhidden, dweights = both_passes(ls.chunked_cross_entropy, hidden, weights, np.full(tokens, -100))
    assert value == 0 and not dhidden.any() and not dweights.any() and dhidden.shape == hidden.shape


def test_transformations():
    hidden, weights, labels = make((4, 6), 13, 5)
    loss = partial(ls.chunked_cross_entropy, chunk_size=4, **CAPPED)
    each = [plain(x, weights, y, **CAPPED) for x, y in zip(hidden, labels, strict=True)]
    np.testing.assert_allclose(jax.jit(jax.vmap(loss, (0, None, 0)))(hidden, weights, labels), each, rtol=1e-5)

    def scanned(hidden, weights):
        step = jax.checkpoint(lambda total, x: (total + loss(x[0] * 2, weights, x[1]), None))
        return jax.lax.scan(step, jnp.float32(0), (hidden, labels))[0]

    def mapped(hidden, weights):
        return jnp.sum(jax.vmap(loss, (0, None, 0))(hidden * 2, weights, labels)) * 1.0

    def wanted(hidden, weights):
        return sum(plain(x * 2, weights, y, **CAPPED) for x, y in zip(hidden, labels, strict=True))

    want = jax.jit(jax.grad(wanted, (0, 1)))(hidden, weights)
    for run in (scanned, mapped):
        for mine, theirs in zip(jax.jit(jax.grad(run, (0, 1)))(hidden, weights), want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


def test_labels_outside_of_the_vocabulary():
    hidden, weights, labels = make((3, 7), 13, 5)
    for wrong in (13, -1, 2**31 - 1, -(2**31)):
        labels[1, 2] = wrong
        with pytest.raises(ValueError, match=f"`labels` must be from 0 to 12, or -100 .* got {wrong}."):
            ls.chunked_cross_entropy(hidden, weights, labels)
        assert np.isnan(jax.jit(ls.chunked_cross_entropy)(hidden, weights, labels))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(hidden=[1.0]), TypeError, "`hidden` must be an array [..., D], got list."),
        (dict(weights=np.ones((5, 3), int)), TypeError, "`weights` must be one of float16, bfloat16, float32, float64"),
        (dict(weights=np.ones((3, 5))), ValueError, "A Flax kernel [D, V] must be transposed."),
        (dict(weights=np.ones((0, 3))), ValueError, "`weights` [V, D] with V > 0"),
        (dict(labels=np.ones(7)), TypeError, "`labels` must be ints, got float64."),
        (dict(labels=np.ones(6, int)), ValueError, "`labels` must have one entry per token, shape (7,), got (6,)."),
        (dict(chunk_size=0), ValueError, "`chunk_size` must be a Python int >= 1, got 0."),
        (dict(scale=float("nan")), ValueError, "`scale` must be a finite number that is not traced, got nan."),
        (dict(soft_cap=0), ValueError, "`soft_cap` must be positive or None, got 0.0."),
        (dict(ignore_label=1.5), TypeError, "`ignore_label` must be a Python int, got 1.5."),
    ],
)
def test_errors(changes, error, message):
    given = dict(hidden=np.ones((7, 3), np.float32), weights=np.ones((5, 3), np.float32), labels=np.ones(7, int))
    with pytest.raises(error, match=re.escape(message)):
        ls.chunked_cross_entropy(**given | changes)


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_temporary_memory_is_an_eighth_of_the_plain_one(dtype):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((8192, 1024), (128256, 1024))]
    labels = jax.ShapeDtypeStruct((8192,), jnp.int32)

    def temporary(loss):
        program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes, labels).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(ls.chunked_cross_entropy) <= temporary(plain) / 8


# Spec of the hidden states, and of the weights.
SHARDED = {
    "rows": (P("x"), P()),
    "tokens": (P(None, "x"), P()),
    "rows and tokens": (P("x", "y"), P()),
    "rows and vocabulary": (P("x"), P("y")),
    "vocabulary": (P(), P(("x", "y"))),
    "rows and vocabulary on the same devices": (P(("x", "y")), P("x")),
    "uneven vocabulary": (P("x"), P()),
}


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, AxisType.Auto) for name in SHARDED), ("rows and vocabulary", AxisType.Explicit)],
)
def test_sharded_tokens_and_vocabulary(name, kind):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    hidden, weights, labels = make((4, 6), 13 if "uneven" in name else 12, 5)
    tokens, vocab = SHARDED[name]
    placed = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip((hidden, weights, labels), (tokens, vocab, tokens), strict=True)
    ]
    loss = partial(ls.chunked_cross_entropy, chunk_size=4, **CAPPED)
    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*placed).compile()
    value, (dhidden, dweights) = program(*placed)
    assert_matches_plain(
        [np.asarray(x, np.float64) for x in (value, dhidden, dweights)], hidden, weights, labels, "f32", **CAPPED
    )
    np.testing.assert_allclose(jax.jit(loss)(*placed), value, rtol=1e-6)
    if "same" not in name:
        assert "all-gather" not in program.as_text()
        assert dhidden.sharding.is_equivalent_to(placed[0].sharding, 3)


@pytest.mark.mesh
def test_sharded_rows_under_vmap():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    hidden, weights, labels = make((4, 6), 13, 5)
    placed = jax.device_put(hidden, NamedSharding(mesh, P("x")))
    got = jax.jit(jax.vmap(ls.chunked_cross_entropy, (0, None, 0)))(placed, weights, labels)
    np.testing.assert_allclose(got, [plain(x, weights, y) for x, y in zip(hidden, labels, strict=True)], rtol=1e-5)


@pytest.mark.mesh
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    hidden, weights, labels = make((4, 6), 13, 5, ignored=0.0)

    def local(hidden, weights, labels):
        return jax.lax.pmean(ls.chunked_cross_entropy(hidden, weights, labels), "x")

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P(), check_vma=check_vma)
    got = both_passes(loss, hidden, weights, labels)
    assert_matches_plain(got, hidden, weights, labels, "f32")
