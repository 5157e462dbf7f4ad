"""`chunked_cross_entropy`: the loss of a language model without the [tokens, vocabulary] array of logits."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from longspan.array_types import Array, no_type_check, statistics_dtype
from longspan.axes import on_auto_axes
from longspan.checks import FLOATS, check_static_size, is_array, is_int, is_known, number_of
from longspan.engines.partition import may_run_on_several_devices
from longspan.engines.varying import vary, varying_axes

VOCAB_TILE = 8192  # rows of the weights per matrix product
MAX_LOGITS = 2**26  # logits held at a time: 256 MiB


@no_type_check
def chunked_cross_entropy(
    hidden: Float[Array, "*tokens D"],
    weights: Float[Array, "V D"],
    labels: Int[Array, "*tokens"],
    *,
    chunk_size: int = 1024,
    scale: float = 1.0,
    soft_cap: float | None = None,
    ignore_label: int = -100,
) -> Float[jax.Array, ""]:
    """Mean cross-entropy of softmax(hidden · weightsᵀ · scale), float32, with the logits of one chunk in memory.

    loss = mean over tokens of log Σᵥ exp(zᵥ) − z[label], where z = cap(hidden · weightsᵀ · scale) and
    cap(z) = soft_cap · tanh(z / soft_cap). Tokens with `ignore_label` do not count; if all are ignored, the loss is 0.

    A call that is differentiated computes the gradients together with the loss, chunk by chunk, so each logit is
    computed once. Sums are float32 (float64 for float64 inputs). Under `jit`, tokens and vocabulary may be sharded
    over devices: each device computes its own tokens, and its own part of the vocabulary. Inside `shard_map` the mean
    is that of the device's tokens.

    Args:
        hidden: the hidden states, before the output matrix.
        weights: the output matrix, one row per word: tied embeddings, or the transpose of a head's kernel.
        labels: the word that each token predicts. Other values than 0 to V - 1 and `ignore_label` raise an error.
            Traced labels cannot be checked and give NaN instead.
        chunk_size: the largest number of tokens per chunk. Chunks have fewer tokens if their logits would take more
            than 256 MiB.
        scale: the factor of the logits.
        soft_cap: the soft cap of the logits, after the factor; None: no cap.
        ignore_label: the label of tokens that do not count.

    Example:
        >>> hidden, weights = jnp.array([[[1.0, 0.0], [0.0, 1.0]]]), jnp.array([[2.0, 0.0], [0.0, 0.0], [0.0, 4.0]])
        >>> loss = chunked_cross_entropy(hidden, weights, jnp.array([[0, -100]]))
        >>> print(f"{loss:.4f} {np.log(np.exp([2, 0, 0]).sum()) - 2:.4f}")
        0.2395 0.2395
    """
    _check_arrays(hidden, weights, labels)
    chunk_size = check_static_size("chunk_size", chunk_size, 1)
    scale = _number("scale", scale)
    if soft_cap is not None:
        soft_cap = _number("soft_cap", soft_cap)
        if soft_cap <= 0:
            raise ValueError(f"`soft_cap` must be positive or None, got {soft_cap}. Give None for no cap.")
    if isinstance(ignore_label, bool) or not isinstance(ignore_label, int | np.integer):
        raise TypeError(f"`ignore_label` must be a Python int, got {ignore_label!r}.")
    _check_labels(labels, weights.shape[0], int(ignore_label))
    rule = _Rule(chunk_size, scale, soft_cap)
    valid = jnp.asarray(labels) != ignore_label
    # The loops use int32, and -1 for all tokens that do not count. Out-of-range labels stay out of range.
    labels = jnp.where(valid, jnp.clip(jnp.asarray(labels), -2, weights.shape[0]), -1).astype(np.int32)
    labels = jnp.where(valid & (labels < 0), np.int32(weights.shape[0]), labels)
    operands = jnp.asarray(hidden), jnp.asarray(weights), labels
    return on_auto_axes(_mean, lambda *_: P(), (rule,), operands)


class _Rule(NamedTuple):
    """The static arguments of a call."""

    chunk_size: int
    scale: float
    soft_cap: float | None


def _mean(rule: _Rule, hidden: Any, weights: Any, labels: Any) -> jax.Array:
    axes = varying_axes(hidden, weights, labels)
    return _differentiable_mean(rule, *vary((hidden, weights, labels), axes))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_mean(rule: _Rule, hidden: Any, weights: Any, labels: Any) -> jax.Array:
    (total,) = _run(rule, False, hidden, weights, labels)
    return (total[0] / _count(labels, total.dtype)).astype(np.float32)


def _forward(rule: _Rule, hidden: Any, weights: Any, labels: Any):
    total, dhidden, dweights = _run(rule, True, hidden, weights, labels)
    count = _count(labels, total.dtype)
    # Empty arrays that carry the dtypes of the gradients.
    dtypes = jnp.zeros((0,), hidden.dtype), jnp.zeros((0,), weights.dtype)
    return (total[0] / count).astype(np.float32), (dhidden, dweights, count, dtypes)


def _backward(rule: _Rule, residuals: Any, cotangent: jax.Array):
    dhidden, dweights, count, (like_hidden, like_weights) = residuals
    factor = cotangent.astype(count.dtype) / count
    return (dhidden * factor).astype(like_hidden.dtype), (dweights * factor).astype(like_weights.dtype), None


_differentiable_mean.defvjp(_forward, _backward)


def _count(labels: jax.Array, dtype: Any) -> jax.Array:
    return jnp.maximum(jnp.sum(labels >= 0, dtype=np.int32), 1).astype(dtype)


@partial(jax.jit, static_argnums=(0, 1))
def _run(rule: _Rule, gradients: bool, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The sum of the losses [1], and with `gradients` its gradients; split over devices by tokens and vocabulary."""
    direct = partial(_sum_over_chunks, rule, gradients, ())
    if not may_run_on_several_devices():
        return direct(*operands)
    call = custom_vmap(_partitioned(direct, partial(_sum_over_chunks, rule, gradients), gradients))

    @call.def_vmap
    def _(size: int, mapped: Sequence[bool], *operands):
        out = jax.vmap(direct, [0 if each else None for each in mapped], axis_size=size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return call(*operands)


def _sum_over_chunks(rule: _Rule, gradients: bool, vocab_axes: tuple[str, ...], hidden, weights, labels):
    """The sum of the losses of this device's tokens, as [1], and with `gradients` its gradients.

    With `vocab_axes`, mesh axes of an enclosing `shard_map`, each device has its own part of the vocabulary.
    """
    shape = hidden.shape
    wide = max(statistics_dtype(hidden.dtype), statistics_dtype(weights.dtype), key=lambda dtype: dtype.itemsize)
    vocab, features = weights.shape
    tokens = prod(shape[:-1])
    most = max(1, min(rule.chunk_size, MAX_LOGITS // vocab))
    chunks = max(1, -(-tokens // most))
    rows = max(1, -(-tokens // chunks))
    padding = chunks * rows - tokens
    hidden = jnp.pad(hidden.reshape(tokens, features), ((0, padding), (0, 0))).reshape(chunks, rows, features)
    labels = jnp.pad(labels.reshape(tokens), (0, padding), constant_values=-1).reshape(chunks, rows)
    tiles = _Tiles(rule, weights, wide, vocab_axes)
    total = jnp.zeros((1,), wide)
    axes = varying_axes(hidden, weights, labels)
    if not gradients:

        def add(total, chunk):
            hidden, labels = chunk
            return total + tiles.losses(hidden, labels)[0], None

        return (jax.lax.scan(add, vary(total, axes), (hidden, labels))[0],)

    def step(carry, chunk):
        (total, dweights), (hidden, labels) = carry, chunk
        loss, dhidden, dweights = tiles.gradients(hidden, labels, dweights)
        return (total + loss, dweights), dhidden

    carry = vary((total, jnp.zeros((vocab, features), wide)), axes)
    (total, dweights), dhidden = jax.lax.scan(step, carry, (hidden, labels))
    return total, dhidden.reshape(-1, features)[:tokens].reshape(shape), dweights


class _Tiles:
    """The logits of a chunk of tokens, by tiles of the vocabulary; the last tile may overlap the one before it."""

    def __init__(self, rule: _Rule, weights: jax.Array, wide: Any, vocab_axes: tuple[str, ...]):
        self.rule, self.weights, self.wide, self.vocab_axes = rule, weights, wide, vocab_axes
        self.vocab = weights.shape[0]
        self.size = min(VOCAB_TILE, self.vocab)
        self.numbers = jnp.arange(-(-self.vocab // self.size), dtype=np.int32)

    def start(self, number) -> jax.Array:
        return jnp.minimum(number * np.int32(self.size), np.int32(self.vocab - self.size))

    def words(self, number) -> tuple[jax.Array, jax.Array]:
        """The words of a tile, and whether they were not in the tile before it."""
        words = self.start(number) + jnp.arange(self.size, dtype=np.int32)
        return words, words >= number * np.int32(self.size)

    def tile(self, number) -> jax.Array:
        dtype = self.weights.dtype
        if dtype.itemsize > 2:
            return jax.lax.dynamic_slice_in_dim(self.weights, self.start(number), self.size)
        # As ints, because XLA slices 16-bit floats on CPUs by converting all of them to float32 before the loop.
        ints = jax.lax.bitcast_convert_type(self.weights, np.uint16)
        tile = jax.lax.dynamic_slice_in_dim(ints, self.start(number), self.size)
        return jax.lax.bitcast_convert_type(tile, dtype)

    def logits(self, hidden, number) -> jax.Array:
        dtype = self.wide
        if hidden.dtype == self.weights.dtype:
            dtype = hidden.dtype
        tile = self.tile(number)
        z = jnp.einsum("nd,vd->nv", hidden.astype(dtype), tile.astype(dtype), preferred_element_type=self.wide)
        z = z * self.rule.scale
        if self.rule.soft_cap is not None:
            z = jnp.tanh(z / self.rule.soft_cap) * self.rule.soft_cap
        return jnp.where(self.words(number)[1][None], z, -jnp.inf)

    def local(self, labels) -> jax.Array:
        """Labels as indices of this device's part of the vocabulary; outside of it for words of other devices."""
        if not self.vocab_axes:
            return labels
        return labels - jax.lax.axis_index(self.vocab_axes).astype(np.int32) * np.int32(self.vocab)

    def losses(self, hidden, labels, *, keep: bool = False) -> tuple[jax.Array, jax.Array, Any]:
        """The sum of the losses [1], lse [tokens], and with `keep` the logits [tiles, tokens, words per tile]."""
        valid = labels >= 0
        hidden = jnp.where(valid[:, None], hidden, 0)  # NaN in a token that does not count must not spread
        label = self.local(labels)

        def step(carry, number):
            greatest, total, of_label = carry
            z = self.logits(hidden, number)
            now = jnp.maximum(greatest, jnp.max(z, axis=1))
            total = total * jnp.exp(greatest - now) + jnp.sum(jnp.exp(z - now[:, None]), axis=1)
            at = label - self.start(number)
            found = jnp.take_along_axis(z, jnp.clip(at, 0, self.size - 1)[:, None], axis=1)[:, 0]
            new = (label >= number * np.int32(self.size)) & (at < self.size)
            of_label = jnp.where(new, found, of_label)
            return (now, total, of_label), z if keep else None

        lowest = jnp.full(hidden.shape[:1], -jnp.inf, self.wide)
        carry = vary((lowest, jnp.zeros_like(lowest), lowest), varying_axes(hidden, self.weights, labels))
        (greatest, total, of_label), kept = jax.lax.scan(step, carry, self.numbers)
        vocab = self.vocab
        if self.vocab_axes:
            everywhere = jax.lax.pmax(greatest, self.vocab_axes)
            total = jax.lax.psum(total * jnp.exp(greatest - everywhere), self.vocab_axes)
            of_label = jax.lax.pmax(of_label, self.vocab_axes)
            greatest, vocab = everywhere, vocab * jax.lax.axis_size(self.vocab_axes)
        lse = greatest + jnp.log(total)
        lse = jnp.where(valid & (labels >= vocab), jnp.nan, lse)  # a traced label outside of the vocabulary
        return jnp.sum(jnp.where(valid, lse - of_label, 0))[None], lse, kept

    def gradients(self, hidden, labels, dweights) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The sum of the losses [1], its gradient for `hidden`, and `dweights` plus that for the weights."""
        loss, lse, logits = self.losses(hidden, labels, keep=True)
        valid = labels >= 0
        wide_hidden = jnp.where(valid[:, None], hidden, 0).astype(self.wide)
        label = self.local(labels)

        def step(carry, tile):
            dhidden, dweights = carry
            number, z = tile
            words, new = self.words(number)
            dz = jnp.exp(z - lse[:, None]) - (words[None] == label[:, None]).astype(self.wide)
            if self.rule.soft_cap is not None:
                dz = dz * (1 - jnp.square(z / self.rule.soft_cap))
            dz = jnp.where(valid[:, None] & new[None], dz * self.rule.scale, 0)
            dhidden = dhidden + jnp.einsum("nv,vd->nd", dz, self.tile(number).astype(self.wide))
            at = self.start(number)
            added = jax.lax.dynamic_slice_in_dim(dweights, at, self.size) + jnp.einsum("nv,nd->vd", dz, wide_hidden)
            return (dhidden, jax.lax.dynamic_update_slice_in_dim(dweights, added, at, 0)), None

        start = vary(jnp.zeros_like(wide_hidden), varying_axes(hidden, self.weights, labels))
        (dhidden, dweights), _ = jax.lax.scan(step, (start, dweights), (self.numbers, logits))
        if self.vocab_axes:
            dhidden = jax.lax.psum(dhidden, self.vocab_axes)
        return loss, dhidden, dweights


def _partitioned(direct: Any, local: Any, gradients: bool) -> Any:
    """The pass as a call that XLA splits over devices: tokens and vocabulary may be sharded, features are gathered.

    XLA alone would gather every chunk, or sum the gradient of the weights over the devices after each one.
    """
    call = custom_partitioning(direct)
    config: Any = jax.config
    settings = config.jax_enable_x64, config.jax_default_matmul_precision

    def partition(mesh, operands, results):
        placed = _Placed.of(mesh, operands)

        def lower(*operands):
            with jax.enable_x64(settings[0]), jax.default_matmul_precision(settings[1]):
                total, *rest = local(placed.vocab, *operands)
                if not placed.token_names:
                    return (total, *rest)
                total = jax.lax.psum(total, placed.token_names)
                if not gradients:
                    return (total,)
                return total, rest[0], jax.lax.psum(rest[1], placed.token_names)

        return mesh, lower, placed.results(gradients), placed.operands()

    def rule(mesh, operands, results) -> tuple[str, dict[str, Any]]:
        tokens = " ".join(f"t{axis}" for axis in range(len(operands[2].shape)))
        left, right = f"{tokens} d, v d, {tokens}", f"one, {tokens} d, v d"
        if not gradients:
            right = "one"
        return f"{left} -> {right}", dict(need_replication_factors=("d", "one"))

    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, operands, _: _Placed.of(mesh, operands).results(gradients),
        sharding_rule=rule,
    )
    return call


class _Placed(NamedTuple):
    """The mesh axes that split a call: those of each axis of the tokens, and those of the vocabulary."""

    mesh: Any
    tokens: tuple[tuple[str, ...], ...]
    vocab: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Any, operands: Any) -> "_Placed":
        hidden, weights, _ = operands
        taken: set[str] = set()

        def free(x: Any, axis: int) -> tuple[str, ...]:
            entry = (*x.sharding.spec, *[None] * x.ndim)[axis]
            names = () if entry is None else entry
            if isinstance(names, str):
                names = (names,)
            names = tuple(name for name in names if name not in taken)
            if x.shape[axis] % prod(mesh.shape[name] for name in names):
                return ()
            taken.update(names)
            return names

        tokens = tuple(free(hidden, axis) for axis in range(hidden.ndim - 1))
        return cls(mesh, tokens, free(weights, 0))

    @property
    def token_names(self) -> tuple[str, ...]:
        return tuple(name for names in self.tokens for name in names)

    def operands(self) -> tuple[NamedSharding, ...]:
        tokens, vocab = [names or None for names in self.tokens], self.vocab or None
        return tuple(NamedSharding(self.mesh, spec) for spec in (P(*tokens, None), P(vocab, None), P(*tokens)))

    def results(self, gradients: bool) -> tuple[NamedSharding, ...]:
        hidden, weights, _ = self.operands()
        total = NamedSharding(self.mesh, P(None))
        if not gradients:
            return (total,)
        return total, hidden, weights


def _check_arrays(hidden: Any, weights: Any, labels: Any) -> None:
    for name, x, axes in (("hidden", hidden, "[..., D]"), ("weights", weights, "[V, D]"), ("labels", labels, "[...]")):
        if not is_array(x):
            raise TypeError(f"`{name}` must be an array {axes}, got {type(x).__name__}. Convert it with `jnp.asarray`.")
    for name, x in (("hidden", hidden), ("weights", weights)):
        if x.dtype.name not in FLOATS:
            raise TypeError(f"`{name}` must be one of {', '.join(FLOATS)}, got {x.dtype}. Cast it with `.astype(...)`.")
    if not is_int(labels):
        raise TypeError(f"`labels` must be ints, got {labels.dtype}. Cast them with `.astype('int32')`.")
    if hidden.ndim < 1 or weights.ndim != 2 or hidden.shape[-1] != weights.shape[1] or not weights.shape[0]:
        raise ValueError(
            "`hidden` must have shape [..., D] and `weights` [V, D] with V > 0, got "
            f"{tuple(hidden.shape)} and {tuple(weights.shape)}. A Flax kernel [D, V] must be transposed."
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`labels` must have one entry per token, shape {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}."
        )


def _check_labels(labels: Any, vocab: int, ignore_label: int) -> None:
    """Known labels are words or `ignore_label`."""
    if not is_known(labels) or not labels.size:
        return
    values = np.asarray(labels)
    wrong = values[(values != ignore_label) & ((values < 0) | (values >= vocab))]
    if wrong.size:
        raise ValueError(
            f"`labels` must be from 0 to {vocab - 1}, or {ignore_label} for tokens that do not count, got {wrong[0]}. "
            "Give `ignore_label` if another number marks such tokens."
        )


def _number(name: str, value: Any) -> float:
    number = number_of(value)
    if number is None or not np.isfinite(number):
        raise ValueError(f"`{name}` must be a finite number that is not traced, got {value!r}.")
    return float(number)
