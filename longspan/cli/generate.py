"""`longspan generate`: a decoder's answers to prompts; the answer to a single prompt is printed token by token."""

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from longspan.cli.library import library
from longspan.cli.notices import DelayedStream, compiling
from longspan.cli.options import MAX_LENGTH, AsJson, print_json
from longspan.cli.texts import TextStream, read_stdin, stop_tokens, tokenizer_of

MAX_TITLE = 60  # characters of a prompt that are printed above its answer


def generate(
    model: Annotated[
        Path, typer.Option(help="Directory of a checkpoint with a tokenizer.json.", file_okay=False, exists=True)
    ],
    prompt: Annotated[
        list[str],
        typer.Option(help="Text to continue; - reads standard input. May be repeated: every prompt gets an answer."),
    ],
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_LENGTH, help="Maximum number of tokens to generate.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=MAX_LENGTH, help="Sample only from the k most likely tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample only from the most likely tokens whose probabilities sum to p."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Sample only from tokens with at least p times the most likely token's probability."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(min=0.0, help="Values above 1 lower the probability of tokens that already occurred.")
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the random sampling; unused at temperature 0.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Generate text from a prompt, token by token. With several prompts, print all answers at the end."""
    tokenizer = tokenizer_of(model)
    texts = _read_prompts(prompt)
    rows = [_tokens(tokenizer, text) for text in texts]
    ls = library()
    import jax
    import numpy as np

    decoder = ls.hf.load(model)
    if not hasattr(decoder, "init_cache"):
        raise ValueError(f"{model} is a {type(decoder).__name__}, which generates no text. Give a decoder.")
    answers = [GeneratedText(text, TextStream(tokenizer, row), []) for text, row in zip(texts, rows, strict=True)]
    prints_tokens = len(rows) == 1 and not as_json

    def add_token(row: int, token: Any) -> None:
        piece = answers[row].stream.push(int(token))
        answers[row].pieces.append(piece)
        if prints_tokens:
            _print(piece)

    options: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    options |= dict(repetition_penalty=repetition_penalty, stop_tokens=stop_tokens(model))
    options |= dict(key=None, max_new_tokens=max_new_tokens)
    if temperature > 0:
        options |= dict(key=jax.random.key(seed))
    with compiling("the decoder", quiet=as_json) as compiled:
        stream = DelayedStream(add_token, len(rows), compiled)
        ls.generate(decoder, [np.array(row, np.int32) for row in rows], **options, stream=stream)
        stream.release()
    for answer in answers:
        answer.pieces.append(answer.stream.rest())
    if prints_tokens:
        _print(answers[0].pieces[-1] + "\n")
    elif as_json:
        found = [answer.facts(len(row)) for answer, row in zip(answers, rows, strict=True)]
        print_json(found if len(found) > 1 else found[0])
    else:
        _print("\n".join(answer.printed(f"{n} of {len(rows)}") for n, answer in enumerate(answers, start=1)))


class GeneratedText(NamedTuple):
    """A prompt, and the pieces of text that were generated so far."""

    prompt: str
    stream: TextStream
    pieces: list[str]

    def facts(self, prompt_tokens: int) -> dict[str, Any]:
        text, tokens = "".join(self.pieces), self.stream.count
        return dict(prompt=self.prompt, prompt_tokens=prompt_tokens, text=text, tokens=tokens)

    def printed(self, place: str) -> str:
        title = " ".join(self.prompt.split())
        if len(title) > MAX_TITLE:
            title = f"{title[: MAX_TITLE - 3]}..."
        return f"== {place}: {title}\n{''.join(self.pieces)}\n"


def _read_prompts(prompts: list[str]) -> list[str]:
    if prompts.count("-") > 1:
        raise ValueError("--prompt - is given more than once, but standard input can be read only once. Give it once.")
    return [_read_prompt(prompt) for prompt in prompts]


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        try:
            prompt.encode("utf-8")  # fails for bytes that are not UTF-8, which Python keeps as surrogates
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
        raise ValueError("--prompt is empty. Give a text to continue.")
    return tokens


def _print(piece: str) -> None:
    """Prints a piece at once; characters that the terminal's encoding lacks are replaced."""
    if piece and sys.stdout is not None:
        encoding = sys.stdout.encoding or "utf-8"
        print(piece.encode(encoding, errors="replace").decode(encoding), end="", flush=True)
