"""Runs on eight devices give the losses of one device."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan import train
from tests.train import decoder, small
from tests.train.small import Quiet, fitted

pytestmark = [pytest.mark.mesh, pytest.mark.usefixtures("unchecked")]


def losses_of(**given):
    seen = []

    class Losses(Quiet):
        def step(self, record):
            seen.append(record["loss"])

    model, _ = fitted(progress=Losses(), **given)
    return np.array(seen), model


@pytest.fixture(scope="module")
def one_device():
    """The losses of the small decoder and of the small model with dropout."""
    given = dict(batches=decoder.batches, loss=decoder.loss_on(), optimizer=decoder.OPTIMIZER, steps=4)
    return dict(decoder=losses_of(model=decoder.model(), **given)[0], small=losses_of(steps=4)[0])


@pytest.mark.check
def test_a_decoder_on_a_mesh_has_the_losses_of_one_device(one_device):
    """Rows over fsdp, heads over tp, packed documents over sp, and two parts of a batch."""
    mesh = ls.parallel.mesh(fsdp=2, tp=2, sp=2)
    given = dict(batches=decoder.batches, loss=decoder.loss_on(mesh), optimizer=decoder.OPTIMIZER, steps=4)
    found, model = losses_of(model=decoder.model(), mesh=mesh, accumulate=2, **given)
    np.testing.assert_allclose(found, one_device["decoder"], rtol=0, atol=1e-5)
    assert model.layers[0].mlp.up.kernel[...].sharding.spec == P(None, "fsdp", "tp")
    assert model.layers[0].attention.out.kernel[...].sharding.spec == P(None, "tp", "fsdp")


@pytest.mark.parametrize("sizes", [dict(dp=8), dict(dp=2, fsdp=2)], ids=str)
def test_dropout_on_a_mesh_is_that_of_one_device(sizes, one_device):
    found, _ = losses_of(steps=4, mesh=ls.parallel.mesh(**sizes))
    np.testing.assert_allclose(found, one_device["small"], rtol=0, atol=1e-6)


def test_a_checkpoint_resumes_on_another_number_of_devices(tmp_path, one_device):
    fitted(steps=2, out=tmp_path, mesh=ls.parallel.mesh(fsdp=4))
    fitted(steps=3, out=tmp_path, resume=True, mesh=ls.parallel.mesh(dp=2, fsdp=2))
    fitted(steps=4, out=tmp_path, resume=True)
    found = [float.fromhex(text) for text in small.losses(tmp_path).values()]
    np.testing.assert_allclose(found, one_device["small"], rtol=0, atol=1e-6)
    model = small.small()
    assert train.restore(tmp_path, model, 3) == 3
    assert all(x.sharding.device_set == {jax.devices()[0]} for x in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize(
    "sizes, given, message",
    [
        (dict(dp=3), {}, r"A batch has 8 rows, which cannot be divided into 1 parts \(`accumulate`\) on 3 devices"),
        (dict(dp=4), dict(accumulate=4), r"into 4 parts \(`accumulate`\) on 4 devices .* Use a multiple of 16 rows"),
        (dict(sp=2), {}, r"A batch has 5 tokens per row, which cannot be divided over 2 devices \(sp\). Use a"),
    ],
)
def test_batches_that_devices_cannot_share(sizes, given, message):
    with pytest.raises(ValueError, match=message):
        fitted(mesh=ls.parallel.mesh(**sizes), **given)
