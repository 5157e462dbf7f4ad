"""`longspan generate`: a decoder's answer to a prompt, as it comes; or the answers to several."""

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from longspan.cli.library import library
from longspan.cli.notices import Held, compiling
from longspan.cli.options import LONGEST, AsJson, print_json
from longspan.cli.texts import Stream, read_stdin, stop_tokens, tokenizer_of

TITLE = 60  # characters of a prompt above its answer


def generate(
    model: Annotated[
        Path, typer.Option(help="A checkpoint's directory, with a tokenizer.json.", file_okay=False, exists=True)
    ],
    prompt: Annotated[
        list[str],
        typer.Option(help="The text to go on from; - reads standard input. May be repeated: each gets an answer."),
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, max=LONGEST, help="Tokens to write, at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, max=LONGEST, help="Draw from so many of the likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest with this share.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from those with this share of the best.")
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(min=0.0, help="Over 1: what was said is less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="What is drawn, if the temperature is over 0.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write on from a prompt, token by token. Answers to several prompts are printed when all of them are done."""
    tokenizer = tokenizer_of(model)
    texts = _read_prompts(prompt)
    rows = [_tokens(tokenizer, text) for text in texts]
    ls = library()
    import jax
    import numpy as np

    decoder = ls.hf.load(model)
    if not hasattr(decoder, "init_cache"):
        raise ValueError(f"{model} is a {type(decoder).__name__}, which writes no text: give a decoder.")
    answers = [Answer(text, Stream(tokenizer, row), []) for text, row in zip(texts, rows, strict=True)]
    live = len(rows) == 1 and not as_json

    def said(row: int, token: Any) -> None:
        answers[row].pieces.append(answers[row].stream.push(int(token)))
        if live:
            _print(answers[row].pieces[-1])

    options: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    options |= dict(repetition_penalty=repetition_penalty, stop_tokens=stop_tokens(model))
    options |= dict(key=jax.random.key(seed) if temperature > 0 else None, max_new_tokens=max_new_tokens)
    with compiling("the decoder", quiet=as_json) as compiled:
        held = Held(said, len(rows), compiled)
        ls.generate(decoder, [np.array(row, np.int32) for row in rows], **options, stream=held)
        held.release()
    for answer in answers:
        answer.pieces.append(answer.stream.rest())
    if live:
        _print(answers[0].pieces[-1] + "\n")
    elif as_json:
        found = [answer.facts(len(row)) for answer, row in zip(answers, rows, strict=True)]
        print_json(found if len(found) > 1 else found[0])
    else:
        _print("\n".join(answer.printed(f"{n} of {len(rows)}") for n, answer in enumerate(answers, start=1)))


class Answer(NamedTuple):
    """What was said so far after a prompt."""

    prompt: str
    stream: Stream
    pieces: list[str]

    def facts(self, prompt_tokens: int) -> dict[str, Any]:
        text, tokens = "".join(self.pieces), self.stream.count
        return dict(prompt=self.prompt, prompt_tokens=prompt_tokens, text=text, tokens=tokens)

    def printed(self, place: str) -> str:
        line = " ".join(self.prompt.split())
        title = line if len(line) <= TITLE else f"{line[: TITLE - 3]}..."
        return f"== {place}: {title}\n{''.join(self.pieces)}\n"


def _read_prompts(prompts: list[str]) -> list[str]:
    if prompts.count("-") > 1:
        raise ValueError("--prompt - is given more than once, but standard input is read once. Give it once.")
    return [_read_prompt(prompt) for prompt in prompts]


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        try:
            prompt.encode("utf-8")  # Python keeps other bytes of a command line as surrogates
        except UnicodeEncodeError as error:
            raise ValueError(f"--prompt is not UTF-8 text, at character {error.start}.") from error
        return prompt
    try:
        return read_stdin().decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt -: standard input is not UTF-8 text, at byte {error.start}.") from error


def _tokens(tokenizer: Any, text: str) -> list[int]:
    tokens = tokenizer.encode(text).ids
    if not tokens:
        raise ValueError("--prompt is empty, and there is nothing to go on from.")
    return tokens


def _print(piece: str) -> None:
    """At once, whatever the terminal's encoding can show of it."""
    if piece and sys.stdout is not None:
        encoding = sys.stdout.encoding or "utf-8"
        print(piece.encode(encoding, errors="replace").decode(encoding), end="", flush=True)
