"""`longspan encode`: one vector per document, computed by an encoder's or a decoder's checkpoint."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from longspan.cli.documents import Document, check_files, parts_of, read_documents
from longspan.cli.library import library
from longspan.cli.notices import compiling, say
from longspan.cli.options import MAX_LENGTH, AsJson, print_json
from longspan.cli.parts import PartFolder, digest_of
from longspan.files import check_writable


class PoolingChoice(StrEnum):
    """How the vectors of a document's tokens are reduced to one."""

    mean = "mean"
    cls = "cls"
    max = "max"
    mean_sqrt_len_tokens = "mean_sqrt_len_tokens"
    weightedmean = "weightedmean"
    lasttoken = "lasttoken"


class TextPiece(NamedTuple):
    """A document or a part of one, which is encoded on its own."""

    document: int  # its index in the part
    tokens: np.ndarray


def encode(
    files: Annotated[list[Path], typer.Argument(help="Text files, one document each; - reads standard input.")],
    model: Annotated[
        Path, typer.Option(help="Directory of a checkpoint with a tokenizer.json.", file_okay=False, exists=True)
    ],
    out: Annotated[
        Path, typer.Option(help=r"Write the vectors, float32 \[documents, size], to this .npy file.", dir_okay=False)
    ],
    lines: Annotated[bool, typer.Option("--lines", help="Treat every line as a document.")] = False,
    pooling: Annotated[
        PoolingChoice | None,
        typer.Option(
            help="The vector of a document: for example the mean of its token vectors, or the vector of its first "
            "token. By default the modules of the sentence-transformers directory; this option replaces all of them. "
            "Without a modules.json the default is the mean.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text that is put before every document.", show_default=False)
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(help="Name of one of the directory's prompts, for example query.", show_default=False),
    ] = None,
    truncate_dim: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_LENGTH, help="Keep only this many features of each vector.", show_default=False),
    ] = None,
    split: Annotated[
        bool,
        typer.Option("--split", help="Split documents that are too long, encode the parts, and average their vectors."),
    ] = False,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate",
            help="Encode only the beginning of documents that are too long, or their end if the tokenizer's "
            "truncation_side is left.",
        ),
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
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an unfinished run, whose vectors are in OUT.parts.")
    ] = False,
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
    check_files(files)
    embedder = _embedder(model, pooling)
    embedder.global_tokens = _global_tokens(embedder, pooling, global_tokens)
    text = embedder.prompt(prompt, prompt_name)
    size = embedder.dimension(truncate_dim)
    found = dict(
        model=embedder.model.config.model_type,
        modules=[str(module) for module in embedder.modules],
        prompt=text,
        dimension=size,
        longest_input=embedder.max_seq_length,
    )
    if not as_json:
        print(_printed(found), flush=True)
    run = dict(found, model=digest_of(model), split=split, truncate=truncate, global_tokens=embedder.global_tokens)
    folder = PartFolder(out, run, resume=resume)
    encoder = _DocumentEncoder(embedder, text, size, batch_tokens, split=split, truncate=truncate, quiet=as_json)
    try:
        shape = _encode_parts(folder, encoder, read_documents(files, lines=lines))
    except BaseException:
        folder.discard_if_empty()
        if folder.added and not folder.temporary:
            count = sum(entry.documents for entry in folder.finished)
            say(f"longspan: {folder.folder} has the vectors of {count:,} documents. Continue with --resume.")
        raise
    if as_json:
        print_json(dict(documents=shape[0], tokens=folder.tokens, shape=list(shape), out=str(out), **found))
    else:
        print(f"wrote {out}: {shape[0]:,} vectors of size {shape[1]:,}, from {folder.tokens:,} tokens")


def _embedder(directory: Path, pooling: PoolingChoice | None) -> Any:
    """The directory's embedder, or one with another pooling instead of the directory's modules."""
    ls = library()
    if pooling is None:
        return ls.hf.load_embedder(directory)
    from longspan.hf.embedder import load_pooled
    from longspan.hf.sentence_modules import listed_modules

    replaced = listed_modules(directory)
    if replaced:
        names = ", ".join(map(str, replaced[1:])) or "none"
        say(f"longspan: --pooling {pooling} replaces the modules that {directory} lists after the model: {names}.")
    return load_pooled(directory, (str(pooling),))


def _global_tokens(embedder: Any, pooling: PoolingChoice | None, given: int | None) -> int:
    """The number of first tokens that are global."""
    family = embedder.model.config.family
    if not getattr(getattr(family, "attention", None), "has_globals", False):
        if given:
            raise ValueError(
                f"--global-tokens: a {embedder.model.config.model_type} has no global tokens. Leave the option out."
            )
        return 0
    if given is None:
        return int(pooling is PoolingChoice.cls)
    return given


def _printed(found: dict[str, Any]) -> str:
    """What a directory contains, in one line."""
    prompt, longest = "none", "unlimited"
    if found["prompt"]:
        prompt = repr(found["prompt"])
    if found["longest_input"] is not None:
        longest = f"{found['longest_input']:,} tokens"
    modules = ", ".join([found["model"], *found["modules"]])
    return f"modules: {modules}; prompt: {prompt}; dimension: {found['dimension']:,}; longest input: {longest}"


def _encode_parts(folder: PartFolder, encoder: "_DocumentEncoder", documents: Iterator[Document]) -> tuple[int, int]:
    """Encodes the parts that are not finished, and joins all. Returns the shape of the vectors."""
    count = 0
    with _progress() as show:
        for part in parts_of(documents):
            if not folder.skip(count, part):
                folder.add(part, *encoder(part.documents))
            count += 1
            show(sum(entry.documents for entry in folder.finished[:count]))
    return folder.join(count)


class _DocumentEncoder:
    """Encodes documents, and prints a notice when a new program is compiled."""

    def __init__(
        self, embedder: Any, prompt: str, size: int, batch_tokens: int, *, split: bool, truncate: bool, quiet: bool
    ):
        self.embedder, self.prompt, self.size, self.batch_tokens = embedder, prompt, size, batch_tokens
        self.split, self.truncate, self.quiet = split, truncate, quiet
        self.compiled: set[int] = set()
        if split and embedder.max_seq_length is not None:
            # The first part begins with the prompt, also if `embed` would keep the end of a long text.
            embedder.tokenizer.enable_truncation(embedder.max_seq_length, direction="right")

    def __call__(self, documents: list[Document]) -> tuple[np.ndarray, int]:
        """The vectors of the documents, and their number of tokens."""
        first, later = self.pieces(documents)
        total, weight = np.zeros((len(documents), self.embedder.size)), np.zeros((len(documents), 1))
        # Only the first piece of a document begins with the prompt.
        for prompt, pieces in ((self.prompt, first), ("", later)):
            for place, vector in self.vectors([piece.tokens for piece in pieces], prompt):
                piece = pieces[place]
                total[piece.document] += len(piece.tokens) * vector.astype(np.float64)
                weight[piece.document] += len(piece.tokens)
        mean = total / weight
        split = sorted({piece.document for piece in later})
        if split and type(self.embedder.modules[-1]).__name__ == "Normalize":
            mean[split] /= np.maximum(np.linalg.norm(mean[split], axis=1, keepdims=True), 1e-12)
        return mean.astype(np.float32)[:, : self.size], int(weight.sum())

    def pieces(self, documents: list[Document]) -> tuple[list[TextPiece], list[TextPiece]]:
        """The first pieces of all documents, and with --split the later ones."""
        first, later = [], []
        tokenized = self.embedder.tokenize([document.text for document in documents], self.prompt)
        for number, (document, pieces) in enumerate(zip(documents, tokenized, strict=True)):
            if len(pieces) > 1 and not (self.split or self.truncate):
                raise ValueError(self.too_long(document, pieces))
            first.append(TextPiece(number, pieces[0]))
            if self.split:
                later += [TextPiece(number, piece) for piece in pieces[1:]]
        names = [document.name for document in documents]
        self.embedder.check_tokens([piece.tokens for piece in first], self.prompt, names)
        self.embedder.check_tokens([piece.tokens for piece in later], "", [names[piece.document] for piece in later])
        return first, later

    def too_long(self, document: Document, pieces: list[np.ndarray]) -> str:
        special = self.embedder.tokenizer.num_special_tokens_to_add(is_pair=False)
        count = sum(len(piece) - special for piece in pieces) + special
        return (
            f"{document.name} has {count:,} tokens, but the model takes at most {self.embedder.max_seq_length:,}. "
            "Encode the document in parts with --split, or only its beginning with --truncate."
        )

    def vectors(self, tokens: list[np.ndarray], prompt: str) -> Iterator[tuple[int, np.ndarray]]:
        """The vector of each text, with the index of the text."""
        for batch in self.embedder.batches(tokens, prompt, batch_tokens=self.batch_tokens):
            quiet = self.quiet or batch.length in self.compiled
            with compiling(f"the encoder for {batch.length:,} tokens", quiet=quiet):
                found = self.embedder.run(batch)
            self.compiled.add(batch.length)
            yield from zip(batch.texts, found, strict=True)


@contextmanager
def _progress() -> Iterator[Any]:
    """Shows the number of encoded documents on a terminal. Yields a function that takes it."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not on_terminal) as bar:
        task = bar.add_task("encoding", total=None)
        yield lambda count: bar.update(task, description=f"{count:,} documents encoded")
