"""`TrainSettings`: the arguments of a run, which `run.json` stores."""

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from longspan.files import atomic_write
from longspan.version import __version__

RUN_FILE = "run.json"


class TaskName(StrEnum):
    """The tasks of `longspan train`."""

    sequence_classification = "sequence_classification"
    masked_lm = "masked_lm"
    causal_lm = "causal_lm"
    embeddings = "embeddings"


class Precision(StrEnum):
    """The dtype of the computation; parameters and optimizer are float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """All arguments of a run, with absolute paths. A resumed run reads them from `run.json`.

    None means a default that depends on the model and the data; `run.json` has the value that was chosen.
    """

    model: str | None = None  # a directory; None: `new`
    new: dict[str, Any] | None = None  # the content of a config.json
    data: str | None = None  # a folder or file; None: the sources of the standard library
    text_field: str = "text"
    label_field: str = "label"
    split: bool = False
    truncate: bool = False
    hold_out: float = 0.1
    task: str | None = None
    steps: int | None = None
    batch: int | None = None
    accumulate: int = 1
    length: int | None = None
    learning_rate: float | None = None
    warm_up: int | None = None
    weight_decay: float = 0.01
    clip: float = 1.0
    dtype: str = "float32"
    remat: bool = False
    seed: int = 0
    save_every: int | None = None
    keep: int = 3
    eval_every: int | None = None
    patience: int | None = None
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    sp: int = 1
    processes: int = 1

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The axes of the mesh."""
        return dict(dp=self.dp, fsdp=self.fsdp, tp=self.tp, sp=self.sp)


DEVICE_FIELDS = ("dp", "fsdp", "tp", "sp", "processes")


@dataclass(frozen=True)
class RunFile:
    """The content of `run.json`.

    Args:
        settings: the arguments.
        digests: of the files that decide the model and the batches; a resumed run must have the same.
    """

    settings: TrainSettings
    digests: dict[str, str]

    def write(self, run: Path) -> None:
        """Writes `run.json`."""
        content = dict(longspan=__version__, arguments=asdict(self.settings), digests=self.digests)
        with atomic_write(run / RUN_FILE) as new:
            new.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")

    @classmethod
    def read(cls, run: Path) -> "RunFile":
        """Reads the `run.json` of a folder that `longspan train --out` created."""
        path = run / RUN_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{run} is not a run of `longspan train`: it has no {RUN_FILE}. Name the folder that was --out."
            )
        try:
            content = json.loads(path.read_text("utf-8"))
            arguments, digests = dict(content["arguments"]), dict(content["digests"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a file that `longspan train` wrote. Start a new run with --out."
            ) from error
        known = {field.name for field in fields(TrainSettings)}
        if set(arguments) != known:
            named = ", ".join(sorted(set(arguments) ^ known))
            raise ValueError(
                f"{path} was written by another version of Longspan: {named} differ. Start a new run with --out."
            )
        return cls(TrainSettings(**arguments), digests)

    def changed(self, **changes: Any) -> "RunFile":
        """The same run with other values of some arguments; None keeps a value."""
        given = {name: value for name, value in changes.items() if value is not None}
        return RunFile(replace(self.settings, **given), self.digests)


def is_worker() -> bool:
    """Whether a supervisor started this process."""
    return "LONGSPAN_WORKER_RANK" in os.environ
