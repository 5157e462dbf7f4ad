"""Trains a small model in a process of its own: `python -m tests.train.run_small OUT STEPS '{"save_every": 2}'`.

Further settings: "decoder", whether to train a decoder; "mesh", the sizes of a mesh; "sleep", seconds per batch;
"kills", where processes kill themselves: ["batch", step, rank] or ["save", step, rank].
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from longspan import parallel, train
from longspan.train import checkpoints
from tests.train import decoder, small


def main(out: str, steps: str, settings: str = "{}") -> None:
    given = json.loads(settings)
    train.join()
    mesh = parallel.mesh(**given.pop("mesh")) if "mesh" in given else None
    model, made_batches, loss, optimizer = small.small(), small.batches, small.squares, small.OPTIMIZER
    if given.pop("decoder", False):
        model, made_batches = decoder.model(), decoder.batches
        loss, optimizer = decoder.loss_on(mesh), decoder.OPTIMIZER
    kills = given.pop("kills", [])
    sleep = given.pop("sleep", 0.0)

    def kill(place, step):
        # Once only: a process that was restarted finds the file.
        killed = Path(out, f"killed-{place}-{step}")
        if [place, step, jax.process_index()] in kills and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def batches(step):
        time.sleep(sleep)
        kill("batch", step)
        return made_batches(step)

    written = checkpoints._write_summary

    def write_summary(part, summary):
        kill("save", summary["step"])
        written(part, summary)

    checkpoints._write_summary = write_summary
    train.fit(model, batches, loss, optimizer, steps=int(steps), out=out, resume=True, mesh=mesh, **given)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except train.Interrupted:
        sys.exit(130)
    except train.DiskFull as error:
        print(error, file=sys.stderr)
        sys.exit(4)
