"""Options of models in a run: computation in bfloat16, and layers that are computed again."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train import decoder
from tests.train.small import Quiet, fitted, parameters

pytestmark = [pytest.mark.check, pytest.mark.usefixtures("unchecked")]


def losses_of(model, **call):
    """The losses of three steps, and the trained model."""
    seen = []

    class Losses(Quiet):
        def step(self, record):
            seen.append(record["loss"])

    loss = decoder.loss_on(**call)
    fitted(model, batches=decoder.batches, loss=loss, optimizer=decoder.OPTIMIZER, steps=3, progress=Losses())
    return np.array(seen), model


def test_computation_in_bfloat16_keeps_weights_in_float32_and_remat_changes_nothing():
    whole, _ = losses_of(decoder.model())
    again, _ = losses_of(decoder.model(), remat=True)
    np.testing.assert_allclose(again, whole, rtol=0, atol=1e-6)
    narrow, model = losses_of(decoder.model(dtype=jnp.bfloat16))
    assert {x.dtype for x in parameters(model)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(narrow, whole, rtol=0.02)
    assert (narrow != whole).all()
