"""`fit`: the training loop, for any NNX module."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspan.checks import check_static_size
from longspan.models.graph import HashedGraph
from longspan.parallel import mesh as device_mesh
from longspan.train.checkpoints import CHECKPOINTS, Checkpoints, notes_of, restore_arrays
from longspan.train.evaluation import EVAL_LOSS, NO_EVALUATION, BestEvaluation, Evaluations
from longspan.train.interrupts import Interrupted, Interrupts
from longspan.train.placement import check_batch, heads_of, place_array, place_batch
from longspan.train.report import METRICS, MetricsFile, NoProgress, Progress, cut_metrics, finite
from longspan.train.resume import check_new, find_checkpoint
from longspan.train.state import from_named_arrays, initial_state, named_arrays, split_model
from longspan.train.step import StepOutput, TrainProgram, hashable


@dataclass(frozen=True)
class FitResult:
    """The end of a run.

    Example:
        >>> from longspan import train
        >>> train.FitResult(steps=3, loss=0.5, best_step=2, best_loss=0.7).stopped_early
        False
    """

    steps: int  # finished steps
    loss: float  # of the last step; NaN if none ran
    best_step: int | None = None  # of the best evaluation
    best_loss: float = math.inf
    stopped_early: bool = False
    resumed_from: int | None = None


def fit(
    model: nnx.Module,
    batches: Callable[[int], Any],
    loss: Callable[..., Any],
    optimizer: Any,
    *,
    steps: int,
    out: Any = None,
    save_every: int = 100,
    keep: int = 3,
    resume: bool = False,
    accumulate: int = 1,
    mesh: Any = None,
    key: jax.Array | None = None,
    eval_batches: Sequence[Any] | None = None,
    eval_every: int | None = None,
    evaluate: Callable[..., Any] | None = None,
    patience: int | None = None,
    count_tokens: Callable[[Any], int] | None = None,
    progress: Progress | None = None,
) -> FitResult:
    """Trains a model in place, and returns a summary.

    Step s computes the gradients of `loss(model, batches(s), key)` and updates all `nnx.Param` variables. The step is
    one compiled program per shape of batches.

    Interrupted by Ctrl-C or SIGTERM, the run saves a checkpoint and raises `Interrupted`. A full disk raises
    `DiskFull`. With several processes (`jax.distributed`), all of them make the same call, with the same batches: each
    process puts its own rows on its devices, and rank 0 writes the files.

    Args:
        model: any NNX module. It is in training mode during steps, in evaluation mode during evaluations and
            afterwards. Do not use it while `fit` runs. On a mesh, its variables then stay on the devices.
        batches: batches(step), with steps counted from 0, is a batch: a tree of arrays [B, ...], usually a dict. It
            must depend on the step alone, so that a resumed run continues with the next batch.
        loss: loss(model, batch, key) is the mean loss over the batch, a scalar; or a pair (loss, weight), where the
            weight is the number of tokens or rows that count. `key` is the random key of the step, for dropout.
        optimizer: an optax optimizer, for example from `ls.train.adamw`.
        steps: the number of steps of the whole run, with those before a resume.
        out: the folder of the run: `metrics.jsonl`, and `checkpoints/STEP` after STEP steps. None writes nothing.
        save_every: the number of steps between checkpoints. The last step and the best evaluation are saved too.
        keep: the number of newest checkpoints to keep. The one with the best evaluation is kept besides.
        resume: whether to continue from the last intact checkpoint in `out`, if there is one. The model, its optimizer
            and the arguments must be those of the run.
        accumulate: the number of parts of a batch. The gradients of the parts are computed one after another and
            averaged by the weights of `loss`, so the result is that of the whole batch, in less memory. The loss of
            each part must be a mean over its rows or tokens. Dropout draws other numbers than without parts.
        mesh: the devices, from `ls.parallel.mesh`. Rows are split over dp and fsdp, tokens over sp, parameters over
            fsdp and tp. A loss of a model of `longspan.models` passes `mesh=mesh` to it if sp is larger than 1.
        key: the random key of the run; by default `jax.random.key(0)`. A resumed run uses that of its checkpoint.
        eval_batches: held-out batches.
        eval_every: the number of steps between evaluations; the last step is evaluated too.
        evaluate: evaluate(model, batch) returns metrics by name, each a scalar or a pair (mean, weight), with
            "eval_loss" among them. By default "eval_loss" is `loss(model, batch, None)`. Metrics are averaged over
            `eval_batches`. The smallest "eval_loss" is the best.
        patience: stop after this number of evaluations in a row without a better loss.
        count_tokens: count_tokens(batch), for "tokens" in the metrics; by default segment ids that are not negative,
            or the attention masks, or `input_ids`.
        progress: shows the run; by default only notes on stderr.

    Example:
        >>> import optax
        >>> from flax import nnx
        >>> from longspan import train
        >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(64, 3)).astype(np.float32)
        >>> batch = dict(x=x, y=x.sum(axis=1, keepdims=True))
        >>> loss = lambda model, batch, key: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        >>> result = train.fit(model, lambda step: batch, loss, optax.adam(0.1), steps=200)
        >>> result.steps, result.loss < 1e-3
        (200, True)
    """
    evaluations = Evaluations(loss, eval_batches, eval_every, evaluate, patience)
    if jax.process_index() > 0:
        progress = NoProgress()
    loop = _Loop(
        steps=check_static_size("steps", steps, 0),
        save_every=check_static_size("save_every", save_every, 1),
        accumulate=check_static_size("accumulate", accumulate, 1),
        mesh=mesh,
        batches=batches,
        count_tokens=count_tokens or tokens_in,
        evaluations=evaluations,
        progress=progress or Progress(),
    )
    if mesh is None and jax.process_count() > 1:
        loop.mesh = device_mesh(dp=jax.device_count())
    if key is None:
        key = jax.random.key(0)
    with Interrupts() as interrupts:
        try:
            if out is not None:
                loop.open(Path(out), check_static_size("keep", keep, 1), resume=resume)
            loop.start(model, loss, optimizer, key)
            loop.train(interrupts)
        finally:
            loop.close(model)
    return FitResult(loop.step, loop.loss, loop.best.step, loop.best.loss, loop.stopped_early, loop.resumed_from)


def tokens_in(batch: Any) -> int:
    """The number of tokens of a batch without padding: by segment ids, attention masks or `input_ids`; else 0.

    Example:
        >>> tokens_in(dict(input_ids=np.ones((2, 3), int), attention_mask=np.array([[1, 1, 0], [1, 0, 0]])))
        3
    """
    if not isinstance(batch, dict):
        return 0
    if "segment_ids" in batch:
        return int(np.count_nonzero(np.asarray(batch["segment_ids"]) >= 0))
    masks = [x for name, x in batch.items() if name.endswith("attention_mask")]
    if masks:
        return sum(int(np.count_nonzero(np.asarray(x))) for x in masks)
    return int(np.size(batch.get("input_ids", ())))


class _Pending(NamedTuple):
    """A step whose loss was not read yet."""

    step: int
    output: StepOutput
    tokens: int


@dataclass
class _Loop:
    """A run between two steps."""

    steps: int
    save_every: int
    accumulate: int
    mesh: Any
    batches: Callable[[int], Any]
    count_tokens: Callable[[Any], int]
    evaluations: Evaluations
    progress: Progress

    step: int = 0  # finished steps
    loss: float = math.nan
    best: BestEvaluation = NO_EVALUATION
    stopped_early: bool = False
    interrupted: bool = False
    resumed_from: int | None = None
    state: Any = None  # a TrainState after `start`
    checkpoints: Checkpoints | None = None
    metrics: MetricsFile | None = None  # of the process with rank 0
    pending: _Pending | None = None
    clock: float = 0.0  # when the loss of the last step was read

    def open(self, out: Path, keep: int, *, resume: bool) -> None:
        """Finds the checkpoint to resume from, and opens the files."""
        folder, first = out / CHECKPOINTS, jax.process_index() == 0
        if resume:
            self.resumed_from = find_checkpoint(folder, self.progress)
        elif first:
            check_new(out)
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            cut_metrics(out / METRICS, self.resumed_from or 0)
            self.metrics = MetricsFile(out / METRICS)
        self.checkpoints = Checkpoints(folder, keep, self.progress.saved)

    def start(self, model: nnx.Module, loss: Callable[..., Any], optimizer: Any, key: jax.Array) -> None:
        """Makes the programs and the state, or reads the state from the checkpoint."""
        model.train()
        graph, parameters, others = split_model(model)
        model.eval()
        self.evaluations.prepare(model)
        self.state = initial_state(parameters, others, optimizer, key, self.mesh, heads_of(model))
        # The model's own arrays are freed. It has the trained ones when the run is over.
        nnx.update(model, self.state.parameters, self.state.others)
        shardings = None
        if self.mesh is not None:
            shardings = tuple(x.sharding for x in jax.tree.leaves(self.state))
        self.program = TrainProgram(HashedGraph(graph), hashable(loss), optimizer, self.accumulate, shardings)
        self.compiled_for: set[Any] = set()  # shapes of batches
        if self.resumed_from is not None:
            self._resume(self.resumed_from)

    def _resume(self, step: int) -> None:
        assert self.checkpoints is not None
        if step > self.steps:
            raise ValueError(f"The run already has {step} steps, more than steps={self.steps}. Give at least {step}.")
        path = self.checkpoints.folder / str(step)
        self.state = from_named_arrays(restore_arrays(path, named_arrays(self.state)), self.state)
        self.step, self.best = step, BestEvaluation.of_notes(notes_of(path))
        if jax.process_index() == 0:
            self.progress.note(f"resumed from step {step}")
            # The run may have kept more checkpoints before, and its disk may be full.
            self.checkpoints.prune(self.best.step)

    def train(self, interrupts: Interrupts) -> None:
        """All steps. The loss of a step is read after the next step has started, so that devices never wait for it."""
        self.progress.start(self.step, self.steps)
        self.clock = time.perf_counter()
        while self.step < self.steps and not self.interrupted and not self.stopped_early:
            batch = self.batches(self.step)
            output = self._run_step(batch, interrupts)
            self._read_pending()
            self.step += 1
            self.pending = _Pending(self.step, output, self.count_tokens(batch))
            if jax.process_count() == 1:
                self.interrupted = interrupts.requested
            last = self.step == self.steps
            improved = self.evaluations.is_due(self.step, last=last) and self._evaluate()
            self.stopped_early = self.evaluations.stops(self.best) and not last
            if improved or last or self.interrupted or self.stopped_early or self.step % self.save_every == 0:
                self._save()
        if self.checkpoints is not None:
            self.checkpoints.wait()
        if self.interrupted:
            raise Interrupted(self.step)

    def _run_step(self, batch: Any, interrupts: Interrupts) -> StepOutput:
        """Starts a step; returns before it is finished, except if it must be compiled."""
        check_batch(batch, self.mesh, self.accumulate)
        placed = place_batch(batch, self.mesh)
        shapes = str(jax.tree.map(np.shape, batch))
        if shapes in self.compiled_for:
            return self._dispatch(placed, interrupts)
        self.compiled_for.add(shapes)
        self._read_pending()  # the seconds of the step before are its own, not those of compiling
        start, what = time.perf_counter(), f"the training step for {_words(batch)}"
        self.progress.compiling(what)
        output = self._dispatch(placed, interrupts)
        self.clock = time.perf_counter()
        self.progress.compiled(what, self.clock - start)
        return output

    def _dispatch(self, placed: Any, interrupts: Interrupts) -> StepOutput:
        self.state, output = self.program(self.state, placed, self._stop_flag(interrupts))
        return output

    def _stop_flag(self, interrupts: Interrupts) -> Any:
        """Whether this process asks to stop. The step returns the maximum, so that all of them stop together."""
        flag = np.int32(interrupts.requested)
        if jax.process_count() == 1:
            return flag
        sharding = NamedSharding(self.mesh, P(self.mesh.axis_names))
        return place_array(np.full(self.mesh.devices.size, flag), sharding)

    def _read_pending(self) -> None:
        """Waits for the last step and writes its line."""
        if self.pending is None:
            return
        (step, output, tokens), self.pending = self.pending, None
        self.loss = float(output.loss)
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        record = dict(
            step=step, loss=finite(self.loss), loss_hex=self.loss.hex(), lr=finite(float(output.learning_rate))
        )
        record |= dict(tokens=tokens, seconds=round(seconds, 6))
        self._write(record, self.progress.step)
        if not math.isfinite(self.loss):
            raise FloatingPointError(
                f"The loss of step {step} is {self.loss}. Train again with a lower learning rate, a longer warm-up or "
                "clipped gradients."
            )
        if output.stop:  # all processes read this after the same step
            self.interrupted = True

    def _evaluate(self) -> bool:
        """Writes the metrics on the held-out batches. Returns whether the loss is the best one."""
        self._read_pending()
        metrics = self.evaluations.run(self.state, self.mesh)
        self.best = self.best.after(self.step, metrics[EVAL_LOSS])
        self._write(dict(step=self.step) | {name: finite(x) for name, x in metrics.items()}, self.progress.evaluation)
        self.clock = time.perf_counter()
        return self.best.step == self.step

    def _save(self) -> None:
        """Starts to save a checkpoint. The lines of its steps are in the metrics before."""
        self._read_pending()
        if self.checkpoints is not None:
            self.checkpoints.save(self.step, named_arrays(self.state), self.best.notes())
        self.clock = time.perf_counter()

    def _write(self, record: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)
        show(record)

    def close(self, model: nnx.Module) -> None:
        """Writes the parameters into the model, and closes the files."""
        if self.state is not None:
            nnx.update(model, self.state.parameters, self.state.others)
        if self.checkpoints is not None:
            self.checkpoints.close()
        if self.metrics is not None:
            self.metrics.close()
        self.progress.close()


def _words(batch: Any) -> str:
    """The shape of a batch, such as "4 x 128"."""
    shapes = [np.shape(x) for x in jax.tree.leaves(batch)]
    return " x ".join(map(str, max(shapes, key=len)))
