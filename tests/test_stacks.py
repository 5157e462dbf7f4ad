"""One layer of stacked caches: attention reads it, and `put` writes it, in place."""

import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.attend import attention_of_layer, plan_attention_layout
from longspan.engines import ENGINES, Engine, put
from longspan.engines.cpu import library
from longspan.engines.cpu.put import put as native_put

LAYERS, B, T, S, N, K, H, V = 3, 2, 1, 37, 6, 2, 7, 5
FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]
needs_native = pytest.mark.skipif(library.missing() is not None, reason="the native library is not there")


every_order = pytest.mark.parametrize("heads_first", [False, True])


def heads_before_slots(stack):
    """A stack [layers, B, S, K, H] as [layers, B, K, S, H]."""
    return stack.swapaxes(2, 3)


def draw(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype), dtype)


def stacks(dtype=jnp.float32):
    """q, and stacked keys and values that are NaN in all other layers."""
    k, v = (np.array(draw(LAYERS, B, S, K, size, dtype=dtype)) for size in (H, V))
    for x in (k, v):
        x[[0, 2]] = np.nan
    return draw(B, T, N, H, dtype=dtype), *jax.device_put((k, v))


@pytest.fixture(params=[pytest.param(True, marks=needs_native), False], ids=["native", "xla"])
def native(request, monkeypatch):
    """With the native library, and without it."""
    if not request.param:
        monkeypatch.setenv("LONGSPAN_NATIVE", "0")
    return request.param


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", FLOATS)
@every_order
def test_a_layer_of_a_stack_gives_the_result_of_the_layer_alone(dtype, heads_first):
    q, k, v = stacks(dtype)
    mask, options = ls.Causal() & ls.Window(20, 0), dict(scale=0.3, soft_cap=4.0)
    where = jax.device_put(dict(q_positions=np.array([[S - 1], [25]]), kv_positions=np.arange(S)))
    own = jax.device_put((np.asarray(k)[1], np.asarray(v)[1]))
    layout = plan_attention_layout(q, *own, mask=mask, **where, **options)
    options_of_layer = dict(mask=layout, heads_first=heads_first, **options)
    if heads_first:
        k, v = heads_before_slots(k), heads_before_slots(v)
    got = jax.jit(lambda q, k, v, layer: attention_of_layer(q, k, v, layer, **options_of_layer))(q, k, v, 1)
    want = ls.attention(q, *own, mask=mask, **where, **options)
    assert got.dtype == dtype and np.isfinite(np.asarray(got, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", FLOATS)
@every_order
def test_rows_are_put_into_their_slots_and_nowhere_else(dtype, heads_first):
    stack, new = draw(LAYERS, B, S, K, H, dtype=dtype), draw(B, 2, K, H, dtype=dtype)
    slots = jnp.array([[4, S], [S - 1, -1]], jnp.int32)  # slots out of range are skipped
    want = np.array(stack)
    want[2, 0, 4], want[2, 1, S - 1] = new[0, 0], new[1, 0]
    if heads_first:
        stack, want = heads_before_slots(stack), heads_before_slots(want)
    for run in (jax.jit(put, static_argnames="heads_first"), put):  # the operand is unchanged
        np.testing.assert_array_equal(np.asarray(run(stack, 2, slots, new, heads_first=heads_first)), want)


@pytest.mark.usefixtures("native")
@every_order
def test_overwritten_rows_have_no_gradient_and_new_rows_that_of_their_slot(heads_first):
    stack, new, weights = draw(LAYERS, B, S, K, H), draw(B, 2, K, H), draw(LAYERS, B, S, K, H)
    slots = jnp.array([[4, S], [S - 1, -1]], jnp.int32)

    def loss(stack, new):
        if not heads_first:
            return jnp.sum(weights * put(stack, 2, slots, new))
        return jnp.sum(heads_before_slots(weights) * put(heads_before_slots(stack), 2, slots, new, heads_first=True))

    of_stack, of_new = jax.jit(jax.grad(loss, (0, 1)))(stack, new)
    want, wanted = np.array(weights), np.zeros(new.shape, np.float32)
    for row, slot in ((0, 4), (1, S - 1)):
        want[2, row, slot], wanted[row, 0] = 0, weights[2, row, slot]
    np.testing.assert_array_equal(of_stack, want)
    np.testing.assert_array_equal(of_new, wanted)


@needs_native
@pytest.mark.parametrize("dtype", FLOATS)
@every_order
def test_a_loop_puts_rows_in_place(dtype, heads_first):
    def fill(stack, slots, new):
        def body(layer, stack):
            return put(stack, layer, slots, new, heads_first=heads_first)

        return jax.lax.fori_loop(0, LAYERS, body, stack)

    stack, new = jnp.zeros((LAYERS, B, S, K, H), dtype), draw(B, 1, K, H, dtype=dtype)
    if heads_first:
        stack = heads_before_slots(stack)
    program = jax.jit(fill, donate_argnums=0).lower(stack, jnp.zeros((B, 1), jnp.int32), new).compile()
    assert program.memory_analysis().temp_size_in_bytes < stack.nbytes // LAYERS // 4
    got = np.asarray(program(stack, jnp.full((B, 1), 9, jnp.int32), new))
    of_slot = got[:, :, :, 9] if heads_first else got[:, :, 9]
    assert np.count_nonzero(got) == np.count_nonzero(of_slot) == LAYERS * new.size


@pytest.mark.mesh
@every_order
def test_devices_put_their_own_rows_and_heads_without_communication(heads_first, monkeypatch):
    monkeypatch.setenv("LONGSPAN_NATIVE", "0")  # as on other platforms than CPUs
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    stack, new = draw(LAYERS, 8, S, 6, H), draw(8, 3, 6, H)
    want, slots = np.array(stack), (np.arange(24, dtype=np.int32) * 5 % S).reshape(8, 3)
    for row in range(8):
        want[1, row, slots[row]] = new[row]
    spec = P(None, "data", None, "model")
    if heads_first:
        stack, want, spec = heads_before_slots(stack), heads_before_slots(want), P(None, "data", "model")
    of_stack, of_new, of_rows = (NamedSharding(mesh, s) for s in (spec, P("data", None, "model"), P("data")))
    placed = jax.device_put((stack, slots, new), (of_stack, of_rows, of_new))
    program = jax.jit(lambda *x: put(x[0], 1, *x[1:], heads_first=heads_first)).lower(*placed).compile()
    assert not re.search("all-gather|all-to-all|collective-permute|all-reduce", program.as_text())
    got = program(*placed)
    np.testing.assert_array_equal(got, want)
    assert got.sharding.is_equivalent_to(of_stack, 5)


class LayerReader(Engine):
    """Notes what `run_layer` receives, and leaves the call to `run`."""

    name = "layer reader"
    received: ClassVar[list[tuple]] = []

    def run(self, request, layout):
        return ENGINES["reference"].run(request, layout)

    def run_layer(self, request, layout, k, v, layer, *, heads_first=False):
        self.received.append((request.k.shape, request.v.shape, k, v, heads_first))


@every_order
def test_an_engine_receives_the_stacks_as_they_are_and_the_shapes_of_a_layer(heads_first, monkeypatch):
    engine = LayerReader()
    monkeypatch.setattr("longspan.attend.choose", lambda *_: (engine, {}))
    monkeypatch.setattr(engine, "received", [])
    q, k, v = stacks()
    layout = plan_attention_layout(q, k[1], v[1], mask=ls.Causal())
    want = ls.attention(q, k[1], v[1], mask=layout)
    if heads_first:
        k, v = heads_before_slots(k), heads_before_slots(v)
    got = attention_of_layer(q, k, v, 1, mask=layout, heads_first=heads_first)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    ((k_shape, v_shape, k_given, v_given, order),) = engine.received
    assert (k_shape, v_shape, order) == ((B, S, K, H), (B, S, K, V), heads_first)
    assert k_given is k and v_given is v


@needs_native
@pytest.mark.parametrize(
    ("stack", "layer", "slots", "new", "heads_first", "says"),
    [
        ((3, 2, 5, 4), 3, (2, 1), (2, 1, 4), False, "no layer 3"),
        ((3, 2, 5, 4), -1, (2, 1), (2, 1, 4), False, "no layer -1"),
        ((3, 2, 5, 4), 0, (2, 1), (2, 1, 3), False, "do not fit"),
        ((3, 2, 5, 4), 0, (2, 2), (2, 1, 4), False, "do not fit"),
        ((3, 2, 5, 4), 0, (1, 1), (1, 1, 4), False, "do not fit"),
        ((3, 2, 5, 4), 0, (2, 1), (2, 4), False, r"must be \[B, n, ...\]"),
        ((3, 2, 7, 5, 4), 0, (2, 1), (2, 1, 6, 4), True, "do not fit"),
        ((3, 2, 7, 5, 4), 0, (2, 1), (2, 1, 7, 3), True, "do not fit"),
        ((3, 2, 5, 7, 4), 0, (2, 1), (2, 1, 7, 4), True, "do not fit"),
        ((3, 2, 7, 5), 0, (2, 1), (2, 1, 7), True, r"must be \[layers, B, K, slots, H\]"),
    ],
)
def test_rows_that_do_not_fit_are_an_error_not_a_crash(stack, layer, slots, new, heads_first, says):
    where = jnp.zeros(slots, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        jax.block_until_ready(native_put(jnp.ones(stack), layer, where, jnp.ones(new), heads_first=heads_first))
