"""The loop: losses, accumulation, dropout keys, evaluations, metrics."""

import jax
import numpy as np
import optax
from flax import nnx

from tests.train.small import Quiet, batches, fitted, losses, metrics, parameters, small, squares


def test_a_step_is_the_optimizers_update_of_the_gradients():
    model, optimizer = small(rate=0.0), optax.sgd(0.1)
    graph, state = nnx.split(small(rate=0.0))
    for step in range(3):
        gradients = jax.grad(lambda s, b: squares(nnx.merge(graph, s), b, None))(state, batches(step))
        state = jax.tree.map(lambda x, g: x - np.float32(0.1) * g, state, gradients)
    fitted(model, optimizer=optimizer, steps=3)
    for got, want in zip(parameters(model), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_metrics_have_one_line_per_step(tmp_path):
    _, result = fitted(steps=7, out=tmp_path)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    for line in lines:
        assert list(line) == ["step", "loss", "loss_hex", "lr", "tokens", "seconds"]
        assert float.fromhex(line["loss_hex"]) == line["loss"] and line["seconds"] > 0
    assert result.loss == lines[-1]["loss"] and result.steps == 7
    rates = [0.01, 0.02, 0.03, 0.04]
    np.testing.assert_allclose([line["lr"] for line in lines[:4]], rates, rtol=1e-6)


def test_the_learning_rate_is_null_if_the_optimizer_does_not_tell_it(tmp_path):
    fitted(steps=1, out=tmp_path, optimizer=optax.sgd(0.1))
    assert metrics(tmp_path)[0]["lr"] is None


def test_resume_continues_with_the_next_batch_and_equal_bits(tmp_path):
    fitted(steps=10, out=tmp_path / "whole")
    fitted(steps=4, out=tmp_path / "parts")
    asked, progress = [], Quiet()

    def recorded(step):
        asked.append(step)
        return batches(step)

    _, result = fitted(small(), steps=10, out=tmp_path / "parts", resume=True, batches=recorded, progress=progress)
    assert asked == list(range(4, 10)) and result.resumed_from == 4 and progress.notes == ["resumed from step 4"]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
