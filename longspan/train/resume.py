"""Where a run continues: the last intact checkpoint, and the parameters of a checkpoint in a model."""

import os
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from longspan.train.checkpoints import (
    CHECKPOINTS,
    checkpoint_steps,
    clean,
    find_damage,
    notes_of,
    restore_arrays,
    set_aside,
)
from longspan.train.report import METRICS, Progress
from longspan.train.state import from_named_arrays, named_arrays, split_model


def restore(out: str | os.PathLike, model: nnx.Module, step: int | Literal["last", "best"] = "last") -> int:
    """Puts the variables of a checkpoint of a run into a model of the same structure, and returns its step.

    Args:
        out: the folder of the run.
        model: receives the variables, with the sharding of its own.
        step: the checkpoint: its step, the "last" one, or the one with the "best" evaluation.

    Example:
        >>> from flax import nnx
        >>> from longspan import train
        >>> train.restore("no-such-run", nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        Traceback (most recent call last):
        ValueError: no-such-run has no checkpoints. Give the folder of a run.
    """
    folder = Path(out) / CHECKPOINTS
    steps = checkpoint_steps(folder)
    if not steps:
        raise ValueError(f"{out} has no checkpoints. Give the folder of a run.")
    wanted: Any = step
    if step == "last":
        wanted = steps[0]
    if step == "best":
        wanted = notes_of(folder / str(steps[0])).get("best_step")
        if wanted is None:
            raise ValueError(f"{out} has no best checkpoint, because it had no evaluations. Give 'last' or a step.")
    if wanted not in steps:
        raise ValueError(f"{out} has no checkpoint {wanted}, only {', '.join(map(str, steps))}.")
    path = folder / str(wanted)
    damage = find_damage(path)
    if damage is not None:
        raise ValueError(f"{path} is damaged: {damage}. Use another checkpoint of {', '.join(map(str, steps))}.")
    _, parameters, others = split_model(model)
    # The names that these variables have in a `TrainState`.
    like = dict(parameters=parameters, others=others)
    found = from_named_arrays(restore_arrays(path, named_arrays(like), partial=True), like)
    nnx.update(model, found["parameters"], found["others"])
    return wanted


def find_checkpoint(folder: Path, progress: Progress) -> int | None:
    """The step of the last intact checkpoint, the same in all processes; damaged ones after it are set aside."""
    found = -1
    if jax.process_index() == 0:
        clean(folder)
        found = _last_intact(folder, progress)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    if found < 0:
        return None
    return found


def check_new(out: Path) -> None:
    """Raises if a folder contains a run."""
    if checkpoint_steps(out / CHECKPOINTS) or (out / METRICS).exists():
        raise FileExistsError(f"{out} contains a run. Resume it (`resume=True`), or give another folder.")


def _last_intact(folder: Path, progress: Progress) -> int:
    damaged = []
    for step in checkpoint_steps(folder):
        if find_damage(folder / str(step)) is not None:
            damaged.append(step)
            continue
        for one in damaged:
            progress.note(f"checkpoint {one} is damaged: using {step}")
            set_aside(folder, one)
        return step
    if damaged:
        listed = ", ".join(map(str, damaged))
        raise ValueError(f"All checkpoints in {folder} are damaged: {listed}. Start a new run in another folder.")
    return -1
