"""`longspan check`: the contents of a checkpoint's directory, and whether the checkpoint loads."""

import importlib
import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.library import library
from longspan.cli.notices import compiling
from longspan.cli.options import MAX_PLANNED, AsJson, print_json
from longspan.optional import is_installed

FAILED = 1


def check(
    directory: Annotated[
        Path,
        typer.Argument(help="A directory with a config.json and a model.safetensors.", file_okay=False, exists=True),
    ],
    length: Annotated[
        int | None,
        typer.Option("-T", "--length", min=1, max=MAX_PLANNED, help="Print the size of a cache for this many tokens."),
    ] = None,
    parity: Annotated[
        bool, typer.Option(help="Compare the output with PyTorch's, if transformers is installed.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Inspect a checkpoint: whether it loads, its layers, its longest input. Exits with 1 if it does not load."""
    facts = facts_of(directory, length, parity=parity, quiet=as_json)
    if as_json:
        print_json(facts)
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            label = name.replace("_", " ")
            for line in _lines(value):
                print(f"{label:<{width}}  {line}")
                label = ""
    if facts["problem"] is not None:
        raise typer.Exit(FAILED)


def _lines(value: Any) -> list[str]:
    """The text of a value, a line per item of a list."""
    if isinstance(value, list):
        return [str(item) for item in value] or ["-"]
    if value is None:
        return ["-"]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if isinstance(value, int):
        return [f"{value:,}"]
    return [str(value)]


def facts_of(directory: Path, length: int | None, *, parity: bool, quiet: bool = False) -> dict[str, Any]:
    """The names and values that `check` prints."""
    ls = library()
    facts: dict[str, Any] = dict(directory=str(directory), loads=False, problem=None, tokenizer=_tokenizer(directory))
    try:
        model = ls.hf.load(directory)
    except (ValueError, OSError, NotImplementedError) as error:
        return facts | dict(problem=" ".join(str(error).split()))
    facts |= dict(loads=True, **_facts_of_model(model, length))
    if parity:
        facts["parity"] = _parity(model, directory, quiet)
    return facts


def _facts_of_model(model: Any, length: int | None) -> dict[str, Any]:
    import jax
    from flax import nnx

    config = model.config
    is_decoder = hasattr(model, "init_cache")
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    longest = _longest_input(config)
    facts: dict[str, Any] = dict(
        family=config.model_type,
        task=type(model).task,
        parameters=sum(array.size for array in arrays),
        dtype=str(model.dtype),
        longest_input=longest,
        layers=_layers(config, is_decoder),
    )
    if is_decoder:
        tokens = length or longest
        _, kv_heads, size = config.heads
        plans = [library().cache.plan(config.mask(kind), tokens) for kind in config.kinds]
        facts["cache_length"] = tokens
        facts["cache_bytes"] = sum(plan.nbytes(1, kv_heads, size, model.dtype) for plan in plans)
    return facts


def _longest_input(config: Any) -> int:
    """The most tokens of an input: encoders may take fewer than they have position embeddings."""
    return getattr(config, "max_tokens", config.max_position_embeddings)


def _layers(config: Any, is_decoder: bool) -> list[str]:
    """One line per run of consecutive layers with the same mask: their numbers, and the mask."""
    layers = range(config.num_hidden_layers)
    if is_decoder:
        masks = [repr(config.mask(kind)) for kind in config.kinds]
    else:
        masks = [config.rule(layer) for layer in layers]
    lines = []
    for mask, run in itertools.groupby(zip(masks, layers, strict=True), key=lambda pair: pair[0]):
        numbers = [number for _, number in run]
        label = f"{numbers[0]}"
        if len(numbers) > 1:
            label = f"{numbers[0]} to {numbers[-1]}"
        lines.append(f"{label}: {mask}")
    return lines


def _tokenizer(directory: Path) -> str | None:
    """The tokenizer's file and size, or the error of reading it; None without a tokenizer."""
    if not (directory / "tokenizer.json").is_file():
        return None
    if not is_installed("tokenizers"):
        return "tokenizer.json; to read it, run: pip install 'longspan[hf]'"
    from longspan.cli.texts import tokenizer_of

    try:
        return f"tokenizer.json, {tokenizer_of(directory).get_vocab_size():,} tokens"
    except ValueError as error:
        return str(error)


def _parity(model: Any, directory: Path, quiet: bool) -> str:
    """The largest difference between PyTorch's output and Longspan's on random tokens, or why it was not computed."""
    if not (is_installed("torch") and is_installed("transformers")):
        return "not compared: torch and transformers are not installed"
    import numpy as np

    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    size = min(model.config.vocab_size, 1000)
    # Not the first five ids: models may treat padding and start tokens differently.
    ids = np.random.default_rng(0).integers(min(5, size - 1), size, (1, min(64, _longest_input(model.config))))
    run, loader, name = getattr(model, "encoder", model), transformers.AutoModel, "last_hidden_state"
    if hasattr(model, "init_cache"):
        run, loader, name = model, transformers.AutoModelForCausalLM, "logits"
    try:
        theirs = loader.from_pretrained(str(directory), local_files_only=True, dtype=torch.float32).eval()
        with torch.no_grad():
            output = theirs(torch.from_numpy(ids))
    except Exception as error:  # transformers may raise any error
        return f"not compared: transformers cannot run this checkpoint ({type(error).__name__}: {error})"
    with compiling("the model for the comparison", quiet=quiet):
        ours = run(ids.astype(np.int32))
    a, b = np.asarray(getattr(ours, name), np.float32), getattr(output, name).numpy()
    return f"{name} differs by at most {np.abs(a - b).max():.2g}; its largest value is {np.abs(b).max():.2g}"
