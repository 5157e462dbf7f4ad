"""The options of `longspan train`."""

import json
import math
import os
import sys
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.library import library
from longspan.cli.options import MAX_LENGTH
from longspan.cli.train.settings import DEVICE_FIELDS, Precision, RunFile, TaskName, TrainSettings, is_worker
from longspan.optional import needs

DATA, TRAINING, RUNS, DEVICES = "Data", "Training", "Checkpoints and evaluations", "Devices and memory"


def _number(help: str, panel: str, least: int = 1) -> Any:
    """An option for a whole number, whose default the help explains if it depends on other things."""
    return typer.Option(min=least, max=MAX_LENGTH, metavar="N", help=help, rich_help_panel=panel)


def train(
    context: typer.Context,
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL_DIR", help="Directory of the checkpoint to fine-tune.")
    ] = None,
    new: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG.json", help="Train a new model with this config.json instead, on bytes."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of the run, which is created.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Continue the run in this folder. Only --steps and the options for devices may be given besides.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A folder of UTF-8 text files, whose subfolders are labels; or a file of JSON lines with text and "
            "label, or with anchor, positive and possibly negative. Default with --new: the sources of the Python "
            "standard library.",
            rich_help_panel=DATA,
        ),
    ] = None,
    text_field: Annotated[
        str, typer.Option(metavar="NAME", help="Field of the text in JSON lines.", rich_help_panel=DATA)
    ] = "text",
    label_field: Annotated[
        str, typer.Option(metavar="NAME", help="Field of the label in JSON lines.", rich_help_panel=DATA)
    ] = "label",
    length: Annotated[
        int | None,
        _number("Tokens of a row. Default: the longest document; 1,024 for causal_lm. At most the model's.", DATA, 2),
    ] = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split",
            help="Split documents that are longer than a row. This is the default for masked_lm and causal_lm.",
            rich_help_panel=DATA,
        ),
    ] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Use only the beginning of such documents.", rich_help_panel=DATA)
    ] = False,
    hold_out: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=0.9,
            metavar="SHARE",
            help="Share of the examples that is held out for evaluation, at most 512 examples.",
            rich_help_panel=DATA,
        ),
    ] = 0.1,
    task: Annotated[
        TaskName | None,
        typer.Option(
            help="What to train. Default: sequence_classification for labels, embeddings for pairs, causal_lm for a "
            "decoder, masked_lm for a masked LM.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    steps: Annotated[
        int | None, _number("Steps of the run. Default: 3 passes over the data; 1,000 with --new.", TRAINING)
    ] = None,
    batch: Annotated[
        int | None, _number("Rows of a batch. Default: as many as make 16,384 tokens, at most 32.", TRAINING)
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=1e-12,
            max=10.0,
            metavar="R",
            help="Peak of the learning rate. Default: 3e-5 for sequence_classification, 5e-5 for masked_lm, 2e-5 for "
            "causal_lm and embeddings, 1e-3 with --new.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    warm_up: Annotated[
        int | None,
        _number("Steps until the peak; a cosine follows. Default: a tenth of the steps, at most 1,000.", TRAINING, 0),
    ] = None,
    weight_decay: Annotated[
        float,
        typer.Option(min=0.0, metavar="R", help="Weight decay, not of norms and biases.", rich_help_panel=TRAINING),
    ] = 0.01,
    clip: Annotated[
        float,
        typer.Option(min=0.0, metavar="NORM", help="Largest norm of the gradients; 0: any.", rich_help_panel=TRAINING),
    ] = 1.0,
    patience: Annotated[
        int | None,
        _number("Stop after N evaluations in a row without a better loss. Default: never.", TRAINING),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**32 - 1,
            metavar="S",
            help="Decides new parameters, batches, dropout and what is held out.",
            rich_help_panel=TRAINING,
        ),
    ] = 0,
    save_every: Annotated[int | None, _number("Steps between checkpoints. Default: --eval-every.", RUNS)] = None,
    keep: Annotated[int, _number("Newest checkpoints to keep. The best one is kept besides.", RUNS)] = 3,
    eval_every: Annotated[
        int | None, _number("Steps between evaluations. Default: a tenth of the steps.", RUNS)
    ] = None,
    accumulate: Annotated[int, _number("Compute each batch in N parts, to save memory.", DEVICES)] = 1,
    remat: Annotated[
        bool,
        typer.Option(
            "--remat", help="Compute layers again in the backward pass, to save memory.", rich_help_panel=DEVICES
        ),
    ] = False,
    dtype: Annotated[
        Precision, typer.Option(help="Dtype of the computation; parameters are float32.", rich_help_panel=DEVICES)
    ] = Precision.float32,
    dp: Annotated[
        int | None, _number("Devices that share the batch. Default: one per process, or all of a cluster.", DEVICES)
    ] = None,
    fsdp: Annotated[int | None, _number("Devices that share batch and parameters. Default: 1.", DEVICES)] = None,
    tp: Annotated[int | None, _number("Devices that share the heads. Default: 1.", DEVICES)] = None,
    sp: Annotated[int | None, _number("Devices that share the sequence. Default: 1.", DEVICES)] = None,
    processes: Annotated[
        int | None,
        _number("Processes on this machine. If one dies, all restart from the last checkpoint. Default: 1.", DEVICES),
    ] = None,
) -> int:
    """Fine-tune a checkpoint on your text, or train a new model.

    RUN receives run.json (the arguments), metrics.jsonl (a line per step), checkpoints/, model/ and best/ (which
    Longspan and Hugging Face load), and loss.png. A run that was killed continues with --resume RUN.

    Exit codes: 0 success, 2 wrong input, 3 the processes died too often, 4 the disk is full, 130 interrupted.
    """
    options: dict[str, Any] = dict(context.params)
    if resume is not None:
        _refuse_others(context)
        return _resume(resume, options)
    return _start(options)


def _start(options: dict[str, Any]) -> int:
    """Checks the input, creates the folder and trains."""
    run: Path = options.pop("out")
    settings = _settings(options, run)
    others = _import_library(settings)
    settings = _on_all_devices(settings, others)
    from longspan.cli.train.run import BAD_INPUT, check_out, discard_empty, prepare

    check_out(run)
    inputs, batches = prepare(settings)
    code = BAD_INPUT
    try:
        code = _train(run, RunFile(inputs.settings, inputs.digests), inputs, batches, others)
    finally:
        if code == BAD_INPUT and not others:
            discard_empty(run)
    return code


def _resume(run: Path, options: dict[str, Any]) -> int:
    """Continues a run with the arguments in its `run.json`."""
    file = RunFile.read(run)
    file = file.changed(steps=options["steps"], **{name: options[name] for name in DEVICE_FIELDS})
    file = RunFile(_with_devices(file.settings), file.digests)
    others = _import_library(file.settings)
    file = RunFile(_on_all_devices(file.settings, others), file.digests)
    from longspan.cli.train.run import check_same, check_steps, prepare

    check_steps(run, file.settings)
    inputs, batches = prepare(file.settings)
    check_same(run, file, inputs)
    return _train(run, file, inputs, batches, others)


def _train(run: Path, file: RunFile, inputs: Any, batches: Any, others: bool) -> int:
    """Writes `run.json`, and trains in this process, or in several that this process supervises."""
    from longspan.cli.train.inputs import tell_changes
    from longspan.cli.train.run import create, exit_code, is_first, train_in

    processes = inputs.settings.processes

    def work() -> int:
        create(run, file, others)
        if not is_worker() and (not others or is_first()):
            tell_changes(inputs, bool(batches.held_out))
        if processes > 1 and not is_worker():
            from longspan.train.supervisor import supervise

            return supervise([sys.executable, "-m", "longspan", "train", "--resume", str(run)], processes, run)
        train_in(run, inputs, batches)
        return 0

    return exit_code(run, work)


def _settings(options: dict[str, Any], run: Path | None) -> TrainSettings:
    """The arguments of a new run, with absolute paths."""
    model, new, data = options.pop("model"), options.pop("new"), options.pop("data")
    options.pop("resume")
    if (model is None) == (new is None):
        got = "none of them" if model is None else "both"
        raise ValueError(f"Give MODEL_DIR, or --new CONFIG.json, or --resume RUN; got {got}.")
    if run is None:
        raise ValueError("--out is missing. Name a new folder for the run.")
    if data is None and new is None:
        raise ValueError("--data is missing. Name a folder of text files, or a file of JSON lines.")
    if data is not None:
        options["data"] = str(data.resolve())
    if model is not None:
        options["model"] = str(model.resolve())
    else:
        options["new"] = _config(new)
    options |= {name: options[name] or 1 for name in DEVICE_FIELDS}
    options |= {name: str(value) for name, value in options.items() if isinstance(value, StrEnum)}
    return _with_devices(TrainSettings(**options))


def _config(path: Path) -> dict[str, Any]:
    """The content of a config.json."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}). Give a config.json.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object, got {str(content)[:80]}.")
    return content


def _with_devices(settings: TrainSettings) -> TrainSettings:
    """The settings with a device for each process, if they name no devices."""
    devices = math.prod(settings.mesh_sizes.values())
    if devices == 1 and settings.processes > 1:
        return replace(settings, dp=settings.processes)
    if devices % settings.processes:
        raise ValueError(
            f"--dp · --fsdp · --tp · --sp = {devices} devices cannot be divided among --processes "
            f"{settings.processes}. Give a multiple, for example --dp {settings.processes}."
        )
    return settings


def _refuse_others(context: typer.Context) -> None:
    """Raises if options were given that a resumed run reads from `run.json`."""
    allowed = {"resume", "steps", *DEVICE_FIELDS}
    wrong = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in allowed and _is_given(context, str(parameter.name))
    ]
    if wrong:
        shown = ", ".join("MODEL_DIR" if name == "model" else name for name in wrong)
        raise ValueError(
            f"--resume and {shown} were both given, but a run keeps its arguments, which are in run.json. Only --steps "
            f"and the options for devices ({', '.join(f'--{name}' for name in DEVICE_FIELDS)}) may change."
        )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _import_library(settings: TrainSettings) -> bool:
    """Imports JAX, with as many devices as the run needs if they are CPUs.

    Returns whether this process was started together with others: by a supervisor, or on a cluster.
    """
    needs("`longspan train`", "optax", extra="train")
    library()
    import jax

    from longspan.train.processes import join

    others = join()
    count = math.prod(settings.mesh_sizes.values()) // settings.processes
    # On a cluster each process has the devices that its environment gives it.
    of_command = not others or is_worker()
    if of_command and count > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with suppress(RuntimeError):  # JAX has started, in a process that runs more than this command
            jax.config.update("jax_num_cpu_devices", count)
    return others


def _on_all_devices(settings: TrainSettings, others: bool) -> TrainSettings:
    """The settings with all devices of a cluster, each of whose processes must have its part of the run."""
    import jax

    if not others or is_worker():
        return settings
    devices, found = math.prod(settings.mesh_sizes.values()), jax.device_count()
    if devices == 1:
        return replace(settings, dp=found)
    if devices != found:
        raise ValueError(
            f"--dp · --fsdp · --tp · --sp = {devices} devices, but the {jax.process_count()} processes of the cluster "
            f"have {found}. Give sizes with this product, for example --dp {found}."
        )
    return settings
