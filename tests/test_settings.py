"""The suite runs under the settings that CONTRIBUTING.md promises."""

import warnings

import beartype
import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import Array, Float

import longspan


def test_there_is_one_device_as_most_users_have():
    assert jax.default_backend() == "cpu"
    assert jax.device_count() == 1


@pytest.mark.mesh
def test_a_test_of_meshes_has_eight_devices():
    assert jax.device_count() == 8


def test_dtypes_and_ranks_are_not_promoted_silently():
    with pytest.raises(Exception, match="dtype promotion"):
        jnp.ones(3, jnp.float32) + jnp.ones(3, jnp.int32)
    with pytest.raises(ValueError, match="rank"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_warnings_are_errors():
    with pytest.raises(UserWarning):
        warnings.warn("seen", UserWarning, stacklevel=1)


def test_property_tests_try_enough_examples():
    assert hypothesis.settings.default is not None
    assert hypothesis.settings.default.max_examples in (80, 2000)
    assert hypothesis.settings.default.deadline is None


def test_the_package_is_shape_checked():
    assert hasattr(longspan.testing.make_qkv, "__wrapped__")


def test_a_test_can_switch_the_shape_checker_off(request):
    @jaxtyping.jaxtyped(typechecker=beartype.beartype)
    def rank(x: Float[Array, "T S"]) -> int:
        return x.ndim

    with pytest.raises(jaxtyping.TypeCheckError):
        rank(jnp.ones(3))
    request.getfixturevalue("unchecked")
    assert rank(jnp.ones(3)) == 1
