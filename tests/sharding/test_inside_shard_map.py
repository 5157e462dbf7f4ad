"""`attention` and `explain` inside `shard_map`: rows and heads are exact, a sharded sequence gets a note."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 4, 3)), jnp.float32)
MASK = ls.Causal() & ls.Window(5, 0)
DOCS = Path(__file__).parent.parent.parent / "docs"


def sharded(q_spec, kv_spec=None, *, shapes=False, **more):
    """(output, notes of `explain`) of a call inside `shard_map` on 2 x 4 devices."""
    notes = []

    def local(q, k):
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) if shapes else x for x in (q, k, k)]
        notes.append(ls.explain(*given, mask=MASK).notes)
        return ls.attention(q, k, k, mask=MASK)

    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = dict(in_specs=(q_spec, q_spec if kv_spec is None else kv_spec), out_specs=q_spec)
    out = jax.jit(jax.shard_map(local, mesh=mesh, **specs, **more))(X, X)
    return out, notes[0]


@pytest.mark.parametrize("spec", [jax.P("dp"), jax.P("dp", None, "sp"), jax.P(None, None, "sp")], ids=str)
def test_sharded_rows_and_heads_are_computed_as_the_whole(spec):
    out, _ = sharded(spec)
    np.testing.assert_allclose(out, ls.attention(X, X, X, mask=MASK), rtol=1e-5, atol=1e-5)


def test_a_sharded_sequence_attends_to_its_own_keys_and_explain_says_so():
    out, (note,) = sharded(jax.P(None, "sp"))
    want = ls.attention(X, X, X, mask=MASK & ls.Chunk(4))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    assert note == (
        "inside `shard_map` over 'sp' (4 devices), queries attend only to the 4 keys of their own shard. That is "
        "correct for sharded batch rows and heads. For a sharded sequence, call `ls.parallel.attention` outside "
        "`shard_map`"
    )


def test_the_function_that_explain_names_attends_to_all_keys():
    mesh = ls.parallel.mesh(dp=2, sp=4)
    out = ls.parallel.attention(X, X, X, mask=MASK, mesh=mesh)
    np.testing.assert_allclose(out, ls.attention(X, X, X, mask=MASK), rtol=1e-5, atol=1e-5)
    assert not any("shard_map" in note for note in ls.explain(X, X, X, mask=MASK, mesh=mesh).notes)


@pytest.mark.parametrize(
    ("how", "axes"),
    [
        (dict(q_spec=jax.P("dp", "sp")), ["'dp' (2 devices)", "'sp' (4 devices)"]),
        (dict(q_spec=jax.P("dp")), ["'dp' (2 devices)"]),
        (dict(q_spec=jax.P("dp", "sp"), kv_spec=jax.P("dp")), ["'dp' (2 devices)"]),
        (dict(q_spec=jax.P(None, "sp"), kv_spec=jax.P(None)), []),
        # Not known: every axis is named.
        (dict(q_spec=jax.P("dp"), check_vma=False), ["'dp' (2 devices)", "'sp' (4 devices)"]),
        (dict(q_spec=jax.P("dp"), shapes=True), ["'dp' (2 devices)", "'sp' (4 devices)"]),
    ],
    ids=["both", "rows", "whole keys of rows", "whole keys", "unchecked", "shapes"],
)
def test_explain_names_the_axes_along_which_keys_vary(how, axes):
    said = [note for note in sharded(**how)[1] if "shard_map" in note]
    assert len(said) == bool(axes)
    for note in said:
        assert note.startswith(f"inside `shard_map` over {' and '.join(axes)}, ")


def test_axes_of_one_device_and_calls_outside_are_not_noted():
    notes = []
    mesh = jax.make_mesh((1,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x):
        notes.extend(ls.explain(x, x, x, mask=MASK).notes)
        return x

    jax.shard_map(local, mesh=mesh, in_specs=jax.P(None, "sp"), out_specs=jax.P(None, "sp"))(X)
    assert not notes and not ls.explain(X, X, X, mask=MASK).notes


@pytest.mark.parametrize("page", ["sharding.md", "scaling.md"])
def test_the_first_section_of_the_pages_says_so(page):
    first = (DOCS / page).read_text().split("\n## ")[0]
    said = " ".join(first.split())
    assert "`ls.parallel.attention`" in said and "only to the keys of its own shard" in said and "`shard_map`" in said
