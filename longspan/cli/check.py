"""`longspan check`: what is in a checkpoint's directory, and whether it can be run here."""

import importlib
import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.library import library
from longspan.cli.notices import compiling
from longspan.cli.options import PLANNED, AsJson, print_json
from longspan.optional import is_installed

FAILED = 1


def check(
    directory: Annotated[
        Path, typer.Argument(help="With a config.json and a model.safetensors.", file_okay=False, exists=True)
    ],
    length: Annotated[
        int | None, typer.Option("-T", "--length", min=1, max=PLANNED, help="Tokens to size a cache for.")
    ] = None,
    parity: Annotated[bool, typer.Option(help="Compare with PyTorch where transformers is installed.")] = True,
    as_json: AsJson = False,
) -> None:
    """Look into a checkpoint: what loads, what is missing, how long inputs may be. Exits with 1 if it does not load."""
    facts = facts_of(directory, length, parity=parity, quiet=as_json)
    if as_json:
        print_json(facts)
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            shown = value if isinstance(value, list) else [value]
            for number, line in enumerate(shown or ["-"]):
                print(f"{'' if number else name.replace('_', ' '):<{width}}  {_words(line)}")
    if facts["problem"] is not None:
        raise typer.Exit(FAILED)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def facts_of(directory: Path, length: int | None, *, parity: bool, quiet: bool = False) -> dict[str, Any]:
    """Everything that `check` prints."""
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
    decoder = hasattr(model, "init_cache")
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    longest = config.max_position_embeddings if decoder else config.max_tokens
    facts: dict[str, Any] = dict(
        family=config.model_type,
        task=type(model).task,
        parameters=sum(array.size for array in arrays),
        dtype=str(model.dtype),
        longest_input=longest,
        layers=_layers(config, decoder),
    )
    if decoder:
        tokens = longest if length is None else length
        _, kv_heads, size = config.heads
        plans = [library().cache.plan(config.mask(kind), tokens) for kind in config.kinds]
        facts["cache_length"] = tokens
        facts["cache_bytes"] = sum(plan.nbytes(1, kv_heads, size, model.dtype) for plan in plans)
    return facts


def _layers(config: Any, decoder: bool) -> list[str]:
    """Layers in a row that share a mask, and which."""
    layers = range(config.num_hidden_layers)
    rules = [repr(config.mask(kind)) for kind in config.kinds] if decoder else [config.rule(layer) for layer in layers]
    lines = []
    for rule, run in itertools.groupby(zip(rules, layers, strict=True), key=lambda pair: pair[0]):
        numbers = [number for _, number in run]
        few = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        lines.append(f"{few}: {rule}")
    return lines


def _tokenizer(directory: Path) -> str | None:
    """The tokenizer in a few words, what is wrong with it, or None."""
    if not (directory / "tokenizer.json").is_file():
        return None
    if not is_installed("tokenizers"):
        return "tokenizer.json; to read it: pip install 'longspan[hf]'"
    from longspan.cli.texts import tokenizer_of

    try:
        return f"tokenizer.json, {tokenizer_of(directory).get_vocab_size():,} tokens"
    except ValueError as error:
        return str(error)


def _parity(model: Any, directory: Path, quiet: bool) -> str:
    """How far PyTorch's output is from ours, on some random tokens."""
    if not (is_installed("torch") and is_installed("transformers")):
        return "not compared: torch and transformers are not installed"
    import numpy as np

    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    size = min(model.config.vocab_size, 1000)
    longest = getattr(model.config, "max_tokens", model.config.max_position_embeddings)
    # From 5 on: what pads or begins a text may be treated differently.
    ids = np.random.default_rng(0).integers(min(5, size - 1), size, (1, min(64, longest)))
    decoder = hasattr(model, "init_cache")
    kind = transformers.AutoModelForCausalLM if decoder else transformers.AutoModel
    try:
        theirs = kind.from_pretrained(str(directory), local_files_only=True, dtype=torch.float32).eval()
        with torch.no_grad():
            output = theirs(torch.from_numpy(ids))
    except Exception as error:  # another library's, of any kind
        return f"not compared: transformers does not run it ({type(error).__name__}: {error})"
    with compiling("the model for the comparison", quiet=quiet):
        ours = model(ids.astype(np.int32)) if decoder else getattr(model, "encoder", model)(ids.astype(np.int32))
    name = "logits" if decoder else "last_hidden_state"
    a, b = np.asarray(getattr(ours, name), np.float32), getattr(output, name).numpy()
    return f"{name} differ by at most {np.abs(a - b).max():.2g}, of {np.abs(b).max():.2g}"
