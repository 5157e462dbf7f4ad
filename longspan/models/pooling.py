"""The modules after an embedder's model: `Pooling` gives a vector per text, `DenseLayer` and `Normalize` change it."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from longspan.checks import check_choice
from longspan.models.activations import ACTIVATIONS
from longspan.models.fields import check_counts

# In the order in which older versions of sentence-transformers concatenate several of them.
POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
DENSE_ACTIVATIONS = ("identity", "gelu", "relu", "silu", "tanh")
MIN_COUNT, MIN_NORM = 1e-9, 1e-12  # the smallest divisors, as in sentence-transformers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedTexts:
    """Texts one after another in one row of T tokens, with room for K of them.

    `starts` and `lengths` of absent texts are 0. `text` and `place` are -1 at padding.
    """

    # `Any`, not shapes: JAX rebuilds the object with placeholders, which a type checker would reject.
    ids: Any  # int32 [1, T]
    text: Any  # int32 [1, T]: the number of each token's text in the row
    place: Any  # int32 [1, T]: the index of each token in its text
    starts: Any  # int32 [K]: the slot of each text's first token
    lengths: Any  # int32 [K]: the number of tokens of each text
    skip: Any  # int32 []: the number of first tokens of each text, its prompt, that are not pooled


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pooling:
    """The vector of a text from the vectors of its tokens; several modes are concatenated in the given order.

    | mode | vector |
    |---|---|
    | `cls`, `lasttoken` | the first token's, the last token's |
    | `max` | the maximum of each feature |
    | `mean`, `mean_sqrt_len_tokens` | the sum over n tokens, divided by n, or by √n |
    | `weightedmean` | Σ w·x / Σ w, with the weights 1, 2, 3, … from the first token of the text on |

    Args:
        size: the size of a token's vector.
        modes: one or several of the modes.
        include_prompt: whether the tokens of a prompt are pooled.

    Example:
        >>> from longspan import models
        >>> models.Pooling(size=384, modes=("cls", "mean")).out_size
        768
    """

    size: int = field(metadata=dict(static=True))
    modes: tuple[str, ...] = field(default=("mean",), metadata=dict(static=True))
    include_prompt: bool = field(default=True, metadata=dict(static=True))

    def __post_init__(self):
        check_counts(self, "size")
        if not self.modes or isinstance(self.modes, str):
            raise ValueError(f"`modes` must be a tuple of at least one of {POOLING_MODES}, got {self.modes!r}.")
        for mode in self.modes:
            check_choice("modes", mode, POOLING_MODES)
        object.__setattr__(self, "modes", tuple(self.modes))

    @property
    def out_size(self) -> int:
        return self.size * len(self.modes)

    def __call__(self, x: Float[Array, "T D"], texts: PackedTexts) -> Float[Array, "K D_out"]:
        """The vectors of the texts, in float32 or float64."""
        x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
        return jnp.concatenate([_POOLED[mode](x, texts) for mode in self.modes], axis=-1)

    def __str__(self) -> str:
        without = "" if self.include_prompt else " without the prompt"
        return f"{' and '.join(self.modes)} pooling{without}"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseLayer:
    """activation(x · kernel + bias), plus x or x · residual if there is a residual connection.

    Args:
        kernel: float [size, out_size].
        bias: float [out_size], or None.
        residual: float [size, out_size] of a residual connection, or None.
        activation: "identity", "gelu", "relu", "silu" or "tanh".
        adds_input: whether x itself is added.

    Example:
        >>> from longspan import models
        >>> models.DenseLayer(kernel=jnp.ones((6, 4)), activation="tanh").out_size
        4
    """

    kernel: Any
    bias: Any = None
    residual: Any = None
    activation: str = field(default="identity", metadata=dict(static=True))
    adds_input: bool = field(default=False, metadata=dict(static=True))

    def __post_init__(self):
        check_choice("activation", self.activation, DENSE_ACTIVATIONS)

    @property
    def size(self) -> int:
        return self.kernel.shape[0]

    @property
    def out_size(self) -> int:
        return self.kernel.shape[1]

    def __call__(self, x: Float[Array, "K D"], texts: PackedTexts) -> Float[Array, "K D_out"]:
        y = x @ jnp.asarray(self.kernel, x.dtype)
        if self.bias is not None:
            y = y + jnp.asarray(self.bias, x.dtype)[None]
        if self.activation != "identity":
            y = ACTIVATIONS[self.activation](y)
        if self.residual is not None:
            return y + x @ jnp.asarray(self.residual, x.dtype)
        if self.adds_input:
            return y + x
        return y

    def __str__(self) -> str:
        parts = [f"Dense {self.size} to {self.out_size}"]
        if self.activation != "identity":
            parts.append(self.activation)
        if self.adds_input or self.residual is not None:
            parts.append("residual")
        return ", ".join(parts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Normalize:
    """x / max(‖x‖₂, 1e-12).

    Example:
        >>> from longspan import models
        >>> print(models.Normalize())
        Normalize
    """

    def __call__(self, x: Float[Array, "K D"], texts: PackedTexts) -> Float[Array, "K D"]:
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), MIN_NORM)

    def __str__(self) -> str:
        return "Normalize"


def _weighted_sums(x: Float[Array, "T D"], weights: Float[Array, "T"], texts: PackedTexts) -> Float[Array, "K D"]:
    return jax.ops.segment_sum(x * weights[:, None], _rows(texts), texts.starts.shape[0] + 1)[:-1]


def _rows(texts: PackedTexts) -> Int[Array, "T"]:
    """The output row of each token; tokens that are not pooled have the row after the last."""
    pooled = (texts.text[0] >= 0) & (texts.place[0] >= texts.skip)
    return jnp.where(pooled, texts.text[0], jnp.int32(texts.starts.shape[0]))


def _counts(texts: PackedTexts, dtype: Any) -> Float[Array, "K 1"]:
    """The number of pooled tokens of each text."""
    return jnp.maximum(texts.lengths - texts.skip, 0).astype(dtype)[:, None]


def _sums(x: Float[Array, "T D"], texts: PackedTexts) -> Float[Array, "K D"]:
    return _weighted_sums(x, jnp.ones(x.shape[0], x.dtype), texts)


def _mean(x: Float[Array, "T D"], texts: PackedTexts) -> Float[Array, "K D"]:
    return _sums(x, texts) / jnp.maximum(_counts(texts, x.dtype), MIN_COUNT)


def _mean_sqrt(x: Float[Array, "T D"], texts: PackedTexts) -> Float[Array, "K D"]:
    return _sums(x, texts) / jnp.sqrt(jnp.maximum(_counts(texts, x.dtype), MIN_COUNT))


def _weighted_mean(x: Float[Array, "T D"], texts: PackedTexts) -> Float[Array, "K D"]:
    weights = (texts.place[0] + 1).astype(x.dtype)
    total = jax.ops.segment_sum(weights, _rows(texts), texts.starts.shape[0] + 1)[:-1]
    return _weighted_sums(x, weights, texts) / jnp.maximum(total, MIN_COUNT)[:, None]


def _max(x: Float[Array, "T D"], texts: PackedTexts) -> Float[Array, "K D"]:
    return jax.ops.segment_max(x, _rows(texts), texts.starts.shape[0] + 1)[:-1]


def _first(x: Float[Array, "T D"], texts: PackedTexts) -> Float[Array, "K D"]:
    return jnp.take(x, texts.starts + texts.skip, axis=0, mode="clip")


def _last(x: Float[Array, "T D"], texts: PackedTexts) -> Float[Array, "K D"]:
    return jnp.take(x, texts.starts + texts.lengths - 1, axis=0, mode="clip")


_POOLED = dict(
    cls=_first, max=_max, mean=_mean, mean_sqrt_len_tokens=_mean_sqrt, weightedmean=_weighted_mean, lasttoken=_last
)
