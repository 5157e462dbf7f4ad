"""One process of a run: it trains, then writes the folder's model, the best model and the picture of the losses."""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from longspan.cli.notices import say
from longspan.cli.train.batches import TrainBatches, make_batches
from longspan.cli.train.inputs import TrainInputs, read_inputs
from longspan.cli.train.settings import RUN_FILE, RunFile, TrainSettings, is_worker

BAD_INPUT, DISK_FULL, INTERRUPTED = 2, 4, 130
MODEL, BEST = "model", "best"
SAME_ERROR_SECONDS = 2


def check_out(run: Path) -> None:
    """Raises unless a new run can be created there."""
    if run.is_dir() and any(run.iterdir()):
        raise FileExistsError(
            f"{run} exists and is not empty. Continue the run in it with --resume {run}, or name another --out."
        )
    if run.exists() and not run.is_dir():
        raise NotADirectoryError(f"{run} is a file. Name a folder as --out.")
    parent = next(folder for folder in (run, *run.absolute().parents) if folder.is_dir())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{run} cannot be created: {parent} is not writable. Name another --out.")


def create(run: Path, file: RunFile, others: bool = False) -> None:
    """Creates the folder with its `run.json`. With several processes, all of them wait for it."""
    from longspan.train.disk import DiskFull, is_full

    _wait_for_others("checked", others)  # each process of a cluster has seen that there was no such folder
    if not is_worker() and (not others or is_first()):
        try:
            run.mkdir(parents=True, exist_ok=True)
            file.write(run)
        except OSError as error:
            if not is_full(error):
                raise
            raise DiskFull(f"The disk is full: {run / RUN_FILE} could not be written. Free some space.") from error
    _wait_for_others("created", others)


def _wait_for_others(name: str, others: bool) -> None:
    if others:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def discard_empty(run: Path) -> None:
    """Removes the folder of a run that has made no step, so that a corrected command can name it again."""
    from longspan.train.checkpoints import CHECKPOINTS, checkpoint_steps
    from longspan.train.report import METRICS
    from longspan.train.supervisor import WORKERS

    metrics = run / METRICS
    if checkpoint_steps(run / CHECKPOINTS) or (metrics.exists() and metrics.stat().st_size):
        return
    with suppress(OSError):  # the folder stays if anything else is in it
        for name in (RUN_FILE, METRICS, WORKERS):
            (run / name).unlink(missing_ok=True)
        for folder in (run / CHECKPOINTS, run):
            if folder.is_dir():
                folder.rmdir()


def is_first() -> bool:
    """Whether this process has rank 0."""
    import jax

    return jax.process_index() == 0


def prepare(settings: TrainSettings) -> tuple[TrainInputs, TrainBatches]:
    """The checked input and the batches of a run. No device is used."""
    inputs = read_inputs(settings)
    batches = make_batches(inputs)
    return inputs._replace(settings=batches.settings), batches


def check_same(run: Path, file: RunFile, inputs: TrainInputs) -> None:
    """Raises if the files that a run started from have changed."""
    places = dict(model=inputs.start.where, data=str(inputs.settings.data or "the standard library"))
    changed = [places[name] for name, digest in inputs.digests.items() if file.digests.get(name) != digest]
    if changed:
        raise ValueError(
            f"{' and '.join(changed)} changed since {run} was started, so its batches or its model would differ. "
            "Restore the old files, or start a new run with --out."
        )


def check_steps(run: Path, settings: TrainSettings) -> None:
    """Raises if the run has more steps than it should have."""
    from longspan.train.checkpoints import CHECKPOINTS, checkpoint_steps

    done = max(checkpoint_steps(run / CHECKPOINTS), default=0)
    if settings.steps is not None and settings.steps < done:
        raise ValueError(f"--steps {settings.steps}: {run} already has {done} steps. Give at least {done}.")


def exit_code(run: Path, work: Callable[[], int]) -> int:
    """The exit code of a function that trains; the ends of a run that are not errors of the input have their own."""
    from longspan.train import DiskFull, Interrupted

    try:
        return work()
    except DiskFull as error:
        say(f"longspan train: {error}")
        return DISK_FULL
    except Interrupted as stopped:
        if is_first():
            again = f"Continue with: longspan train --resume {run}"
            say(f"longspan train: interrupted; step {stopped.step} is saved. {again}")
        return INTERRUPTED
    except Exception:
        if is_worker() and not is_first():
            # In most cases rank 0 has the same error. Then the supervisor ends this process before it prints it again.
            time.sleep(SAME_ERROR_SECONDS)
        raise


def train_in(run: Path, inputs: TrainInputs, batches: TrainBatches) -> None:
    """Trains in this process, from the last checkpoint if there is one, and writes the results."""
    import jax

    from longspan.cli.train.objective import make_model, make_task
    from longspan.cli.train.progress import metric_words, progress_here
    from longspan.train import adamw, fit
    from longspan.train.checkpoints import CHECKPOINTS, checkpoint_steps

    settings = inputs.settings
    assert settings.steps is not None and settings.learning_rate is not None and settings.save_every is not None
    mesh = make_mesh(settings)
    (model, embedder), task, progress = make_model(inputs), make_task(inputs, mesh), progress_here()
    evaluation: dict[str, Any] = {}
    if batches.held_out:
        evaluation = dict(eval_batches=batches.held_out, eval_every=settings.eval_every, evaluate=task.evaluate)
        evaluation |= dict(patience=settings.patience)
        if jax.process_count() == 1 and not checkpoint_steps(run / CHECKPOINTS):
            progress.note(f"before training: {metric_words(measure(model, task, batches.held_out, mesh))}")
    rule: dict[str, Any] = dict(warmup=settings.warm_up, weight_decay=settings.weight_decay, clip=settings.clip or None)
    result = fit(
        model,
        batches.batches,
        task.loss,
        adamw(settings.learning_rate, settings.steps, **rule),
        steps=settings.steps,
        out=run,
        save_every=settings.save_every,
        keep=settings.keep,
        resume=True,
        accumulate=settings.accumulate,
        mesh=mesh,
        key=jax.random.key(settings.seed),
        progress=progress,
        **evaluation,
    )
    write_results(run, inputs, model, embedder, result)


def make_mesh(settings: TrainSettings) -> Any:
    """The devices of the run; None for one device."""
    import jax

    from longspan.parallel import mesh

    sizes: dict[str, Any] = settings.mesh_sizes
    if math.prod(sizes.values()) == 1 and jax.process_count() == 1:
        return None
    return mesh(**sizes)


def measure(model: Any, task: Any, held_out: Any, mesh: Any = None) -> dict[str, float]:
    """The metrics of a model on held-out batches."""
    from longspan.train.evaluation import Evaluations
    from longspan.train.state import split_model
    from longspan.train.step import TrainState

    evaluations = Evaluations(task.loss, held_out, 1, task.evaluate, None)
    model.eval()
    evaluations.prepare(model)
    _, parameters, others = split_model(model)
    return evaluations.run(TrainState(None, None, parameters, others, None), mesh)


def write_results(run: Path, inputs: TrainInputs, model: Any, embedder: Any, result: Any) -> None:
    """Writes `model/`, `best/` and `loss.png`. All processes call it, and the one with rank 0 writes."""
    import jax

    from longspan.cli.train.objective import save_model
    from longspan.cli.train.plot import plot_losses
    from longspan.train import restore
    from longspan.train.disk import disk_errors

    first = jax.process_index() == 0
    whole = on_one_process(model)
    if first:
        with disk_errors(str(run / MODEL)):
            save_model(inputs, whole, embedder, run / MODEL)
            plot_losses(run)
        say(f"longspan train: {result.steps:,} steps{_early(result)}, the model is in {run / MODEL}")
    if result.best_step is not None:
        restore(run, model, "best")
        whole = on_one_process(model)
        if first:
            with disk_errors(str(run / BEST)):
                save_model(inputs, whole, embedder, run / BEST)
            loss = f"eval_loss {result.best_loss:.4f}"
            say(f"longspan train: the best evaluation was at step {result.best_step:,} ({loss}): {run / BEST}")


def _early(result: Any) -> str:
    if result.stopped_early:
        return " (stopped early: the evaluations did not become better)"
    return ""


def on_one_process(model: Any) -> Any:
    """The model with all of its parameters in this process. With several processes, all of them call it."""
    import jax

    if jax.process_count() == 1:
        return model
    from flax import nnx
    from jax.experimental import multihost_utils

    graph, state = nnx.split(model)
    return nnx.merge(graph, multihost_utils.process_allgather(state, tiled=True))
