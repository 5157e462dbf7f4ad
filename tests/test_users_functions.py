"""User functions in masks and biases: the programs of at most 32 are kept, and each function compiles once."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
import longspan.parallel.call as parallel_call
from longspan import attend, axes
from longspan.programs import jit_by_function, users_functions

X = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 2, 3)), jnp.float32)


def programs(name):
    """The number of compiled programs of a jitted function in this process."""
    gc.collect()
    programs = jax.devices()[0].client.live_executables()
    return sum(program.hlo_modules()[0].name == f"jit_{name}" for program in programs)


def calls(kind, engine, number):
    """Calls of attention, each with another function."""
    for shift in range(number):
        rule = (lambda q, k, shift=shift: q >= k - shift) if kind == "mask" else (lambda q, k: -jnp.log1p(abs(q - k)))
        of = dict(mask=ls.Custom(rule)) if kind == "mask" else dict(bias=(ls.ScoreBias(rule), jnp.zeros((5, 5))))
        yield lambda x, of=of: ls.attention(x, x, x, engine=engine, **of)


@pytest.fixture
def few(monkeypatch):
    """Attention that keeps the programs of 2 functions: to compile 33 of them takes half a minute."""
    jax.clear_caches()
    monkeypatch.setattr(
        attend, "_run_engine", jit_by_function(attend._run_engine.__wrapped__, kept=2, static_argnums=0)
    )


def test_every_jitted_function_that_takes_masks_keeps_the_programs_of_32_functions():
    limits = [
        run.cache_info().maxsize for run in (attend._run_engine, axes._on_auto_axes, parallel_call._attend_on_mesh)
    ]
    assert limits == [32, 32, 32]


@pytest.mark.parametrize(("kind", "engine"), [("mask", "reference"), ("bias", "reference"), ("mask", "cpu")])
def test_a_new_function_per_call_frees_the_programs_of_earlier_ones(kind, engine, few):
    for call in calls(kind, engine, 4):
        assert call(X).shape == X.shape
    assert programs("_run_engine") == 2


def test_gradients_with_a_new_function_per_call_free_earlier_programs(few):
    for call in calls("mask", "reference", 4):
        jax.grad(lambda x, call=call: call(x).sum())(X)
    assert programs("_run_engine") == 4  # forward and backward


def test_a_function_that_was_evicted_runs_again(few):
    first, *others = calls("mask", "reference", 3)
    want = first(X)
    for call in others:
        call(X)
    np.testing.assert_array_equal(first(X), want)


def test_all_programs_of_a_function_are_freed_with_it():
    def tenfold(mask, x):
        return 10 * x

    run = jit_by_function(tenfold, kept=3)
    for _ in range(5):
        mask = ls.Custom(lambda q, k: q >= k)
        for size in (1, 2):
            np.testing.assert_array_equal(run(mask, np.ones(size, np.float32)), np.full(size, 10))
    assert programs("tenfold") == 3 * 2
    del run
    assert programs("tenfold") == 0


def test_one_function_with_changing_arrays_compiles_once():
    def near(q, k, width):
        return abs(q - k) <= width

    def sloped(q, k, by):
        return -by * abs(q - k).astype(by.dtype)

    slopes = jnp.ones(2) / 8
    same = [ls.attention(X, X, X, mask=ls.Window(n, n), bias=ls.alibi(slopes), engine="reference") for n in (1, 3)]
    jax.clear_caches()
    for n, want in zip((1, 3), same, strict=True):
        mask, bias = ls.Custom(near, jnp.asarray(n)), ls.ScoreBias(sloped, jnp.asarray(1 / 8))
        np.testing.assert_allclose(ls.attention(X, X, X, mask=mask, bias=bias), want, rtol=1e-5, atol=1e-6)
    assert programs("_run_engine") == 1


def test_functions_are_found_wherever_they_are():
    def f(q, k):
        return q >= k

    def g(q, kv):
        return q.last >= kv.first, q.first >= kv.last

    @ls.masks.rule
    class Many(ls.Mask):
        """A user's rule that holds functions."""

        functions: tuple = ()

    mask = ls.PerHead((ls.Causal() & ~ls.Custom(f, bounds=g), Many((f, 3))))
    assert list(users_functions({"mask": mask, "none": None})) == [f, g, f]
    assert list(users_functions((ls.ScoreBias(f), ls.alibi(jnp.ones(2))))) == [f]
    assert not list(users_functions((ls.Causal() & ls.Segments(np.zeros((1, 3), int)), jnp.ones(2), f)))
