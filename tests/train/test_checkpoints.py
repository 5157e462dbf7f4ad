"""Checkpoints: which are kept, damage, other shapes and dtypes, a full disk."""

import errno
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from longspan import train
from longspan.train.checkpoints import checkpoint_steps, find_damage
from tests.train.small import Quiet, batches, fitted, losses, metrics, parameters, small, squares

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of 6 steps with checkpoints 2, 4 and 6; and one of 10 steps."""
    folder = tmp_path_factory.mktemp("runs")
    fitted(steps=6, save_every=2, out=folder / "short")
    fitted(steps=10, out=folder / "long")
    return folder


@pytest.fixture
def short(runs, tmp_path):
    shutil.copytree(runs / "short", tmp_path / "run")
    return tmp_path / "run"


def saved(out):
    return checkpoint_steps(out / "checkpoints")


def test_resume_continues_with_the_next_batch_and_equal_bits(short, runs):
    asked, progress = [], Quiet()

    def recorded(step):
        asked.append(step)
        return batches(step)

    _, result = fitted(steps=10, out=short, resume=True, batches=recorded, progress=progress)
    assert asked == [6, 7, 8, 9] and result.resumed_from == 6 and progress.notes == ["resumed from step 6"]
    assert losses(short) == losses(runs / "long")


def test_resume_without_checkpoints_starts(tmp_path, runs):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss_hex": "0x1p+0"}\n{"step": 2')
    progress = Quiet()
    _, result = fitted(steps=10, out=tmp_path, resume=True, progress=progress)
    assert result.resumed_from is None and not progress.notes
    assert losses(tmp_path) == losses(runs / "long")


def test_a_finished_run_does_nothing(short):
    before = (short / "metrics.jsonl").read_text()
    model, result = fitted(steps=6, out=short, resume=True)
    assert result.steps == 6 and (short / "metrics.jsonl").read_text() == before
    loaded = small()
    train.restore(short, loaded)
    for a, b in zip(parameters(model), parameters(loaded), strict=True):
        np.testing.assert_array_equal(a, b)


def test_fewer_steps_than_finished_are_an_error(short):
    with pytest.raises(ValueError, match=re.escape("The run already has 6 steps, more than steps=5. Give at least 6.")):
        fitted(steps=5, out=short, resume=True)


def test_a_folder_with_a_run_is_refused(short):
    with pytest.raises(FileExistsError, match=r"run contains a run. Resume it \(`resume=True`\)"):
        fitted(out=short)


def test_the_newest_are_kept(tmp_path):
    fitted(steps=9, save_every=1, keep=2, out=tmp_path)
    assert saved(tmp_path) == [9, 8]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["8", "9"], "nothing else is left"


def flip_byte(path):
    files = [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def truncate(path):
    largest = max(path.rglob("d/*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def remove_file(path):
    max(path.rglob("d/*"), key=lambda file: file.stat().st_size).unlink()


def remove_summary(path):
    (path / "longspan.json").unlink()


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize("damage", [flip_byte, truncate, remove_file, remove_summary, empty])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage, short, runs):
    damage(short / "checkpoints" / "6")
    assert find_damage(short / "checkpoints" / "6") and find_damage(short / "checkpoints" / "4") is None
    progress = Quiet()
    _, result = fitted(steps=10, out=short, resume=True, progress=progress)
    assert progress.notes == ["checkpoint 6 is damaged: using 4", "resumed from step 4"]
    assert result.resumed_from == 4 and losses(short) == losses(runs / "long")
    assert (short / "checkpoints" / "6.damaged").is_dir() and saved(short)[0] == 10


def test_two_damaged_checkpoints(short):
    flip_byte(short / "checkpoints" / "6")
    empty(short / "checkpoints" / "4")
    progress = Quiet()
    fitted(steps=6, out=short, resume=True, progress=progress)
    assert progress.notes[:2] == ["checkpoint 6 is damaged: using 2", "checkpoint 4 is damaged: using 2"]


def test_damaged_checkpoints_only_are_an_error(short):
    for step in (2, 4, 6):
        flip_byte(short / "checkpoints" / str(step))
    with pytest.raises(ValueError, match=r"All checkpoints in .* are damaged: 6, 4, 2. Start a new run"):
        fitted(out=short, resume=True)
    with pytest.raises(ValueError, match=r"checkpoints/6 is damaged: .* differs from what was written"):
        train.restore(short, small())


def test_other_shapes_and_structures_are_listed(short):
    with pytest.raises(ValueError) as caught:
        fitted(small(width=9), out=short, resume=True)
    message = str(caught.value)
    assert "checkpoints/6 is of another model, dtype or optimizer" in message
    assert "parameters/up/kernel is float32[5, 7] in the checkpoint and float32[5, 9] in this run" in message
    with pytest.raises(ValueError, match=r"optimizer/[\w/]*mu/[\w/]* is in the checkpoint only"):
        fitted(out=short, resume=True, optimizer=optax.sgd(0.1))


def test_other_dtypes_are_listed(short):
    model = small()
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    with pytest.raises(
        ValueError, match=r"parameters/down/bias is float32\[1\] in the checkpoint and bfloat16\[1\] in"
    ):
        fitted(model, out=short, resume=True)
    with pytest.raises(ValueError, match=r"float32\[1\] in the checkpoint and bfloat16\[1\]"):
        train.restore(short, model)


def test_restore_reads_a_step_the_last_or_the_best_one(short, tmp_path):
    model = small()
    assert train.restore(short, model) == 6 and train.restore(short, model, 4) == 4
    want, _ = fitted(steps=4)
    for a, b in zip(parameters(model), parameters(want), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"run has no checkpoint 5, only 6, 4, 2"):
        train.restore(short, model, 5)
    with pytest.raises(ValueError, match="has no best checkpoint, because it had no evaluations"):
        train.restore(short, model, "best")
    with pytest.raises(ValueError, match="has no checkpoints"):
        train.restore(tmp_path / "nowhere", model)


def test_what_a_killed_process_left_is_removed(short):
    for name in (".saving-8", ".saving-8.orbax-checkpoint-tmp", ".old-2"):
        (short / "checkpoints" / name / "d").mkdir(parents=True)
    fitted(steps=7, out=short, resume=True)
    assert saved(short) == [7, 6, 4]
    assert sorted(path.name for path in (short / "checkpoints").iterdir()) == ["4", "6", "7"]


def test_a_full_disk_stops_the_run_with_the_last_checkpoint_intact(tmp_path, monkeypatch):
    """The disk is full when the summary of the second checkpoint is written."""
    dump = json.dump

    def full(summary, file):
        if summary["step"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        dump(summary, file)

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(train.DiskFull, match=r"The disk is full: .*saving-4 could not be written. The last checkpoint"):
        fitted(steps=10, save_every=2, out=tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    monkeypatch.undo()
    fitted(steps=10, save_every=2, out=tmp_path, resume=True)
    assert list(losses(tmp_path)) == list(range(1, 11))


def worse_after(step, model, batch, key):
    """A loss that is trained for some steps, and then its opposite. An evaluation's loss is the plain one."""
    value = squares(model, batch, None)
    if key is None:
        return value
    return jnp.where(batch["step"][0] < step, value, -value)


# Trained and evaluated on one batch: the best evaluation is that after step 6.
BEST_AT_6 = dict(
    batches=lambda step: batches(0) | dict(step=np.full(8, step)), loss=functools.partial(worse_after, 6),
    optimizer=optax.sgd(0.02), eval_batches=[batches(0)], eval_every=2,
)  # fmt: skip


def test_the_best_checkpoint_is_kept_and_restored(tmp_path):
    model, result = fitted(small(rate=0.0), steps=12, out=tmp_path, save_every=1, keep=2, **BEST_AT_6)
    found = {line["step"]: line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line}
    assert list(found) == [2, 4, 6, 8, 10, 12] and min(found, key=found.__getitem__) == 6
    assert result.best_step == 6 and result.best_loss == found[6]
    assert saved(tmp_path) == [12, 11, 6]
    restored = small(rate=0.0)
    assert train.restore(tmp_path, restored, "best") == 6
    assert any((a != b).any() for a, b in zip(parameters(restored), parameters(model), strict=True))


def test_early_stopping_counts_evaluations_also_across_a_resume(tmp_path):
    given = dict(**BEST_AT_6, patience=3)
    _, whole = fitted(small(rate=0.0), steps=40, out=tmp_path / "whole", **given)
    assert whole.stopped_early and whole.steps == 12 and whole.best_step == 6
    fitted(small(rate=0.0), steps=9, out=tmp_path / "parts", **given)
    _, result = fitted(small(rate=0.0), steps=40, out=tmp_path / "parts", resume=True, **given)
    # The shorter run has one more evaluation, after its last step.
    assert result.stopped_early and result.steps == 10 and result.best_step == 6


def test_metrics_of_evaluations_are_weighted_means(tmp_path):
    def evaluate(model, batch):
        return dict(eval_loss=batch["value"][0], accuracy=(batch["value"][0], batch["weight"][0]))

    held_out = [dict(value=np.full(2, v, np.float32), weight=np.full(2, w, np.float32)) for v, w in ((1, 3), (5, 1))]
    fitted(steps=1, out=tmp_path, eval_batches=held_out, eval_every=1, evaluate=evaluate)
    assert metrics(tmp_path)[-1] == dict(step=1, eval_loss=3.0, accuracy=2.0)


def test_a_loss_of_held_out_batches_without_targets_is_unknown_and_not_the_best(tmp_path):
    evaluate = lambda model, batch: dict(eval_loss=(0.0, 0.0))  # noqa: E731
    _, result = fitted(steps=1, out=tmp_path, eval_batches=[batches(0)], eval_every=1, evaluate=evaluate)
    assert metrics(tmp_path)[-1] == dict(step=1, eval_loss=None) and result.best_step is None
