"""`loss.png`: the losses of a run over its steps."""

import json
from pathlib import Path
from typing import Any

from longspan.cli.notices import say
from longspan.files import atomic_write
from longspan.optional import is_installed
from longspan.train.report import METRICS

PICTURE = "loss.png"


def plot_losses(run: Path) -> None:
    """Draws the losses in `metrics.jsonl` into `loss.png`."""
    if not is_installed("matplotlib"):
        say(f"longspan: {PICTURE} is not drawn: pip install 'longspan[plot]'")
        return
    from matplotlib.figure import Figure

    lines = (run / METRICS).read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", title=run.name)
    for name, label, marker in (("loss", "training", ""), ("eval_loss", "held out", "o")):
        steps, values = _curve(records, name)
        if steps:
            axes.plot(steps, values, label=label, marker=marker, markersize=3, linewidth=1)
    if axes.lines:
        axes.legend()
    with atomic_write(run / PICTURE) as new:
        figure.savefig(new, format="png", dpi=110)


def _curve(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    kept = [record for record in records if record.get(name) is not None]
    return [record["step"] for record in kept], [record[name] for record in kept]
