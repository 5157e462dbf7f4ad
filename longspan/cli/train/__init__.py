"""`longspan train`: fine-tunes a checkpoint, or trains a new model, in a RUN folder that survives crashes."""

from longspan.cli.train.command import train as train
