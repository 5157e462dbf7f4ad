"""`longspan encode`: one vector for each document, from an encoder's directory."""

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from longspan.cli.files import check_writable, written
from longspan.cli.library import library
from longspan.cli.modules import modules_of
from longspan.cli.notices import compiling, say
from longspan.cli.options import LONGEST, AsJson, print_json
from longspan.cli.texts import read_stdin, tokenizer_of

STEP = 64  # lengths are padded to multiples of this or of an eighth: few programs, little padding


class Pooling(StrEnum):
    """How a document's tokens become one vector."""

    mean = "mean"
    cls = "cls"


class Piece(NamedTuple):
    """Tokens that are encoded together: a document, or a part of one."""

    document: int
    tokens: list[int]


def encode(
    files: Annotated[list[Path], typer.Argument(help="Texts, one document each; - reads standard input.")],
    model: Annotated[
        Path, typer.Option(help="An encoder's directory, with a tokenizer.json.", file_okay=False, exists=True)
    ],
    out: Annotated[
        Path, typer.Option(help=r"Vectors, float32 \[documents, size], as NumPy saves them.", dir_okay=False)
    ],
    lines: Annotated[bool, typer.Option("--lines", help="Every line is a document.")] = False,
    pooling: Annotated[
        Pooling | None,
        typer.Option(
            help="The mean over the tokens, or the first token; by default the mean. Given by name, it also runs a "
            "sentence-transformers directory whose other modules are then ignored.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        bool, typer.Option("--split", help="Encode longer documents in parts, and average these.")
    ] = False,
    truncate: Annotated[bool, typer.Option("--truncate", help="Leave out what is longer than the model.")] = False,
    global_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=LONGEST,
            help="First tokens that are global (Longformer only); by default 1 with --pooling cls, else 0.",
        ),
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, max=LONGEST, help="Tokens that are encoded at once, at most.")
    ] = 16384,
    as_json: AsJson = False,
) -> None:
    """Encode documents, one vector each."""
    if split and truncate:
        raise ValueError("--split and --truncate are two answers to one question. Give one of them.")
    if [str(path) for path in files].count("-") > 1:
        raise ValueError("- is given more than once, but standard input is read once. Give it once.")
    check_writable(out)
    if out.resolve() in [path.resolve() for path in files]:
        raise ValueError(f"--out: {out} is one of the documents, and would be overwritten.")
    modules, chosen = modules_of(model), pooling or Pooling.mean
    if pooling is None:
        _refuse(model, modules.not_run(chosen, None))
    tokenizer = tokenizer_of(model)
    texts = _texts(files, lines)
    ls = library()
    encoder = _encoder(ls.hf.load(model), model)
    not_run = modules.not_run(chosen, encoder.config.max_tokens)
    if pooling is None:
        _refuse(model, not_run)
    elif not_run:
        say(f"longspan: warning: with --pooling {chosen}, this is ignored in {model}: {'; '.join(not_run)}.")
    globals_ = _globals(encoder, chosen, global_tokens)
    pieces = _pieces(tokenizer, texts, encoder.config, split=split, truncate=truncate)
    run = _Run(encoder, chosen, globals_, quiet=as_json)
    vectors = _vectors(run, pieces, len(texts), batch_tokens)
    with written(out) as new, new.open("wb") as file:
        np.save(file, vectors)
    tokens = sum(len(piece.tokens) for piece in pieces)
    if as_json:
        print_json(dict(documents=len(texts), tokens=tokens, shape=list(vectors.shape), out=str(out)))
    else:
        print(f"wrote {out}: {vectors.shape[0]:,} vectors of {vectors.shape[1]:,}, from {tokens:,} tokens")


def _refuse(directory: Path, not_run: list[str]) -> None:
    """Raises if vectors would not be those of the directory's own modules."""
    if not_run:
        raise ValueError(
            f"{directory} is a sentence-transformers directory, and `longspan encode` would give other vectors: it "
            f"runs a Transformer with mean pooling, but {'; '.join(not_run)}. To ignore that, give --pooling mean or "
            "--pooling cls."
        )


def _texts(files: list[Path], lines: bool) -> list[tuple[str, str]]:
    """The documents, each with a name."""
    texts = []
    for path in files:
        raw = read_stdin() if str(path) == "-" else path.read_bytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text, at byte {error.start}.") from error
        if lines:
            numbered = enumerate(text.splitlines(), start=1)
            texts += [(f"{path}, line {number},", line) for number, line in numbered if line.strip()]
        elif not text.strip():
            raise ValueError(f"{path} is empty: it has no vector. Leave it out.")
        else:
            texts.append((str(path), text))
    if not texts:
        raise ValueError("There is no document in these files.")
    return texts


def _encoder(model: Any, directory: Path) -> Any:
    """The encoder of a model, with a head or without."""
    encoder = getattr(model, "encoder", model)
    if not hasattr(encoder.config, "max_tokens"):
        raise ValueError(f"{directory} is a {type(model).__name__}, not an encoder.")
    return encoder


def _globals(encoder: Any, pooling: Pooling, wanted: int | None) -> int | None:
    """How many first tokens are global; None: the model knows none."""
    if not encoder.config.family.attention.has_globals:
        if wanted:
            raise ValueError(f"--global-tokens: a {encoder.config.model_type} has no global tokens. Leave it out.")
        return None
    return int(pooling is Pooling.cls) if wanted is None else wanted


def _pieces(tokenizer: Any, texts: list[tuple[str, str]], config: Any, *, split: bool, truncate: bool) -> list[Piece]:
    """What is encoded, document by document."""
    most, pieces = config.max_tokens, []
    for number, (name, text) in enumerate(texts):
        whole = tokenizer.encode(text)
        if not whole.ids:
            raise ValueError(f"{name} has no tokens: the tokenizer leaves out all of it.")
        if len(whole.ids) > most and not (split or truncate):
            raise ValueError(
                f"{name} has {len(whole.ids):,} tokens, and the model takes {most:,}. Encode it in "
                "parts with --split, or its beginning with --truncate."
            )
        # Each part with the special tokens of a whole text.
        parts = [whole] if len(whole.ids) <= most else _parts(tokenizer, text, most)
        pieces += [Piece(number, part.ids) for part in (parts if split else parts[:1])]
    largest = max(max(piece.tokens) for piece in pieces)
    if largest >= config.vocab_size:
        raise ValueError(
            f"The tokenizer gives token {largest}, but the model knows only {config.vocab_size}: they do not belong "
            "together."
        )
    return pieces


def _parts(tokenizer: Any, text: str, most: int) -> list[Any]:
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    if special >= most:
        raise ValueError(f"The model takes {most} tokens, of which {special} are special: there is no room for text.")
    tokenizer.enable_truncation(most)
    first = tokenizer.encode(text)
    tokenizer.no_truncation()
    return [first, *first.overflowing]


class _Run:
    """An encoder that is called with pieces of one padded length, and says when it compiles."""

    def __init__(self, encoder: Any, pooling: Pooling, global_tokens: int | None, *, quiet: bool):
        from longspan.models import compiled

        self.call, self.config = compiled(encoder), encoder.config
        self.pooling, self.global_tokens, self.quiet = pooling, global_tokens, quiet
        self.shapes: set[tuple[int, int]] = set()

    def __call__(self, batch: list[Piece]) -> np.ndarray:
        shape = len(batch), padded(len(batch[0].tokens), self.config.max_tokens)
        rows = "1 row" if shape[0] == 1 else f"{shape[0]:,} rows"
        with compiling(f"the encoder for {rows} of {shape[1]:,} tokens", quiet=self.quiet or shape in self.shapes):
            self.shapes.add(shape)
            return _pooled(self.call, batch, self.config, self.pooling, self.global_tokens)


def _vectors(run: _Run, pieces: list[Piece], documents: int, batch_tokens: int) -> np.ndarray:
    """One vector per document: of parts, the mean, each counting by its tokens."""
    from rich.console import Console
    from rich.progress import Progress

    total, weight = np.zeros((documents, run.config.hidden_size), np.float64), np.zeros((documents, 1))
    watched = sys.stderr is not None and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not watched) as progress:
        task = progress.add_task("encoding", total=sum(len(piece.tokens) for piece in pieces))
        for batch in _batches(pieces, batch_tokens, run.config.max_tokens):
            for piece, vector in zip(batch, run(batch), strict=True):
                total[piece.document] += len(piece.tokens) * vector
                weight[piece.document] += len(piece.tokens)
            progress.advance(task, sum(len(piece.tokens) for piece in batch))
    return (total / weight).astype(np.float32)


def _batches(pieces: list[Piece], batch_tokens: int, most: int) -> Iterator[list[Piece]]:
    """Pieces of one padded length side by side, the longest first: if memory is short, that shows at once."""
    ordered = sorted(pieces, key=lambda piece: len(piece.tokens), reverse=True)
    while ordered:
        length = padded(len(ordered[0].tokens), most)
        alike = [piece for piece in ordered if padded(len(piece.tokens), most) == length]
        rows = max(1, batch_tokens // length)
        for at in range(0, len(alike), rows):
            yield alike[at : at + rows]
        ordered = ordered[len(alike) :]


def padded(length: int, most: int) -> int:
    """The length that a piece is padded to.

    Example:
        >>> [padded(n, 4096) for n in (1, 64, 65, 700, 1500, 4090)]
        [64, 64, 128, 768, 1536, 4096]
    """
    step = max(STEP, 1 << max(0, (length - 1).bit_length() - 3))
    return min(most, -(-length // step) * step)


def _pooled(run: Any, batch: list[Piece], config: Any, pooling: Pooling, global_tokens: int | None) -> np.ndarray:
    """The vector of each piece of a batch."""
    length = padded(len(batch[0].tokens), config.max_tokens)
    ids = np.full((len(batch), length), max(config.pad_token_id, 0), np.int32)
    mask = np.zeros((len(batch), length), np.int32)
    for row, piece in enumerate(batch):
        ids[row, : len(piece.tokens)], mask[row, : len(piece.tokens)] = piece.tokens, 1
    arguments = dict(attention_mask=mask)
    if global_tokens:
        arguments["global_attention_mask"] = mask * (np.arange(length) < global_tokens)
    hidden = np.asarray(run(ids, **arguments).last_hidden_state, np.float32)
    if pooling is Pooling.cls:
        return hidden[:, 0]
    return (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
