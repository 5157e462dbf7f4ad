"""`Embedder`: one vector per text, from a tokenizer, an encoder or a decoder, and the modules after it."""

import copy
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from longspan.array_types import no_type_check
from longspan.checks import check_choice
from longspan.models.decoders.causal_lm import CausalLM
from longspan.models.encoders.encoder import Encoder
from longspan.models.fields import is_count
from longspan.models.graph import HashedGraph, SplitModel
from longspan.models.packing import TextBatch, pack, row_lengths
from longspan.models.pooling import DenseLayer, Normalize, PackedTexts, Pooling
from longspan.models.similarity import SIMILARITIES, similarity
from longspan.optional import is_installed

CPU_ROW = 1024  # tokens of a packed row on CPUs, where longer rows were slower
UNLIMITED = 2**20  # the longest text of a model without a limit
CHUNK = 1024  # texts that are tokenized together: their encodings need much more memory than their ids


class Embedder:
    """A model that computes one vector per text, as sentence-transformers does; `hf.load_embedder` returns one.

    Texts are packed into rows of few lengths, so that any mix of lengths compiles at most 16 programs. Longformer and
    BigBird do not support packing; there each text has a row of its own.

    Args:
        model: an `Encoder`, or a `CausalLM`, of which the last hidden state is used.
        tokenizer: a `tokenizers.Tokenizer`. It is copied; its own padding and truncation are ignored.
        modules: a `Pooling`, then any number of `DenseLayer` and `Normalize`; by default the mean of the tokens.
        prompts: texts by name, of which one can be put before all texts of a call.
        default_prompt_name: the name of the prompt of calls that give none.
        max_seq_length: the number of tokens after which texts are truncated; by default the model's maximum.
        truncate_dim: the default `truncate_dim` of `embed`.
        similarity_fn_name: "cosine", "dot", "euclidean" or "manhattan".
        truncation_side: the side of a long text that is cut off, "right" or "left".
        do_lower_case: whether texts are converted to lower case, also if the tokenizer does not do it.

    Attributes:
        source: the directory that `hf.load_embedder` read; otherwise None.

    Example:
        >>> from flax import nnx
        >>> from tokenizers import Tokenizer
        >>> from tokenizers.models import WordLevel
        >>> from tokenizers.pre_tokenizers import Whitespace
        >>> from longspan import models
        >>> tokenizer = Tokenizer(WordLevel(dict(cats=0, sleep=1, dogs=2, bark=3, unknown=4), unk_token="unknown"))
        >>> tokenizer.pre_tokenizer = Whitespace()
        >>> config = models.BertConfig(vocab_size=5, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> encoder = models.Encoder(config, rngs=nnx.Rngs(0))
        >>> embedder = models.Embedder(encoder, tokenizer, (models.Pooling(size=6), models.Normalize()))
        >>> embedder
        Embedder(bert, mean pooling, Normalize, size=6, max_seq_length=512)
        >>> vectors = embedder.embed(["cats sleep", "dogs bark", "cats"])
        >>> vectors.shape, vectors.dtype
        ((3, 6), dtype('float32'))
        >>> embedder.similarity(vectors[:1], vectors).shape
        (1, 3)
    """

    def __init__(
        self,
        model: Encoder | CausalLM,
        tokenizer: Any,
        modules: Sequence[Pooling | DenseLayer | Normalize] | None = None,
        *,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        max_seq_length: int | None = None,
        truncate_dim: int | None = None,
        similarity_fn_name: str = "cosine",
        truncation_side: str = "right",
        do_lower_case: bool = False,
    ):
        _check_model(model)
        if modules is None:
            modules = (Pooling(size=model.config.hidden_size),)
        self.model, self.modules = model, tuple(modules)
        self.prompts, self.default_prompt_name = dict(prompts or {}), default_prompt_name
        self.max_seq_length = _limit(model, max_seq_length)
        self.truncate_dim, self.similarity_fn_name = truncate_dim, similarity_fn_name
        self.truncation_side, self.do_lower_case = truncation_side, do_lower_case
        self.global_tokens = 0  # of each text, its first ones; Longformer only
        self.source: str | None = None
        self.tokenizer = copy.deepcopy(tokenizer)
        self.tokenizer.no_padding()
        if do_lower_case:
            _lower_case(self.tokenizer)
        _check_modules(model, self.modules)
        check_choice("similarity_fn_name", similarity_fn_name, tuple(SIMILARITIES))
        check_choice("truncation_side", truncation_side, ("left", "right"))
        if default_prompt_name is not None:
            check_choice("default_prompt_name", default_prompt_name, tuple(self.prompts))
        self.dimension(truncate_dim)
        self._check_room()
        self.tokenizer.enable_truncation(self.max_seq_length or UNLIMITED, direction=truncation_side)
        self._split_model = SplitModel(model)

    @no_type_check
    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate_dim: int | None = None,
        batch_tokens: int = 16384,
    ) -> Float[np.ndarray, "n size"]:
        """The vectors of the texts, float32, in the order of the texts.

        Texts with more than `max_seq_length` tokens are truncated. Their last special token is kept. A terminal shows
        the progress on stderr.

        Args:
            texts: a list of strings.
            prompt: a text that is put before each text; "" for none. By default the prompt `default_prompt_name`.
            prompt_name: the name of one of the `prompts` instead.
            truncate_dim: the number of first features to return. They are not normalised again.
            batch_tokens: the maximum number of tokens in a batch; a longer text is a batch of its own.
        """
        _check_texts(texts)
        texts, prompt = list(texts), self.prompt(prompt, prompt_name)
        tokens: list[np.ndarray] = []
        for start in range(0, len(texts), CHUNK):
            tokens += [ids for ids, *_ in self.tokenize(texts[start : start + CHUNK], prompt)]
        self.check_tokens(tokens, prompt, [f"texts[{n}]" for n in range(len(texts))])
        size = self.dimension(truncate_dim)
        vectors = np.empty((len(texts), size), np.float32)
        with _progress(sum(map(len, tokens))) as advance:
            for batch in self.batches(tokens, prompt, batch_tokens=batch_tokens):
                vectors[batch.texts] = self.run(batch)[:, :size]
                advance(sum(len(tokens[index]) for index in batch.texts))
        return vectors

    def similarity(self, a: Float[Any, "*n size"], b: Float[Any, "*m size"]) -> Float[np.ndarray, "n m"]:
        """The similarity of each vector of `a` to each of `b`, float32; a larger number is more similar.

        `similarity_fn_name` decides: the cosine, the dot product, or the negative Euclidean or Manhattan distance.

        Args:
            a: vectors of shape [n, size], or one of shape [size].
            b: vectors of shape [m, size], or one of shape [size].
        """
        return similarity(self.similarity_fn_name, a, b)

    @property
    def size(self) -> int:
        """The number of features of a vector, before `truncate_dim`."""
        return _sizes(self.modules)[-1]

    def dimension(self, truncate_dim: int | None = None) -> int:
        """The number of features of the vectors of a call of `embed` with this argument."""
        if truncate_dim is None:
            truncate_dim = self.truncate_dim
        if truncate_dim is None:
            return self.size
        if not is_count(truncate_dim) or truncate_dim > self.size:
            raise ValueError(
                f"`truncate_dim` must be a number of features from 1 to {self.size}, the size of a vector, got "
                f"{truncate_dim!r:.80}."
            )
        return truncate_dim

    def prompt(self, prompt: str | None = None, prompt_name: str | None = None) -> str:
        """The text that a call of `embed` with these arguments puts before each text."""
        if prompt is not None and prompt_name is not None:
            raise ValueError(
                f"`prompt={prompt!r:.80}` and `prompt_name={prompt_name!r:.80}` were both given, but a text has one "
                "prompt. Give one of them."
            )
        if prompt is not None:
            if not isinstance(prompt, str):
                raise TypeError(f"`prompt` must be a text, got a {type(prompt).__name__}.")
            _check_unicode("`prompt`", prompt)
            return prompt
        if prompt_name is None:
            prompt_name = self.default_prompt_name
        if prompt_name is None:
            return ""
        if prompt_name not in self.prompts:
            names = ", ".join(map(repr, sorted(self.prompts))) or "no prompts"
            raise ValueError(
                f"`prompt_name={prompt_name!r:.80}` is not one of this embedder's prompts. It has {names}. Give one of "
                "these names, or the text itself as `prompt`."
            )
        return self.prompts[prompt_name]

    def tokenize(self, texts: Sequence[str], prompt: str = "") -> Iterator[list[Int[np.ndarray, "_"]]]:
        """The token ids of each text, in pieces of at most `max_seq_length` tokens with their own special tokens.

        `embed` uses the first piece only.
        """
        for encoding in self.tokenizer.encode_batch_fast([prompt + text for text in texts]):
            yield [np.array(piece.ids, np.int32) for piece in (encoding, *encoding.overflowing)]

    def check_tokens(self, tokens: Sequence[Int[np.ndarray, "_"]], prompt: str, names: Sequence[str]) -> None:
        """Raises for texts without tokens to pool, and for token ids that the model does not have."""
        skip = self.skipped(prompt)
        for ids, name in zip(tokens, names, strict=True):
            if len(ids) == 0:
                raise ValueError(f"{name} has no tokens: the tokenizer drops all of its text. Leave this text out.")
            if len(ids) <= skip:
                raise ValueError(
                    f"{name} has no tokens besides the prompt's, which are not pooled. Leave this text out, or give a "
                    "shorter prompt if it was truncated."
                )
            if ids.max() >= self.model.config.vocab_size:
                raise ValueError(
                    f"The tokenizer gives token {ids.max()}, but the model has only {self.model.config.vocab_size} "
                    "tokens. Give the tokenizer.json that belongs to the model."
                )

    def skipped(self, prompt: str) -> int:
        """The number of first tokens of a text with this prompt that are not pooled."""
        pooling: Any = self.modules[0]
        if pooling.include_prompt or not prompt:
            return 0
        encoded = self.tokenizer.encode(prompt)
        ends_special = encoded.special_tokens_mask[-1:] == [1] or encoded.ids[-1:] in self._special_tokens
        return len(encoded.ids) - ends_special

    def batches(
        self, tokens: Sequence[Int[np.ndarray, "_"]], prompt: str = "", *, batch_tokens: int = 16384
    ) -> Iterator[TextBatch]:
        """Batches of texts, given as token ids, for `run`."""
        if not is_count(batch_tokens):
            raise ValueError(f"`batch_tokens` must be a number of tokens, at least 1, got {batch_tokens!r}.")
        row = CPU_ROW if jax.default_backend() == "cpu" else 16384
        lengths = row_lengths(max(row, self.max_seq_length or UNLIMITED))
        capacity = max(length for length in lengths if length <= max(lengths[0], min(row, batch_tokens)))
        return pack(tokens, lengths, capacity, skip=self.skipped(prompt), single=not _packs(self.model))

    def run(self, batch: TextBatch) -> Float[np.ndarray, "n size"]:
        """The vectors of a batch's texts. The length of the batch's row decides the program."""
        if self._split_model.model is not self.model:
            self._split_model = SplitModel(self.model)
        graph, state = self._split_model.current()
        vectors = _embed_row(graph, self.global_tokens, state, self.modules, batch.packed)
        return np.asarray(vectors)[: len(batch.texts)]

    @functools.cached_property
    def _special_tokens(self) -> list[list[int]]:
        return [[n] for n, token in self.tokenizer.get_added_tokens_decoder().items() if token.special]

    def _check_room(self) -> None:
        special = self.tokenizer.num_special_tokens_to_add(is_pair=False)
        if self.max_seq_length is not None and special >= self.max_seq_length:
            raise ValueError(
                f"Texts are truncated to {self.max_seq_length} tokens, and the tokenizer adds {special} special tokens "
                "to each, which leaves none for text. Give a larger `max_seq_length`."
            )

    def __repr__(self) -> str:
        modules = ", ".join(map(str, self.modules))
        kind = self.model.config.model_type
        return f"Embedder({kind}, {modules}, size={self.dimension()}, max_seq_length={self.max_seq_length})"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _embed_row(structure: HashedGraph, global_tokens: int, state: Any, modules: tuple, texts: PackedTexts) -> jax.Array:
    """The vectors of all texts that a row has room for; those of absent texts are meaningless."""
    x = _hidden(nnx.merge(structure.graph, state), global_tokens, texts)[0]
    for module in modules:
        x = module(x, texts)
    return x.astype(jnp.float32)


def _hidden(model: Encoder | CausalLM, global_tokens: int, texts: PackedTexts) -> Float[jax.Array, "1 T D"]:
    if isinstance(model, CausalLM):
        return model(texts.ids, segment_ids=texts.text, logits=False).last_hidden_state
    options: dict[str, Any] = dict(deterministic=True)
    config: Any = model.config
    if config.position_rows is not None:
        options["position_ids"] = _table_rows(config, texts)
    if global_tokens:
        options["global_attention_mask"] = (texts.place >= 0) & (texts.place < global_tokens)
    if _packs(model):
        options["segment_ids"] = texts.text
    else:
        options["attention_mask"] = texts.text >= 0
    return model(texts.ids, **options).last_hidden_state


def _table_rows(config: Any, texts: PackedTexts) -> Int[jax.Array, "1 T"]:
    """The row of the position table of each token."""
    if config.first_position == 0:
        return jnp.maximum(texts.place, 0)
    # These families count the tokens that are not padding, also if the text itself spells the padding token.
    is_token = (texts.ids != config.pad_token_id).astype(jnp.int32)
    before = jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - is_token
    count = before - before[:, texts.starts[texts.text[0]]]
    return jnp.where((is_token == 1) & (texts.text >= 0), count + config.first_position, config.pad_token_id)


def _packs(model: Encoder | CausalLM) -> bool:
    """Whether the model supports several texts in one row."""
    return isinstance(model, CausalLM) or model.config.family.attention.packs


def _check_model(model: Any) -> None:
    if not isinstance(model, Encoder | CausalLM):
        raise TypeError(
            f"`model` must be a models.Encoder or a models.CausalLM, got a {type(model).__name__}. Of a model with a "
            "head, give its `encoder`."
        )
    if isinstance(model, Encoder):
        return
    config = model.config
    for kind in dict.fromkeys(config.kinds):
        short, long = config.frequencies(kind, 1)[0], config.frequencies(kind, UNLIMITED)[0]
        if not np.array_equal(short, long):
            raise NotImplementedError(
                f"This {config.model_type} has rotary frequencies that depend on the length of the row, so the vector "
                "of a text would depend on its padding. Give a model whose frequencies are fixed."
            )


def _check_modules(model: Encoder | CausalLM, modules: tuple) -> None:
    names = [type(module).__name__ for module in modules]
    if not modules or not isinstance(modules[0], Pooling):
        raise ValueError(f"`modules` must begin with a models.Pooling, got {names}.")
    if not all(isinstance(module, DenseLayer | Normalize) for module in modules[1:]):
        raise ValueError(f"After the Pooling, `modules` may have only DenseLayer and Normalize, got {names}.")
    sizes = [model.config.hidden_size, *_sizes(modules)]
    for module, size in zip(modules, sizes, strict=False):
        expected = getattr(module, "size", size)
        if expected != size:
            raise ValueError(f"The module '{module}' takes vectors of size {expected}, but its input has size {size}.")


def _sizes(modules: Sequence[Any]) -> list[int]:
    """The size of the vectors after each module."""
    sizes: list[int] = []
    for module in modules:
        sizes.append(sizes[-1] if isinstance(module, Normalize) else module.out_size)
    return sizes


def _limit(model: Encoder | CausalLM, given: int | None) -> int | None:
    """The number of tokens after which texts are truncated."""
    if given is not None and not is_count(given):
        raise ValueError(f"`max_seq_length` must be a number of tokens, at least 1, got {given!r:.80}.")
    own = model.config.max_position_embeddings if isinstance(model, CausalLM) else model.config.max_tokens
    has_table = isinstance(model, Encoder) and model.config.position_rows is not None
    if given is None:
        return own
    return min(given, own) if has_table else given


def _lower_case(tokenizer: Any) -> None:
    """Makes a tokenizer convert text to lower case first, unless one of its normalizers does."""
    from tokenizers import normalizers

    present: Any = tokenizer.normalizer
    parts = [] if present is None else [present]
    if isinstance(present, normalizers.Sequence):
        parts = list(iter(present))  # type: ignore[call-overload] - the library's types lack its iteration
    if not any(isinstance(part, normalizers.Lowercase) for part in parts):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


def _check_texts(texts: Any) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence | np.ndarray):
        raise TypeError(f"`texts` must be a list of strings, got a {type(texts).__name__}. Give `[text]` for one text.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"`texts` must be a list of strings, but texts[{index}] is a {type(text).__name__}.")
        _check_unicode(f"texts[{index}]", text)


def _check_unicode(name: str, text: str) -> None:
    """Raises for half of a surrogate pair, which the tokenizer cannot read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode, at character {error.start}: {text[error.start]!r}. Decode the bytes with "
            'errors="replace".'
        ) from None


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Shows progress on a terminal. Yields a function that takes the number of tokens that are done."""
    if sys.stderr is None or not sys.stderr.isatty() or not is_installed("rich"):
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("embedding", total=total)
        yield lambda tokens: bar.advance(task, tokens)
