"""Files with the right digest and the wrong contents are refused, with the file, the array and the value named."""

import json
import re
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls

pytestmark = pytest.mark.quick

FREE_SLOT = 2**30 - 1
NAMES = ("k", "v", "positions", "length", "furthest", "overflowed")
TYPES = dict(float32="F32", float16="F16", int32="I32", bool="BOOL", uint16="U16", int64="I64", float64="F64")
PLANS = {
    "ring": ls.cache.plan(ls.Causal() & ls.Window(3, 0), 40, slack=2),
    "pinned": ls.cache.plan(ls.Causal() & (ls.Window(3, 0) | ls.Prefix(2)), 40, slack=1),
    "table": ls.cache.plan(ls.Causal() & (ls.Window(3, 0) | ls.Global((5, 20))), 40),
    "chunks": ls.cache.plan(ls.Causal() & ls.Chunk(5), 40),
    "outline": ls.cache.plan(ls.Causal() & ls.Chunk(5), 10_000, slack=1),
    "everything": ls.cache.plan(ls.Causal(), 40),
    "tied": ls.cache.plan(ls.Chunk(4), 40),
}


def tensors(plan, tokens=(24, 12), dtype=np.float32):
    cache = ls.cache.init(plan, len(tokens), 1, 2, dtype)
    new = jnp.ones((len(tokens), max(tokens), 1, 2), dtype)
    cache, _ = cache.append(new, new, np.array(tokens))
    return {name: np.array(getattr(cache, name)) for name in NAMES}


def write(path, plan, arrays, **metadata):
    """Written by hand, because safetensors would refuse some of these files."""
    header: dict = {"__metadata__": dict(format="longspan-cache-1", plan=plan.digest, dtype="float32") | metadata}
    body = b""
    for name, array in arrays.items():
        kind, shape, data = (
            array if isinstance(array, tuple) else (TYPES[array.dtype.name], array.shape, array.tobytes())
        )
        header[name] = dict(dtype=kind, shape=list(shape), data_offsets=[len(body), len(body) + len(data)])
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def refused(path, plan, arrays, message, **metadata):
    write(path, plan, arrays, **metadata)
    with pytest.raises(ValueError, match=message) as error:
        ls.cache.restore(path, plan)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", PLANS)
def test_contents_of_a_cache_are_accepted(tmp_path, name):
    for tokens in ((24, 12), (0, 40), (4, 36)):
        write(tmp_path / "cache", PLANS[name], tensors(PLANS[name], tokens))
        assert ls.cache.restore(tmp_path / "cache", PLANS[name]).length.tolist() == list(tokens)


@pytest.mark.parametrize("value", [-5, -1, 41, 10**9, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", ["length", "furthest"])
def test_lengths_outside_of_the_plan_are_refused(tmp_path, name, value):
    plan = PLANS["ring"]
    arrays = tensors(plan)
    arrays[name][1] = value
    refused(tmp_path / "cache", plan, arrays, rf"is damaged: `{name}` of row 1 is {value}, not between")


def test_lengths_that_appends_and_rollbacks_cannot_leave_are_refused(tmp_path):
    plan = PLANS["ring"]
    arrays = tensors(plan)
    arrays["furthest"][0] = 27
    message = "`furthest` of row 0 is 27, not between the length 24 of the row and 26"
    refused(tmp_path / "cache", plan, arrays, message)
    arrays = tensors(PLANS["tied"])
    arrays["length"][1] = arrays["furthest"][1] = 11
    arrays["positions"][1][arrays["positions"][1] >= 11] = FREE_SLOT
    refused(tmp_path / "cache", PLANS["tied"], arrays, "row 1 is 11, but positions 10 and 11 must be appended together")


@pytest.mark.parametrize("value", [-1, -(2**31), 24, 39, 10**9, FREE_SLOT + 1, 2**31 - 1])
def test_positions_outside_of_the_row_are_refused(tmp_path, value):
    for name, plan in PLANS.items():
        arrays = tensors(plan)
        arrays["positions"][0, 1] = value
        refused(tmp_path / name, plan, arrays, f"`positions` of row 0 has {value} in slot 1, but the row has 24 tokens")


@pytest.mark.parametrize("name", PLANS)
def test_keys_in_the_slots_of_others_are_refused(tmp_path, name):
    arrays = tensors(PLANS[name])
    held = arrays["positions"][0]
    one, other = np.flatnonzero(held != FREE_SLOT)[:2]
    held[[one, other]] = held[[other, one]]
    message = rf"`positions` of row 0 has {held[one]} in slot {one}, which is reserved for other keys"
    refused(tmp_path / "cache", PLANS[name], arrays, message)


@pytest.mark.parametrize("name", PLANS)
def test_missing_keys_are_refused(tmp_path, name):
    arrays = tensors(PLANS[name])
    slot = int(np.argmax(np.where(arrays["positions"][0] == FREE_SLOT, -1, arrays["positions"][0])))
    arrays["positions"][0, slot] = FREE_SLOT
    refused(tmp_path / "cache", PLANS[name], arrays, "`positions` of row 0 lacks position 23, which later queries need")


def test_arrays_of_other_types_and_shapes_are_refused_before_they_are_read(tmp_path):
    plan = PLANS["ring"]
    whole = tensors(plan)
    wrong = dict(
        k=("BF16", (2, 6, 1, 2), bytes(48)), v=("F8_E4M3", (2, 6, 1, 2), bytes(24)),
        positions=np.zeros((2, 7), np.int32), length=np.zeros(2, np.int64), furthest=np.zeros((2, 1), np.int32),
        overflowed=np.zeros(2, np.int32),
    )  # fmt: skip
    for name, array in wrong.items():
        refused(tmp_path / "cache", plan, whole | {name: array}, rf"is damaged: `{name}` is .* it must be \w+\[")
    for shape in ((0, 6, 1, 2), (2, 6, 0, 2), (2, 6, 1, 0), (12,), (1, 2, 6, 1, 2)):
        refused(tmp_path / "cache", plan, whole | dict(k=np.zeros(shape, np.float32)), "is damaged: `")
    refused(tmp_path / "cache", plan, whole | dict(v=np.zeros((2, 6, 1, 2), np.float16)), r"`v` is F16\[2, 6, 1, 2\]")
    refused(
        tmp_path / "cache",
        plan,
        whole,
        r"`k` is F32\[2, 6, 1, 2\], .* with dtype bfloat16 it must be U16",
        dtype="bfloat16",
    )


def test_strange_flags_names_and_formats_are_refused(tmp_path):
    plan = PLANS["ring"]
    whole = tensors(plan)
    refused(tmp_path / "cache", plan, whole | dict(overflowed=("BOOL", (2,), b"\0\7")), "bytes other than 0 and 1")
    for arrays in (whole | dict(more=whole["k"]), {name: whole[name] for name in NAMES[:-1]}):
        refused(tmp_path / "cache", plan, arrays, "is not a cache that `Cache.save` wrote")
    refused(tmp_path / "cache", plan, whole, "is not a cache that `Cache.save` wrote", dtype="int32")
    refused(tmp_path / "cache", plan, whole, "is not a cache that `Cache.save` wrote", format="longspan-cache-0")


def test_float64_is_not_rounded_in_silence(tmp_path):
    plan = PLANS["ring"]
    with jax.enable_x64(True):
        ls.cache.init(plan, 1, 1, 2, jnp.float64).save(tmp_path / "cache")
        assert ls.cache.restore(tmp_path / "cache", plan).k.dtype == jnp.float64
    with pytest.raises(ValueError, match=r"holds float64, which JAX would round to float32. Set `jax_enable_x64`"):
        ls.cache.restore(tmp_path / "cache", plan)


def test_a_flipped_byte_is_refused_or_changes_nothing_that_is_checked(tmp_path):
    """In the header and in all arrays: a file that is accepted holds a valid cache."""
    plan, path = PLANS["pinned"], tmp_path / "cache"
    write(path, plan, tensors(plan))
    good, rng = path.read_bytes(), np.random.default_rng(0)
    accepted = 0
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        path.write_bytes(bytes(bad))
        try:
            cache = ls.cache.restore(path, plan)
        except ValueError as error:
            assert str(path) in str(error)
            continue
        accepted += 1
        assert ((cache.length >= 0) & (cache.length <= plan.length)).all() and cache.k.shape == (2, plan.capacity, 1, 2)
    assert 0 < accepted < 300


def test_caches_of_several_layers_and_directories_are_refused(tmp_path):
    cache = ls.cache.init(PLANS["ring"], 1, 1, 2, jnp.float32)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), cache, cache, cache)
    with pytest.raises(ValueError, match=r"stacks 3 layers. Save each .* file: `jax.tree.map\(lambda x: x\[0\]"):
        stacked.save(tmp_path / "cache")
    jax.tree.map(lambda x: x[0], stacked).save(tmp_path / "cache")
    with pytest.raises(IsADirectoryError, match=re.escape(f"{tmp_path} is a directory. Pass the file")):
        ls.cache.restore(tmp_path, PLANS["ring"])
    with pytest.raises(OSError, match=r"none/cache could not be written: .* An earlier file there is unchanged"):
        cache.save(tmp_path / "none" / "cache")


FULL_DISK = """
import resource, sys
import jax.numpy as jnp
import longspan as ls

plan = ls.cache.plan(ls.Causal(), 1000)
small = ls.cache.init(plan, 1, 1, 1, jnp.float32)
small.save(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    ls.cache.init(plan, 9, 1, 1, jnp.float32).save(sys.argv[1])
except OSError as error:
    print(error)
print(ls.cache.restore(sys.argv[1], plan).k.shape)
"""


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "cache"
    run = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said, restored = run.stdout.splitlines()
    assert f"{path} could not be written: " in said and "File too large" in said
    assert restored == "(1, 1000, 1, 1)" and list(tmp_path.iterdir()) == [path]
