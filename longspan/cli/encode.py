"""`longspan encode`: one vector per document, computed by an encoder's checkpoint."""

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from longspan.cli.library import library
from longspan.cli.modules import modules_of
from longspan.cli.notices import compiling, say
from longspan.cli.options import MAX_LENGTH, AsJson, print_json
from longspan.cli.texts import read_stdin, tokenizer_of
from longspan.files import atomic_write, check_writable

MIN_STEP = 64  # lengths are padded to multiples of this, or of an eighth of a power of two: see `padded`


class Pooling(StrEnum):
    """How the vectors of a document's tokens are reduced to one."""

    mean = "mean"
    cls = "cls"


class TextPiece(NamedTuple):
    """A document or a part of one, which is encoded as one row."""

    document: int  # its index
    tokens: list[int]


def encode(
    files: Annotated[list[Path], typer.Argument(help="Text files, one document each; - reads standard input.")],
    model: Annotated[
        Path, typer.Option(help="Directory of an encoder with a tokenizer.json.", file_okay=False, exists=True)
    ],
    out: Annotated[
        Path, typer.Option(help=r"Write the vectors, float32 \[documents, size], to this .npy file.", dir_okay=False)
    ],
    lines: Annotated[bool, typer.Option("--lines", help="Treat every line as a document.")] = False,
    pooling: Annotated[
        Pooling | None,
        typer.Option(
            help="The vector of a document: the mean of its token vectors (the default), or the vector of its first "
            "token. With this option, unsupported modules of a sentence-transformers directory are ignored. Without "
            "it, they are an error.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        bool,
        typer.Option("--split", help="Split documents that are too long, encode the parts, and average their vectors."),
    ] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Encode only the beginning of documents that are too long.")
    ] = False,
    global_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_LENGTH,
            help="Number of first tokens that are global (Longformer only); by default 1 with --pooling cls, else 0.",
        ),
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_LENGTH, help="Maximum number of tokens in a batch.")
    ] = 16384,
    as_json: AsJson = False,
) -> None:
    """Encode documents into one vector each."""
    if split and truncate:
        raise ValueError("--split and --truncate were both given, but they exclude each other. Give one of them.")
    if [str(path) for path in files].count("-") > 1:
        raise ValueError("- is given more than once, but standard input can be read only once. Give it once.")
    check_writable(out)
    if out.resolve() in [path.resolve() for path in files]:
        raise ValueError(f"--out: {out} is one of the documents and would be overwritten. Name another file.")
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
        say(f"longspan: warning: with --pooling {chosen}, settings of {model} are ignored: {'; '.join(not_run)}.")
    global_tokens = _check_global_tokens(encoder, chosen, global_tokens)
    pieces = _pieces(tokenizer, texts, encoder.config, split=split, truncate=truncate)
    encode_batch = _BatchEncoder(encoder, chosen, global_tokens, quiet=as_json)
    vectors = _vectors(encode_batch, pieces, len(texts), batch_tokens)
    with atomic_write(out) as new, new.open("wb") as file:
        np.save(file, vectors)
    tokens = sum(len(piece.tokens) for piece in pieces)
    if as_json:
        print_json(dict(documents=len(texts), tokens=tokens, shape=list(vectors.shape), out=str(out)))
    else:
        print(f"wrote {out}: {vectors.shape[0]:,} vectors of size {vectors.shape[1]:,}, from {tokens:,} tokens")


def _refuse(directory: Path, not_run: list[str]) -> None:
    """Raises a ValueError if the vectors would differ from those of sentence-transformers."""
    if not_run:
        raise ValueError(
            f"{directory} is a sentence-transformers directory with settings that `longspan encode` does not support: "
            f"{'; '.join(not_run)}. It supports only a Transformer with mean pooling, so its vectors would differ "
            "from those of sentence-transformers. To ignore these settings, give --pooling mean or --pooling cls."
        )


def _texts(files: list[Path], lines: bool) -> list[tuple[str, str]]:
    """The name and the text of each document."""
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
            raise ValueError(f"{path} is empty, and an empty document has no vector. Leave the file out.")
        else:
            texts.append((str(path), text))
    if not texts:
        raise ValueError("The files contain no document. Give files with text.")
    return texts


def _encoder(model: Any, directory: Path) -> Any:
    """The encoder of a model with or without a task head."""
    encoder = getattr(model, "encoder", model)
    if not hasattr(encoder.config, "max_tokens"):
        raise ValueError(f"{directory} is a {type(model).__name__}, not an encoder. Give an encoder's directory.")
    return encoder


def _check_global_tokens(encoder: Any, pooling: Pooling, given: int | None) -> int | None:
    """The number of first tokens that are global; None if the model has no global tokens."""
    if not encoder.config.family.attention.has_globals:
        if given:
            raise ValueError(
                f"--global-tokens: a {encoder.config.model_type} has no global tokens. Leave the option out."
            )
        return None
    if given is None:
        return int(pooling is Pooling.cls)
    return given


def _pieces(
    tokenizer: Any, texts: list[tuple[str, str]], config: Any, *, split: bool, truncate: bool
) -> list[TextPiece]:
    """The pieces of all documents: one each, or several with `split`."""
    max_tokens, pieces = config.max_tokens, []
    for number, (name, text) in enumerate(texts):
        whole = tokenizer.encode(text)
        if not whole.ids:
            raise ValueError(f"{name} has no tokens: the tokenizer drops all of its text. Leave this document out.")
        parts = [whole]
        if len(whole.ids) > max_tokens:
            if not (split or truncate):
                raise ValueError(
                    f"{name} has {len(whole.ids):,} tokens, but the model takes at most {max_tokens:,}. Encode the "
                    "document in parts with --split, or only its beginning with --truncate."
                )
            parts = _parts(tokenizer, text, max_tokens)
            if truncate:
                parts = parts[:1]
        pieces += [TextPiece(number, part.ids) for part in parts]
    largest = max(max(piece.tokens) for piece in pieces)
    if largest >= config.vocab_size:
        raise ValueError(
            f"The tokenizer gives token {largest}, but the model has only {config.vocab_size} tokens. Give the "
            "tokenizer.json that belongs to the model."
        )
    return pieces


def _parts(tokenizer: Any, text: str, max_tokens: int) -> list[Any]:
    """The text in parts of at most `max_tokens`, each with the special tokens of a whole text."""
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    if special >= max_tokens:
        raise ValueError(
            f"The model takes at most {max_tokens} tokens, and the tokenizer adds {special} special tokens. None is "
            "left for text."
        )
    tokenizer.enable_truncation(max_tokens)
    first = tokenizer.encode(text)
    tokenizer.no_truncation()
    return [first, *first.overflowing]


class _BatchEncoder:
    """Encodes batches of pieces that have one padded length, and prints a notice when a new shape is compiled."""

    def __init__(self, encoder: Any, pooling: Pooling, global_tokens: int | None, *, quiet: bool):
        from longspan.models import compiled

        self.call, self.config = compiled(encoder), encoder.config
        self.pooling, self.global_tokens, self.quiet = pooling, global_tokens, quiet
        self.shapes: set[tuple[int, int]] = set()

    def __call__(self, batch: list[TextPiece]) -> np.ndarray:
        shape = len(batch), padded(len(batch[0].tokens), self.config.max_tokens)
        rows = f"{shape[0]:,} rows"
        if shape[0] == 1:
            rows = "1 row"
        with compiling(f"the encoder for {rows} of {shape[1]:,} tokens", quiet=self.quiet or shape in self.shapes):
            self.shapes.add(shape)
            return _pooled(self.call, batch, self.config, self.pooling, self.global_tokens)


def _vectors(encode_batch: _BatchEncoder, pieces: list[TextPiece], documents: int, batch_tokens: int) -> np.ndarray:
    """One vector per document: the mean of its parts, weighted by their numbers of tokens."""
    from rich.console import Console
    from rich.progress import Progress

    total, weight = np.zeros((documents, encode_batch.config.hidden_size), np.float64), np.zeros((documents, 1))
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not on_terminal) as progress:
        task = progress.add_task("encoding", total=sum(len(piece.tokens) for piece in pieces))
        for batch in _batches(pieces, batch_tokens, encode_batch.config.max_tokens):
            for piece, vector in zip(batch, encode_batch(batch), strict=True):
                total[piece.document] += len(piece.tokens) * vector
                weight[piece.document] += len(piece.tokens)
            progress.advance(task, sum(len(piece.tokens) for piece in batch))
    return (total / weight).astype(np.float32)


def _batches(pieces: list[TextPiece], batch_tokens: int, max_tokens: int) -> Iterator[list[TextPiece]]:
    """Batches of pieces with the same padded length, the longest first: a lack of memory shows in the first batch."""
    ordered = sorted(pieces, key=lambda piece: len(piece.tokens), reverse=True)
    while ordered:
        length = padded(len(ordered[0].tokens), max_tokens)
        alike = [piece for piece in ordered if padded(len(piece.tokens), max_tokens) == length]
        rows = max(1, batch_tokens // length)
        for at in range(0, len(alike), rows):
            yield alike[at : at + rows]
        ordered = ordered[len(alike) :]


def padded(length: int, max_tokens: int) -> int:
    """The length that a piece is padded to.

    Lengths are rounded up to a multiple of an eighth of the next power of two, so that there are few programs to
    compile and little padding.

    Example:
        >>> [padded(n, 4096) for n in (1, 64, 65, 700, 1500, 4090)]
        [64, 64, 128, 768, 1536, 4096]
    """
    step = max(MIN_STEP, 1 << max(0, (length - 1).bit_length() - 3))
    return min(max_tokens, -(-length // step) * step)


def _pooled(run: Any, batch: list[TextPiece], config: Any, pooling: Pooling, global_tokens: int | None) -> np.ndarray:
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
