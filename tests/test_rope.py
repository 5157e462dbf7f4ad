"""Rotary positions: frequencies to 2 units in the last place of Hugging Face's, and the rotation by its definition."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rope.json").read_text("utf-8"))
B, T, N, H = 2, 5, 3, 10
X = np.random.default_rng(0).normal(size=(B, T, N, H)).astype(np.float32)
INV_FREQ = np.asarray([1.0, 0.3, 0.07], np.float32)  # D = 6 of H = 10
POSITIONS = np.asarray([[3, 0, 7, 1_000_000, 12], [5, 6, 999_983, 8, 9]])


def frequency_id(case):
    parameters, head_dim, _, seq_len, *_ = case
    inner = parameters.get("rope_parameters") or parameters.get("rope_scaling") or {}
    spelling = "new" if "rope_parameters" in parameters else "old"
    return f"{inner.get('rope_type', inner.get('type'))}-{spelling}-{head_dim}-{seq_len}"


def ones(*shape):
    return np.ones(shape, np.float32)


def assert_frequencies(got, want):
    """Within 2 units in the last place: between instruction sets, Hugging Face's own differ in one or two."""
    (inv_freq, factor), (their_freq, their_factor) = got, want
    assert inv_freq.dtype == np.float32
    np.testing.assert_array_max_ulp(inv_freq, np.asarray(their_freq, np.float32), maxulp=2)
    assert factor == their_factor and isinstance(factor, float)


def by_definition(x, positions, inv_freq, factor=1.0, interleaved=False):
    """Pair by pair, in float64 from the float32 angle on."""
    out = np.array(x, np.float64)
    positions = np.broadcast_to(positions, x.shape[:2])
    inv_freq = np.broadcast_to(inv_freq, (x.shape[0], np.shape(inv_freq)[-1]))
    half = inv_freq.shape[-1]
    for b, t, n, i in np.ndindex(*x.shape[:3], half):
        angle = float(np.float32(positions[b, t]) * inv_freq[b, i])
        cos, sin = factor * math.cos(angle), factor * math.sin(angle)
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        first, second = float(x[b, t, n, one]), float(x[b, t, n, two])
        out[b, t, n, one], out[b, t, n, two] = first * cos - second * sin, second * cos + first * sin
    return out


@pytest.mark.parametrize("case", GOLDEN["frequencies"], ids=frequency_id)
def test_frequencies_are_hugging_faces_in_both_spellings(case):
    parameters, head_dim, most, seq_len, *want = case
    options = dict(max_position_embeddings=most, seq_len=seq_len)
    assert_frequencies(ls.rope.frequencies(parameters, head_dim, **options), want)
    whole = dict(model_type="llama", hidden_size=7, max_position_embeddings=most, **parameters)
    assert_frequencies(ls.rope.frequencies(whole, head_dim, seq_len=seq_len), want)
    if "rope_parameters" in parameters:
        assert_frequencies(ls.rope.frequencies(parameters["rope_parameters"], head_dim, **options), want)
    else:
        beside = {name: value for name, value in parameters.items() if name != "rope_scaling"}
        flat = beside | (parameters["rope_scaling"] or {})
        assert_frequencies(ls.rope.frequencies(flat, head_dim, **options), want)


def test_frequencies_leave_their_parameters_as_they_were():
    parameters = dict(rope_theta=100.0, rope_scaling=dict(type="dynamic", factor=2.0))
    before = json.dumps(parameters)
    ls.rope.frequencies(parameters, 8, max_position_embeddings=16)
    assert json.dumps(parameters) == before


def test_su_is_the_old_name_of_longrope_and_phi_3_keeps_its_old_length_outside():
    lists = dict(short_factor=[1.0, 2.0], long_factor=[3.0, 4.0])
    phi = dict(rope_theta=100.0, original_max_position_embeddings=16, max_position_embeddings=64)
    old = dict(phi, rope_scaling=dict(type="su", original_max_position_embeddings=8, **lists))
    new = dict(rope_type="longrope", rope_theta=100.0, original_max_position_embeddings=16, factor=4.0, **lists)
    for seq_len, divisors in ((16, lists["short_factor"]), (17, lists["long_factor"])):
        inv_freq, factor = ls.rope.frequencies(old, 4, seq_len=seq_len)
        np.testing.assert_allclose(inv_freq, [1 / divisors[0], 0.1 / divisors[1]], rtol=1e-6)
        assert factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
        assert_frequencies((inv_freq, factor), ls.rope.frequencies(new, 4, seq_len=seq_len))


NUMBER, OLD, MOST = "must be a finite number > 0, got", "original_max_position_embeddings", "max_position_embeddings"
LISTS = "must be a list of 4 positive numbers, one per pair of features, got"


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("mrope", {}, "rope_type='mrope' is not one of 'default', 'linear', 'dynamic', 'llama3', 'yarn', 'longrope', "),
        (["yarn"], {}, "rope_type=['yarn'] is not one of 'default', "),
        ("default", dict(rope_theta=None), "'default' needs `rope_theta`, but `parameters` has only `rope_type`. Add"),
        ("default", dict(rope_theta=0.0), f"`rope_theta` {NUMBER} 0.0."),
        ("default", dict(rope_theta=math.nan), f"`rope_theta` {NUMBER} nan."),
        ("default", dict(rope_theta=math.inf), f"`rope_theta` {NUMBER} inf."),
        ("default", dict(rope_theta="10000"), f"`rope_theta` {NUMBER} '10000'."),
        ("default", dict(rope_theta=True), f"`rope_theta` {NUMBER} True."),
        ("default", dict(partial_rotary_factor=0.4), "must be an even number from 2 to head_dim, got 8 · 0.4 = 3.2."),
        ("default", dict(partial_rotary_factor=0.1), "must be an even number from 2 to head_dim, got 8 · 0.1 = 0.8."),
        ("default", dict(partial_rotary_factor=1.5), "must be an even number from 2 to head_dim, got 8 · 1.5 = 12."),
        ("linear", {}, "'linear' needs `factor`, but `parameters` has only `rope_theta`, `rope_type`. Add it."),
        ("linear", dict(factor=-2), f"`factor` {NUMBER} -2."),
        ("dynamic", dict(factor=2), f"'dynamic' needs `{MOST}`, but"),
        ("dynamic", dict(factor=2), f"`rope_type`, `factor`. Add it, or give `{MOST}=`."),
        ("dynamic", {"factor": 2, MOST: 9, "partial_rotary_factor": 0.25}, "needs 4 rotated features or more"),
        ("llama3", dict(factor=2), f"'llama3' needs `{OLD}`"),
        ("llama3", {"factor": 2, OLD: 9}, "'llama3' needs `low_freq_factor`"),
        ("llama3", {"factor": 2, OLD: 9, "low_freq_factor": 4, "high_freq_factor": 4}, "less than `high_freq_factor`"),
        ("yarn", {OLD: 9}, "'yarn' needs `factor`"),
        ("yarn", {OLD: 9, "factor": None}, f"'yarn' needs `{MOST}`"),
        ("yarn", dict(factor=2.0), f"'yarn' needs `{OLD}`"),
        ("yarn", {"factor": 2.0, OLD: 9, "rope_theta": 1}, "needs a `rope_theta` other than 1"),
        ("longrope", {MOST: 9}, "'longrope' needs `short_factor`"),
        ("longrope", {MOST: 9, "short_factor": [1.0] * 4}, "'longrope' needs `long_factor`"),
        ("longrope", {MOST: 9, "short_factor": [1.0] * 3}, f"`short_factor` {LISTS} 3 values."),
        ("longrope", {MOST: 9, "short_factor": "1111"}, f"`short_factor` {LISTS} '1111'."),
        ("longrope", {MOST: 9, "short_factor": [1, 1, 0, 1]}, f"`short_factor` {LISTS} 4 values."),
        ("longrope", {OLD: 1, MOST: 9, "short_factor": [1] * 4, "long_factor": [1] * 4}, f"`{OLD}` must be more"),
        ("proportional", dict(partial_rotary_factor=2), "`partial_rotary_factor` of at most 1, got 8 and 2."),
    ],
)  # fmt: skip
def test_missing_or_wrong_parameters_are_explained(kind, fields, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        ls.rope.frequencies(dict(rope_theta=1e4, rope_type=kind) | fields, 8)


def test_parameters_are_one_mapping():
    with pytest.raises(TypeError, match="`parameters` must be a mapping as in a Hugging Face config"):
        ls.rope.frequencies("default", 8)
    text = (
        "must be one set of numbers, got one per layer type ('full_attention', 'sliding_attention'). Give one of them, "
        "for example param"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        ls.rope.frequencies(dict(rope_parameters=dict(full_attention={}, sliding_attention={})), 8)


def test_sizes_of_frequencies_are_checked():
    plain = dict(rope_theta=1e4)
    with pytest.raises(ValueError, match=re.escape("must be an even number from 2 to head_dim, got 7 · 1 = 7.")):
        ls.rope.frequencies(plain, 7)
    assert ls.rope.frequencies(dict(plain, partial_rotary_factor=0.6), 7)[0].shape == (2,)
    for head_dim in (0, 8.0, None):
        with pytest.raises(ValueError, match="`head_dim` must be a Python int >= 2, got"):
            ls.rope.frequencies(plain, head_dim)
    with pytest.raises(ValueError, match="`seq_len` must be a Python int >= 1, got 0"):
        ls.rope.frequencies(plain, 8, seq_len=0)
    with pytest.raises(TypeError, match="`seq_len` sets array shapes, so it must be a Python int, got an array"):
        jax.jit(lambda n: ls.rope.frequencies(plain, 8, seq_len=n)[0])(3)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("rows", ["shared", "one", "each"])
def test_rotation_is_its_definition(interleaved, rows):
    positions = {"shared": POSITIONS[0], "one": POSITIONS[:1], "each": POSITIONS}[rows]
    inv_freq = np.stack([INV_FREQ, INV_FREQ[::-1] / 2]) if rows == "each" else INV_FREQ
    options = dict(attention_factor=1.5, interleaved=interleaved)
    got = jax.jit(lambda *arrays: ls.rope.rotate(*arrays, **options))(X, positions, inv_freq)
    np.testing.assert_allclose(got, by_definition(X, positions, inv_freq, 1.5, interleaved), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(got[..., 6:], X[..., 6:])
    np.testing.assert_allclose(ls.rope.rotate(X, positions, inv_freq, **options), got, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "factor", "want"), GOLDEN["rotations"], ids=["half", "interleaved"])
def test_rotation_is_hugging_faces_up_to_position_1_000_000(kind, factor, want):
    from tests.golden.make_rope import rotated_arrays

    got = ls.rope.rotate(*rotated_arrays(), attention_factor=factor, interleaved=kind == "interleaved")
    np.testing.assert_allclose(got, np.asarray(want), rtol=0, atol=1e-6)


def test_cos_and_sin_of_great_angles_are_exact():
    """Up to position 2**30 - 1, compiled, with every frequency of a real model: fast approximations would show here."""
    inv_freq, _ = ls.rope.frequencies(dict(rope_theta=500000.0), 128)
    many = np.random.default_rng(0).integers(0, 1_000_001, 997)
    positions = np.concatenate([many, [1_000_000, 2**24 - 1, 2**24 + 1, 2**30 - 1, -1_000_000]])
    pairs = np.stack([np.ones(64), np.zeros(64)]).reshape(1, 1, 1, 128).astype(np.float32)
    x = np.repeat(pairs, len(positions), axis=1)
    got = np.asarray(jax.jit(ls.rope.rotate)(x, positions, inv_freq))[0, :, 0]
    angles = (positions.astype(np.float32)[:, None] * inv_freq[None]).astype(np.float64)
    np.testing.assert_allclose(got[:, :64], np.cos(angles), rtol=0, atol=6e-8)
    np.testing.assert_allclose(got[:, 64:], np.sin(angles), rtol=0, atol=6e-8)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_half_precision_is_rounded_once(dtype):
    x = jnp.asarray(X, dtype)
    got = ls.rope.rotate(x, POSITIONS, INV_FREQ)
    assert got.dtype == dtype
    wide = ls.rope.rotate(x.astype(jnp.float32), POSITIONS, INV_FREQ)
    np.testing.assert_array_equal(got, wide.astype(dtype))


def test_float64_is_kept():
    with jax.enable_x64(True):
        got = ls.rope.rotate(X.astype(np.float64), POSITIONS, INV_FREQ)
        assert got.dtype == np.float64
    np.testing.assert_allclose(got, by_definition(X, POSITIONS, INV_FREQ), rtol=0, atol=3e-7)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_no_tokens_and_no_rows_are_rotated_too(interleaved):
    for x, positions in ((X[:, :0], POSITIONS[:, :0]), (X[:0], POSITIONS[0])):
        assert ls.rope.rotate(x, positions, INV_FREQ, interleaved=interleaved).shape == x.shape


def test_scores_depend_on_distances_alone():
    q, k = (np.random.default_rng(seed).normal(size=(1, 7, 2, 8)).astype(np.float32) for seed in (1, 2))
    inv_freq, _ = ls.rope.frequencies(dict(rope_theta=100.0), 8)

    def scores(shift):
        turned = [ls.rope.rotate(x, np.arange(7) + shift, inv_freq) for x in (q, k)]
        return jnp.einsum("btnh,bsnh->bnts", *turned)

    np.testing.assert_allclose(scores(0), scores(53), rtol=0, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_the_gradient_turns_back(interleaved):
    weights = jnp.asarray(np.random.default_rng(1).normal(size=X.shape), jnp.float32)

    def loss(x, inv_freq, factor):
        turned = ls.rope.rotate(x, POSITIONS, inv_freq, attention_factor=factor, interleaved=interleaved)
        return (turned * weights).sum()

    dx, dfreq, dfactor = jax.jit(jax.grad(loss, (0, 1, 2)))(X, INV_FREQ, 1.5)
    want = by_definition(np.asarray(weights), -POSITIONS, INV_FREQ, 1.5, interleaved)
    np.testing.assert_allclose(dx, want, rtol=0, atol=1e-6 * 5)
    turned = by_definition(X, POSITIONS, INV_FREQ, 1.0, interleaved)
    np.testing.assert_allclose(dfactor, (turned * weights)[..., :6].sum(), rtol=1e-5)
    # d/dangle of a turned pair (a, b) is (-b, a), and d angle / d frequency is the position.
    pairs = (1.5 * turned)[..., :6].reshape(B, T, N, *((3, 2) if interleaved else (2, 3)))
    heavy = np.asarray(weights)[..., :6].reshape(pairs.shape).astype(np.float64)
    axis = -1 if interleaved else -2
    (a, b), (wa, wb) = (np.moveaxis(p, axis, 0) for p in (pairs, heavy))
    np.testing.assert_allclose(dfreq, ((wb * a - wa * b) * POSITIONS[:, :, None, None]).sum((0, 1, 2)), rtol=1e-5)


def test_rotation_runs_under_vmap_and_scan():
    want = by_definition(X, POSITIONS, INV_FREQ)
    one_by_one = jax.vmap(lambda x, at: ls.rope.rotate(x[None], at, INV_FREQ)[0])(
        jnp.asarray(X), jnp.asarray(POSITIONS)
    )
    np.testing.assert_allclose(one_by_one, want, rtol=0, atol=1e-6)

    def step(_, column):
        x, at = column
        return None, ls.rope.rotate(x[:, None], at[:, None], INV_FREQ)[:, 0]

    columns = (jnp.asarray(X).swapaxes(0, 1), jnp.asarray(POSITIONS).T)
    np.testing.assert_allclose(jax.lax.scan(step, None, columns)[1].swapaxes(0, 1), want, rtol=0, atol=1e-6)


ONE_FLOAT = "`inv_freq` must be a float array [D/2] or [B, D/2], got"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(x=X[0]), ValueError, "`x` must have shape [B, T, N, H], got rank 3 (shape (5, 3, 10)). Add the batch"),
        (dict(x=1.0), TypeError, "`x` must be an array [B, T, N, H], got float."),
        (dict(x=X.astype(int)), TypeError, "`x` must be one of float16, bfloat16, float32, float64, got int64."),
        (dict(positions=None), TypeError, "`positions` must be int [T] or [B, T], got None. Give `jnp.arange(5)`."),
        (dict(positions=POSITIONS * 1.0), TypeError, "positions must be an int array, got dtype float64."),
        (dict(positions=POSITIONS[:, :4]), ValueError, "positions must have shape [5] or [B, 5] (one posi"),
        (dict(positions=POSITIONS[[0, 0, 1]]), ValueError, "positions has 3 batch rows, but the call has 2."),
        (dict(positions=POSITIONS * 5000), ValueError, "positions must lie within ±1073741823"),
        (dict(inv_freq=[1.0]), TypeError, f"{ONE_FLOAT} list. `frequencies` makes one."),
        (dict(inv_freq=np.arange(3)), TypeError, f"{ONE_FLOAT} dtype int64."),
        (dict(inv_freq=ones(3, 3)), ValueError, "`inv_freq` must have shape [D/2] or [B, D/2] with B = 2, got (3, 3)."),
        (dict(inv_freq=ones(1, 2, 3)), ValueError, "must have shape [D/2] or [B, D/2] with B = 2, got (1, 2, 3)."),
        (dict(inv_freq=ones(6)), ValueError, "has 6 frequencies, one per pair, but `x` has heads of 10 feat"),
        (dict(inv_freq=ones(0)), ValueError, "`inv_freq` has 0 frequencies"),
        (dict(attention_factor="1"), TypeError, "`attention_factor` must be one number, got '1'."),
        (dict(attention_factor=ones(2)), TypeError, "`attention_factor` must be one number, got shape (2,), float32."),
    ],
)  # fmt: skip
def test_a_rotation_that_does_not_fit_is_explained(change, error, text):
    with pytest.raises(error, match=re.escape(text)):
        ls.rope.rotate(**{**dict(x=X, positions=POSITIONS, inv_freq=INV_FREQ), **change})


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # the peer's own
def test_frequencies_and_rotations_are_hugging_faces_live():
    pytest.importorskip("transformers")
    from tests.golden import make_rope

    for theta in (10000.0, 150000.0, 500000.0, 1e6, 123456.789):
        for parameters, head_dim, most, seq_len in make_rope.CASES:
            new = dict(parameters.get("rope_parameters") or parameters["rope_scaling"] or {}, rope_theta=theta)
            new.setdefault("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0))
            for case in (dict(rope_parameters=new), dict(rope_scaling=new, rope_theta=theta)):
                want = make_rope.hugging_face_frequencies(case, head_dim, most, seq_len)
                options = dict(max_position_embeddings=most, seq_len=seq_len)
                assert_frequencies(ls.rope.frequencies(case, head_dim, **options), want)
    for kind in ("half", "interleaved"):
        factor, want = make_rope.hugging_face_rotation(kind, 0.75)
        got = ls.rope.rotate(*make_rope.rotated_arrays(), attention_factor=factor, interleaved=kind == "interleaved")
        np.testing.assert_allclose(got, np.asarray(want), rtol=0, atol=1e-6)
