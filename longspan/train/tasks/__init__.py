"""Training tasks, one file each: the loss on a batch, the metrics on held-out batches, and how the model is saved."""

from longspan.train.tasks.causal_lm import CausalLMTraining as CausalLMTraining
from longspan.train.tasks.classification import ClassificationTraining as ClassificationTraining
from longspan.train.tasks.embeddings import EmbeddingTraining as EmbeddingTraining
from longspan.train.tasks.masked_lm import MaskedLMTraining as MaskedLMTraining
from longspan.train.tasks.task import TrainingTask as TrainingTask
