"""Caches in files: a save succeeds or leaves the earlier file, and only the same plan restores it."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import longspan as ls

pytestmark = pytest.mark.quick

MASK = ls.Causal() & (ls.Window(3, 0) | ls.Global((2, 9)))
PLAN = ls.cache.plan(MASK, 21, slack=1)
NAMES = ("k", "v", "positions", "length", "furthest", "overflowed")


def filled(dtype=jnp.float32, plan=PLAN, tokens=(13, 7), heads_first=False):
    cache = ls.cache.init(plan, 2, 3, 5, dtype, v_head_dim=4, heads_first=heads_first)
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(2, 13, 3, size)), dtype) for size in (5, 4))
    return cache.append(k, v, np.array(tokens))[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
def test_caches_are_restored_bit_for_bit(tmp_path, dtype):
    cache = filled(dtype).rollback(1)
    cache.save(tmp_path / "cache.safetensors")
    again = ls.cache.restore(tmp_path / "cache.safetensors", PLAN)
    for name in NAMES:
        then, now = np.asarray(getattr(cache, name)), np.asarray(getattr(again, name))
        assert then.dtype == now.dtype and then.shape == now.shape and then.tobytes() == now.tobytes()
    assert again.plan == cache.plan
    np.testing.assert_array_equal(again.tables[0], cache.tables[0])
    with pytest.raises(ValueError, match="it once held 13"):
        again.rollback(1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: jnp.dtype(d).name)
def test_files_do_not_depend_on_the_order_of_heads_and_slots(tmp_path, dtype):
    caches = {order: filled(dtype, heads_first=order) for order in (False, True)}
    for order, cache in caches.items():
        cache.save(tmp_path / str(order))
    written = [safetensors.numpy.load_file(tmp_path / str(order)) for order in caches]
    for name in NAMES:
        assert written[0][name].shape == written[1][name].shape
        assert written[0][name].tobytes() == written[1][name].tobytes()
    for order, want in caches.items():
        again = ls.cache.restore(tmp_path / "True", PLAN, heads_first=order)
        assert again.heads_first is order
        for name in NAMES:
            assert getattr(again, name).shape == getattr(want, name).shape
            assert np.asarray(getattr(again, name)).tobytes() == np.asarray(getattr(want, name)).tobytes()
    with pytest.raises(TypeError, match="`heads_first` must be True or False, a Python bool, got 1"):
        ls.cache.restore(tmp_path / "True", PLAN, heads_first=1)  # type: ignore[arg-type]


def test_an_empty_plan_is_saved_too(tmp_path):
    plan = ls.cache.plan(ls.Empty(), 5)
    ls.cache.init(plan, 1, 2, 3, jnp.float32).save(str(tmp_path / "empty"))
    assert ls.cache.restore(str(tmp_path / "empty"), plan).k.shape == (1, 0, 2, 3)


@pytest.mark.parametrize(
    "other",
    [
        ls.cache.plan(MASK, 21),
        ls.cache.plan(MASK, 22, slack=1),
        ls.cache.plan(ls.Causal() & (ls.Window(3, 0) | ls.Global((2, 10))), 21, slack=1),
    ],
    ids=["slack", "length", "mask"],
)
def test_the_file_of_another_plan_is_refused(tmp_path, other):
    filled().save(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"was saved with another plan than CachePlan\(.*that it was saved with"):
        ls.cache.restore(tmp_path / "cache", other)


def test_damaged_unknown_and_missing_files_have_different_errors(tmp_path):
    path = tmp_path / "cache"
    with pytest.raises(FileNotFoundError, match="cache"):
        ls.cache.restore(path, PLAN)
    filled().save(path)
    whole = path.read_bytes()
    for part in (whole[:-1], whole[:100], b"", b"nonsense" * 9):
        path.write_bytes(part)
        with pytest.raises(ValueError, match=re.escape(f"{path} is not a safetensors file")):
            ls.cache.restore(path, PLAN)
    safetensors.numpy.save_file({"k": np.ones(3)}, path)
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a cache that `Cache.save` wrote")):
        ls.cache.restore(path, PLAN)
    with pytest.raises(TypeError, match=r"`plan` must be a CachePlan from `ls.cache.plan\(mask, length\)`, got And"):
        ls.cache.restore(path, MASK)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "spoilt"),
    [
        ("k", np.ones((2, 9, 3, 5), np.float32)),
        ("k", np.ones((2, 5), np.float32)),
        ("v", np.ones((2, PLAN.capacity, 3, 4), np.int32)),
        ("v", np.ones((3, PLAN.capacity, 3, 4), np.float32)),
        ("positions", np.ones((2, 2), np.int32)),
        ("length", np.ones((1,), np.int32)),
        ("overflowed", np.ones((2,), np.int32)),
    ],
)
def test_tensors_that_are_no_cache_of_the_plan_are_refused(tmp_path, name, spoilt):
    tensors = {n: np.asarray(getattr(filled(), n)) for n in NAMES} | {name: spoilt}
    metadata = dict(format="longspan-cache-1", plan=PLAN.digest, dtype="float32")
    safetensors.numpy.save_file(tensors, tmp_path / "cache", metadata=metadata)
    with pytest.raises(ValueError, match="is damaged: `"):
        ls.cache.restore(tmp_path / "cache", PLAN)


@pytest.mark.parametrize("where", ["safetensors.numpy.save_file", "os.replace"])
def test_an_interrupted_save_leaves_the_last_good_file_and_nothing_else(tmp_path, monkeypatch, where):
    path = tmp_path / "cache"
    filled().save(path)
    good = path.read_bytes()

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        filled(tokens=(1, 1)).save(path)
    assert path.read_bytes() == good and list(tmp_path.iterdir()) == [path]
