"""The native product of a few rows with matrices in a stack, against float64, on every instruction set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspan.engines import multiply
from longspan.engines.cpu import library
from longspan.engines.cpu.product import MAX_ROWS, can_multiply, products

pytestmark = pytest.mark.skipif(library.missing() is not None, reason="the native library is not there")
SETS = () if library.missing() else library.instruction_sets()
LAYERS = 3


def draw(*shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype), dtype)


def exact(x, matrix, layer, by_outer):
    matrix = np.asarray(matrix, np.float64)
    own = matrix[layer] if matrix.ndim == 3 else matrix
    return np.asarray(x, np.float64) @ (own.T if by_outer else own)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("by_outer", [False, True])
def test_products_are_exact(isa, dtype, by_outer, monkeypatch):
    """Widths below, at and above the size of one piece and one vector; rows that do not fill a group."""
    monkeypatch.setenv("LONGSPAN_CPU_ISA", isa)
    for rows, inner, sizes in [(1, 67, (1, 130)), (5, 8, (63, 64, 65)), (17, 33, (9,)), (MAX_ROWS, 19, (2500,))]:
        x = draw(rows, inner)
        shapes = [(LAYERS, size, inner) if by_outer else (LAYERS, inner, size) for size in sizes]
        matrices = [draw(*shape, dtype=dtype) for shape in shapes]
        got = products(x, matrices, 1, by_outer=by_outer)
        for y, matrix in zip(got, matrices, strict=True):
            want = exact(x, matrix, 1, by_outer)
            bound = np.abs(np.asarray(x, np.float64)) @ np.abs(exact(np.eye(inner), matrix, 1, by_outer))
            assert y.dtype == np.float32 and y.shape == want.shape
            assert np.all(np.abs(np.asarray(y) - want) <= 2e-7 * inner * bound + 1e-30)


def test_a_row_has_the_same_bits_in_every_batch():
    x, matrix = draw(MAX_ROWS, 70), draw(LAYERS, 70, 300)
    (together,) = products(x, [matrix], 2)
    for row in (0, 15, 16, 63):
        np.testing.assert_array_equal(products(x[row : row + 1], [matrix], 2)[0][0], together[row])


def test_single_matrices_need_no_layer():
    x, matrix = draw(2, 9), draw(9, 4)
    np.testing.assert_allclose(products(x, [matrix])[0], exact(x, matrix, 0, False), rtol=1e-5, atol=1e-6)


def test_infinity_and_nan_stay():
    x = jnp.array([[1.0, jnp.inf, 0.0], [jnp.nan, 0.0, 1.0]])
    got = np.asarray(products(x, [jnp.ones((3, 70))])[0])
    assert np.isposinf(got[0]).all() and np.isnan(got[1]).all()


@pytest.mark.parametrize(
    ("x", "matrix", "layer", "says"),
    [
        ((2, 5), (3, 6, 4), 0, "does not fit x"),
        ((2, 5), (3, 5, 4), 3, "no such layer"),
        ((2, 5), (3, 5, 4), -1, "no such layer"),
        ((MAX_ROWS + 1, 5), (3, 5, 4), 0, "at most 64 rows"),
        ((2, 5), (5,), 0, "two axes"),
    ],
)
def test_a_call_that_does_not_fit_is_an_error_not_a_crash(x, matrix, layer, says):
    result = (jax.ShapeDtypeStruct((x[0], 4), np.float32),)
    call = jax.ffi.ffi_call("longspan_product", result)
    with pytest.raises(Exception, match=says):
        jax.block_until_ready(call(jnp.ones(x), jnp.int32(layer), jnp.ones(matrix), by_outer=np.int64(0)))


def test_a_program_exported_with_the_layer_as_an_attribute_still_runs():
    x, matrix = draw(2, 9), draw(LAYERS, 9, 4)
    call = jax.ffi.ffi_call("longspan_product", (jax.ShapeDtypeStruct((2, 4), np.float32),))
    (got,) = call(x, matrix, layer=np.int64(2), by_outer=np.int64(0))
    np.testing.assert_array_equal(got, products(x, [matrix], 2)[0])


def test_the_layer_may_be_traced():
    x, matrix = draw(2, 9), draw(LAYERS, 9, 4)
    got = jax.lax.map(lambda layer: products(x, [matrix], layer)[0], jnp.arange(LAYERS))
    np.testing.assert_array_equal(got, np.stack([products(x, [matrix], layer)[0] for layer in range(LAYERS)]))


@pytest.mark.parametrize("layer", [jnp.float32(0), jnp.zeros(1, jnp.int32)])
def test_the_layer_is_one_int(layer):
    call = jax.ffi.ffi_call("longspan_product", (jax.ShapeDtypeStruct((2, 4), np.float32),))
    with pytest.raises(Exception, match=r"the layer must be int32 \[\]"):
        jax.block_until_ready(call(jnp.ones((2, 9)), layer, jnp.ones((9, 4)), by_outer=np.int64(0)))


def test_unsupported_rows_and_dtypes_are_refused():
    assert can_multiply(1, np.float32, jnp.bfloat16)
    assert not can_multiply(MAX_ROWS + 1, np.float32)
    assert not can_multiply(1, np.float16)


@pytest.mark.parametrize("by_outer", [False, True])
def test_gradients_and_vmap_are_those_of_the_plain_product(by_outer):
    x, matrix = draw(2, 1, 9), draw(LAYERS, *((4, 9) if by_outer else (9, 4)))

    def loss(x, matrix, native):
        own = matrix[1].T if by_outer else matrix[1]
        y = multiply(x, [matrix], 1, by_outer=by_outer)[0] if native else x @ own
        return jnp.sum(jnp.sin(y))

    for number in (0, 1):
        got, want = (jax.grad(loss, number)(x, matrix, native) for native in (True, False))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    several = draw(3, 2, 1, 9)
    got = jax.vmap(lambda x: multiply(x, [matrix], 1, by_outer=by_outer)[0])(several)
    np.testing.assert_allclose(got, multiply(several, [matrix], 1, by_outer=by_outer)[0], rtol=1e-5, atol=1e-6)
