"""Evaluations on held-out batches: their metrics, the best one, and when to stop early."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from longspan.checks import check_static_size
from longspan.models.graph import HashedGraph
from longspan.train.placement import check_batch, place_batch
from longspan.train.state import split_model
from longspan.train.step import EvaluationProgram, TrainState, hashable

EVAL_LOSS = "eval_loss"


class BestEvaluation(NamedTuple):
    """The evaluation with the smallest loss so far."""

    step: int | None = None
    loss: float = math.inf
    worse: int = 0  # evaluations since then

    def after(self, step: int, loss: float) -> "BestEvaluation":
        """The best evaluation after another one."""
        if loss < self.loss:
            return BestEvaluation(step, loss)
        return self._replace(worse=self.worse + 1)

    def notes(self) -> dict[str, Any]:
        """As JSON, for checkpoints."""
        return dict(best_step=self.step, best_loss=float(self.loss).hex(), worse=self.worse)

    @classmethod
    def of_notes(cls, notes: dict[str, Any]) -> "BestEvaluation":
        """The inverse of `notes`."""
        return cls(notes["best_step"], float.fromhex(notes["best_loss"]), notes["worse"])


NO_EVALUATION = BestEvaluation()


class Evaluations:
    """The evaluations of a run: `fit` explains the arguments."""

    def __init__(
        self,
        loss: Callable[..., Any],
        batches: Sequence[Any] | None,
        every: int | None,
        evaluate: Callable[..., Any] | None,
        patience: int | None,
    ):
        if (batches is None) != (every is None):
            raise ValueError("`eval_batches` and `eval_every` belong together. Give both or neither.")
        if batches is None and (evaluate is not None or patience is not None):
            raise ValueError("`evaluate` and `patience` need evaluations. Give `eval_batches` and `eval_every`.")
        if batches is not None and not len(batches):
            raise ValueError("`eval_batches` is empty. Give at least one batch, or leave it out.")
        for name, value in (("eval_every", every), ("patience", patience)):
            if value is not None:
                check_static_size(name, value, 1)
        self.batches, self.every, self.patience = batches, every, patience
        self.evaluate = evaluate or (lambda model, batch: {EVAL_LOSS: loss(model, batch, None)})

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether the model is evaluated after a step."""
        return self.every is not None and (last or step % self.every == 0)

    def stops(self, best: BestEvaluation) -> bool:
        """Whether the loss has not become better for too long."""
        return self.patience is not None and best.worse >= self.patience

    def prepare(self, model: nnx.Module) -> None:
        """Takes the structure of the model in evaluation mode."""
        graph, *_ = split_model(model)
        self.program = EvaluationProgram(HashedGraph(graph), hashable(self.evaluate))

    def run(self, state: TrainState, mesh: Any) -> dict[str, float]:
        """The metrics: weighted means over the batches."""
        assert self.batches is not None
        found = []
        for batch in self.batches:
            check_batch(batch, mesh, 1)
            found.append(self.program(state.parameters, state.others, place_batch(batch, mesh)))
        if EVAL_LOSS not in found[0]:
            raise ValueError(
                f"`evaluate` returned {', '.join(found[0]) or 'nothing'}. {EVAL_LOSS!r} must be among them."
            )
        return {name: _mean([one[name] for one in found]) for name in found[0]}


def _mean(pairs: list[tuple[Any, Any]]) -> float:
    """The mean of (value, weight) pairs by their weights; NaN if no weight is positive."""
    values, weights = np.array([[float(x) for x in pair] for pair in pairs]).T
    total = weights.sum()
    if not total:
        return math.nan
    return float((values * weights).sum() / total)
