"""One layer of stacked caches: attention reads it, and `put` writes it, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.attend import attention_of_layer, plan_attention_layout
from longspan.engines import put
from longspan.engines.cpu import library
from longspan.engines.cpu.put import put as native_put

LAYERS, B, T, S, N, K, H, V = 3, 2, 1, 37, 6, 2, 7, 5
FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]
needs_native = pytest.mark.skipif(library.missing() is not None, reason="the native library is not there")


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
def test_a_layer_of_a_stack_gives_the_result_of_the_layer_alone(dtype):
    q, k, v = stacks(dtype)
    mask, options = ls.Causal() & ls.Window(20, 0), dict(scale=0.3, soft_cap=4.0)
    where = jax.device_put(dict(q_positions=np.array([[S - 1], [25]]), kv_positions=np.arange(S)))
    own = jax.device_put((np.asarray(k)[1], np.asarray(v)[1]))
    layout = plan_attention_layout(q, *own, mask=mask, **where, **options)
    got = jax.jit(lambda q, k, v, layer: attention_of_layer(q, k, v, layer, mask=layout, **options))(q, k, v, 1)
    want = ls.attention(q, *own, mask=mask, **where, **options)
    assert got.dtype == dtype and np.isfinite(np.asarray(got, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_put_into_their_slots_and_nowhere_else(dtype):
    stack, new = draw(LAYERS, B, S, K, H, dtype=dtype), draw(B, 2, K, H, dtype=dtype)
    slots = jnp.array([[4, S], [S - 1, -1]], jnp.int32)  # slots out of range are skipped
    want = np.array(stack)
    want[2, 0, 4], want[2, 1, S - 1] = new[0, 0], new[1, 0]
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda *all: put(*all))(stack, 2, slots, new)), want)
    np.testing.assert_array_equal(np.asarray(put(stack, 2, slots, new)), want)  # the operand is unchanged


@pytest.mark.usefixtures("native")
def test_overwritten_rows_have_no_gradient_and_new_rows_that_of_their_slot():
    stack, new, weights = draw(LAYERS, B, S, K, H), draw(B, 2, K, H), draw(LAYERS, B, S, K, H)
    slots = jnp.array([[4, S], [S - 1, -1]], jnp.int32)
    of_stack, of_new = jax.jit(jax.grad(lambda *x: jnp.sum(weights * put(x[0], 2, slots, x[1])), (0, 1)))(stack, new)
    want, wanted = np.array(weights), np.zeros(new.shape, np.float32)
    for row, slot in ((0, 4), (1, S - 1)):
        want[2, row, slot], wanted[row, 0] = 0, weights[2, row, slot]
    np.testing.assert_array_equal(of_stack, want)
    np.testing.assert_array_equal(of_new, wanted)


@needs_native
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_loop_puts_rows_in_place(dtype):
    def fill(stack, slots, new):
        return jax.lax.fori_loop(0, LAYERS, lambda layer, stack: put(stack, layer, slots, new), stack)

    stack, new = jnp.zeros((LAYERS, B, S, K, H), dtype), draw(B, 1, K, H, dtype=dtype)
    program = jax.jit(fill, donate_argnums=0).lower(stack, jnp.zeros((B, 1), jnp.int32), new).compile()
    assert program.memory_analysis().temp_size_in_bytes < stack.nbytes // LAYERS // 4
    got = np.asarray(program(stack, jnp.full((B, 1), 9, jnp.int32), new))
    assert np.count_nonzero(got) == np.count_nonzero(got[:, :, 9]) == LAYERS * new.size


@needs_native
@pytest.mark.parametrize(
    ("stack", "layer", "slots", "new", "says"),
    [
        ((3, 2, 5, 4), 3, (2, 1), (2, 1, 4), "no layer 3"),
        ((3, 2, 5, 4), -1, (2, 1), (2, 1, 4), "no layer -1"),
        ((3, 2, 5, 4), 0, (2, 1), (2, 1, 3), "do not fit"),
        ((3, 2, 5, 4), 0, (2, 2), (2, 1, 4), "do not fit"),
        ((3, 2, 5, 4), 0, (1, 1), (1, 1, 4), "do not fit"),
        ((3, 2, 5, 4), 0, (2, 1), (2, 4), r"must be \[B, n, ...\]"),
    ],
)
def test_rows_that_do_not_fit_are_an_error_not_a_crash(stack, layer, slots, new, says):
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        jax.block_until_ready(native_put(jnp.ones(stack), layer, jnp.zeros(slots, jnp.int32), jnp.ones(new)))
