"""The loop: losses, accumulation, dropout keys, metrics, errors."""

import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from longspan import train
from tests.train.small import Quiet, batches, fitted, losses, metrics, parameters, small, squares

pytestmark = pytest.mark.usefixtures("unchecked")


def test_a_step_is_the_optimizers_update_of_the_gradients():
    model, optimizer = small(rate=0.0), optax.sgd(0.1)
    graph, state = nnx.split(small(rate=0.0))
    gradients = jax.jit(jax.grad(lambda s, b: squares(nnx.merge(graph, s), b, None)))
    for step in range(3):
        state = jax.tree.map(lambda x, g: np.asarray(x) - np.float32(0.1) * g, state, gradients(state, batches(step)))
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
    np.testing.assert_allclose([line["lr"] for line in lines[:4]], [0.01, 0.02, 0.03, 0.04], rtol=1e-6)


def test_the_learning_rate_is_null_if_the_optimizer_does_not_tell_it(tmp_path):
    fitted(steps=1, out=tmp_path, optimizer=optax.sgd(0.1))
    assert metrics(tmp_path)[0]["lr"] is None


def test_tokens_are_counted_without_padding(tmp_path):
    def with_ids(step):
        return batches(step) | dict(segment_ids=np.where(np.arange(24).reshape(8, 3) < 4 + step, 0, -1))

    fitted(steps=2, out=tmp_path, batches=with_ids)
    assert [line["tokens"] for line in metrics(tmp_path)] == [4, 5]


def test_dropout_keys_depend_on_key_and_step_alone():
    fixed = lambda step: batches(0)  # noqa: E731
    still = train.adamw(1e-30, steps=3, warmup=0)

    def run(steps, **given):
        seen = []

        class Losses(Quiet):
            def step(self, record):
                seen.append(record["loss_hex"])

        fitted(steps=steps, batches=fixed, optimizer=still, progress=Losses(), **given)
        return seen

    first = run(3)
    assert len(set(first)) == 3, "every step has its own key"
    assert run(3) == first and run(2) == first[:2]
    assert set(run(3, key=jax.random.key(1))).isdisjoint(first)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_gradients_equal_those_of_the_whole_batch(parts, tmp_path):
    """Rows have weights, so parts have other weights than their numbers of rows; one part has none at all."""

    def weighted(step):
        weights = [[1, 1, 1, 0, 0, 2, 0, 0], [3, 0, 0, 0, 5, 0, 1, 0]][step % 2]
        return batches(step) | dict(weight=np.array(weights, np.float32))

    def loss(model, batch, key):
        weight = batch["weight"][:, None]
        total = jnp.sum(weight)
        each = jnp.square(model(batch["x"], key) - batch["y"])
        return jnp.sum(weight * each) / jnp.where(total > 0, total, 1), total

    common = dict(batches=weighted, loss=loss, steps=5)
    whole, _ = fitted(small(rate=0.0), out=tmp_path / "whole", **common)
    split, _ = fitted(small(rate=0.0), out=tmp_path / "parts", accumulate=parts, **common)
    for a, b in zip(parameters(split), parameters(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(metrics(tmp_path / "parts"), metrics(tmp_path / "whole"), strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)


class Counting(nnx.Module):
    """A model with variables that are not trained: a counter, and a stream of random numbers."""

    def __init__(self):
        self.weight, self.calls = nnx.Param(jnp.ones(3)), nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.rngs = nnx.Rngs(dropout=5)

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return jnp.sum(self.weight[...][None] * x, axis=-1) + jax.random.normal(self.rngs.dropout(), x.shape[:1])


def test_variables_that_are_not_trained_are_kept_and_resumed(tmp_path):
    loss = lambda model, batch, key: jnp.mean(jnp.square(model(batch)))  # noqa: E731
    given = dict(loss=loss, batches=lambda step: np.ones((4, 3), np.float32), accumulate=2)
    model, _ = fitted(Counting(), steps=5, out=tmp_path / "whole", **given)
    assert int(model.calls[...]) == 10
    fitted(Counting(), steps=2, out=tmp_path / "parts", **given)
    model, _ = fitted(Counting(), steps=5, out=tmp_path / "parts", resume=True, **given)
    assert int(model.calls[...]) == 10
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_the_callers_arrays_stay():
    model = small()
    before = nnx.state(model, nnx.Param)
    fitted(model, steps=2)
    for kept, now in zip(jax.tree.leaves(before), parameters(model), strict=True):
        assert np.asarray(kept).shape == now.shape, "not donated"


def test_the_batch_of_a_step_is_made_while_the_step_before_runs():
    """The loss of a step is read after the next step was started."""
    events = []

    class Events(Quiet):
        def step(self, record):
            events.append(f"read {record['step']}")

    def asked(step):
        events.append(f"batch {step + 1}")
        return batches(step)

    fitted(steps=3, batches=asked, progress=Events())
    assert events == ["batch 1", "batch 2", "read 1", "batch 3", "read 2", "read 3"]


def test_a_step_compiles_once_per_shape():
    seen = []

    class Compiling(Quiet):
        def compiling(self, what):
            seen.append(what)

    fitted(steps=6, batches=lambda step: rows_of(step, 4 + 2 * (step % 2)), progress=Compiling())
    assert seen == ["the training step for 4 x 5", "the training step for 6 x 5"]


def test_compiling_for_another_shape_does_not_hide_the_seconds_of_the_step_before(tmp_path):
    """A step is read before the next program is compiled, so its seconds are its own."""
    events = []

    class Events(Quiet):
        def compiling(self, what):
            events.append(what.removeprefix("the training step for "))

        def step(self, record):
            events.append(record["step"])

    fitted(steps=3, batches=lambda step: rows_of(step, 4 + 2 * (step == 1)), progress=Events())
    assert events == ["4 x 5", 1, "6 x 5", 2, 3]


def test_weights_decay_but_norms_and_biases_do_not():
    model = small()
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer = train.adamw(0.1, steps=1, warmup=0, weight_decay=0.5)
    fitted(model, steps=1, optimizer=optimizer, loss=lambda model, batch, key: 0 * squares(model, batch, key))
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for module in ("up", "down"):
        np.testing.assert_allclose(after[module]["kernel"], 0.95 * np.asarray(before[module]["kernel"]), rtol=1e-6)
        np.testing.assert_array_equal(after[module]["bias"], before[module]["bias"])
    for name in ("scale", "bias"):
        np.testing.assert_array_equal(after["norm"][name], before["norm"][name])


def test_the_rate_rises_to_the_peak_and_falls_to_its_end(tmp_path):
    fitted(steps=9, out=tmp_path, optimizer=train.adamw(2.0, steps=9, warmup=3, final=0.25))
    rates = [line["lr"] for line in metrics(tmp_path)]
    np.testing.assert_allclose(rates[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(rates[-1], 0.5, rtol=1e-6)
    assert (np.diff(rates[3:]) < 0).all()


def test_gradients_are_clipped_to_their_norm():
    optimizer = train.adamw(1.0, steps=3, clip=0.5, eps=1e6, weight_decay=0.0, warmup=0)  # a large eps: linear
    free = train.adamw(1.0, steps=3, clip=None, eps=1e6, weight_decay=0.0, warmup=0)
    gradients = dict(kernel=jnp.array([3.0, 4.0]))
    with jax.numpy_dtype_promotion("standard"):
        update = jax.jit(lambda g: [one.update(g, one.init(g), g)[0]["kernel"] for one in (optimizer, free)])
        clipped, whole = update(gradients)
    np.testing.assert_allclose(clipped / whole, 0.1, rtol=0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_stops(number, tmp_path):
    def interrupting(step):
        if step == 3:
            os.kill(os.getpid(), number)
        return batches(step)

    before = signal.getsignal(number)
    with pytest.raises(train.Interrupted, match="interrupted after step 4"):
        fitted(steps=10, out=tmp_path, batches=interrupting)
    assert signal.getsignal(number) is before
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
    fitted(steps=10, out=tmp_path, resume=True)
    fitted(steps=10, out=tmp_path / "whole")
    assert losses(tmp_path) == losses(tmp_path / "whole")


def test_a_second_interrupt_stops_at_once(tmp_path):
    def interrupting(step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return batches(step)

    with pytest.raises(KeyboardInterrupt) as caught:
        fitted(steps=10, out=tmp_path, batches=interrupting)
    assert not isinstance(caught.value, train.Interrupted)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    def loss(model, batch, key):
        return squares(model, batch, key) * batch["factor"][0]

    factors = lambda step: batches(step) | dict(factor=np.full(8, np.nan if step == 2 else 1, np.float32))  # noqa: E731
    with pytest.raises(FloatingPointError, match=re.escape("The loss of step 3 is nan. Train again with a lower")):
        fitted(steps=9, out=tmp_path, loss=loss, batches=factors, save_every=2)
    last = metrics(tmp_path)[-1]
    assert last["step"] == 3 and last["loss"] is None and last["loss_hex"] == "nan"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]


def test_a_loss_may_be_an_object_without_a_hash():
    class Loss:
        __hash__ = None

        def __call__(self, model, batch, key):
            return squares(model, batch, key)

    assert fitted(steps=1, loss=Loss())[1].loss == fitted(steps=1)[1].loss


def rows_of(step, rows):
    return jax.tree.map(lambda x: x[:rows], batches(step))


ERRORS = {
    "steps": (dict(steps=-1), "`steps` must be a Python int >= 0, got -1"),
    "accumulate": (dict(accumulate=3), "A batch has 8 rows, which cannot be divided into 3 parts (`accumulate`) on 1 "),
    "rows": (
        dict(batches=lambda step: dict(x=np.ones((4, 5)), y=np.ones((3, 1)))),
        "different numbers of rows: [3, 4]",
    ),
    "nothing": (dict(batches=lambda step: dict(x=np.float32(1))), "returned no array with rows"),
    "loss": (dict(loss=lambda m, b, k: jnp.ones(3)), "`loss` must be a scalar or a pair (scalar, weight), got arrays"),
    "eval_every": (dict(eval_every=3), "`eval_batches` and `eval_every` belong together"),
    "patience": (dict(patience=3), "`evaluate` and `patience` need evaluations"),
    "eval_batches": (dict(eval_every=3, eval_batches=[]), "`eval_batches` is empty"),
    "eval_loss": (
        dict(eval_every=1, eval_batches=[batches(0)], evaluate=lambda model, batch: dict(accuracy=1.0)),
        "`evaluate` returned accuracy. 'eval_loss' must be among them",
    ),
}


@pytest.mark.parametrize("given, message", ERRORS.values(), ids=list(ERRORS))
def test_errors(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fitted(**given)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(learning_rate=0.0, steps=5), "`learning_rate` must be positive, got 0.0"),
        (dict(learning_rate=1.0, steps=5, warmup=5), "`warmup` must be less than the 5 steps of the run, got 5"),
    ],
)
def test_errors_of_adamw(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train.adamw(**given)
