"""`longspan generate`: a decoder's answer to a prompt, as it comes."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli._library import library
from longspan.cli._options import AsJson, print_json
from longspan.cli.texts import Stream, stop_tokens, tokenizer_of


def generate(
    model: Annotated[
        Path, typer.Option(help="A checkpoint's directory, with a tokenizer.json.", file_okay=False, exists=True)
    ],
    prompt: Annotated[str, typer.Option(help="The text to go on from; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write, at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from so many of the likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest with this share.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from those with this share of the best.")
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(min=0.0, help="Over 1: what was said is less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="What is drawn, if the temperature is over 0.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write on from a prompt, token by token."""
    tokenizer = tokenizer_of(model)
    text = _read_prompt(prompt)
    tokens = tokenizer.encode(text).ids
    if not tokens:
        raise ValueError("--prompt is empty, and there is nothing to go on from.")
    ls = library()
    import jax
    import numpy as np

    decoder = ls.hf.load(model)
    if not hasattr(decoder, "init_cache"):
        raise ValueError(f"{model} is a {type(decoder).__name__}, which writes no text: give a decoder.")
    stream, pieces = Stream(tokenizer, tokens), []

    def said(_: int, token: Any) -> None:
        pieces.append(stream.push(int(token)))
        if not as_json:
            _print(pieces[-1])

    options: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    options |= dict(repetition_penalty=repetition_penalty, stop_tokens=stop_tokens(model))
    key = jax.random.key(seed) if temperature > 0 else None
    ls.generate(decoder, [np.array(tokens, np.int32)], max_new_tokens=max_new_tokens, **options, key=key, stream=said)
    pieces.append(stream.rest())
    if as_json:
        print_json(dict(prompt=text, prompt_tokens=len(tokens), text="".join(pieces), tokens=stream.count))
    else:
        _print(pieces[-1] + "\n")


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    return sys.stdin.buffer.read().decode("utf-8", errors="replace").rstrip("\n")


def _print(piece: str) -> None:
    """At once, whatever the terminal's encoding can show of it."""
    if piece:
        encoding = sys.stdout.encoding or "utf-8"
        print(piece.encode(encoding, errors="replace").decode(encoding), end="", flush=True)
