"""Self-attention as Flax linen modules: plain (any mask), Longformer's and BigBird's.

Parameters: `query`, `key`, `value` with kernels [D, heads, head_dim], and `out` [num_heads, head_dim, D]; Longformer
also has `query_global`, `key_global` and `value_global`. `SelfAttention` may have `query_norm` and `key_norm` with a
`scale` [head_dim], and `sink` [num_heads]. `longspan.nn.nnx` has the same.

Arguments that all three have, by name:
    num_heads: heads of queries.
    num_kv_heads: heads of keys and values, a divisor of `num_heads`; by default as many.
    head_dim: size of a head; by default `qkv_features` / `num_heads`.
    qkv_features: features of all query heads; by default those of the input.
    out_features: features of the output; by default those of the input.
    dropout_rate: share of attention weights to drop, with Flax's rng stream "dropout".
    deterministic: whether to drop nothing; here or in the call. Needed only if `dropout_rate` > 0.
    use_bias: whether projections add a bias.
    dtype: what is computed in; by default that of inputs and parameters.
    param_dtype: dtype of the parameters.
    kernel_init: how kernels start, given their 2-D shape (features in, features out).
    bias_init: how biases start.
    mesh_axis: the mesh axis that heads are split over (tensor parallelism): parameters then carry partitioning
        metadata. By default none.
    rope: rotary positions: parameters as in `ls.rope.frequencies`, or what it returns, (inv_freq, attention_factor).
        Queries and keys are rotated, both sets of them in Longformer. A call may bring another pair, of arrays that may
        be traced. By default nothing is rotated.
    rope_interleaved: whether neighbouring features are a pair, as in `ls.rope.rotate`.
    engine: as in `attention`.
    mesh: a mesh of devices that share the sequence, as in `ls.parallel.attention`; by default none.
    axis: the mesh axis that shares it.
    order: how tokens lie on it, as `ls.parallel.shard_batch` gives them. Without `positions`, `rope` goes by that.
"""

import math
from collections.abc import Sequence
from typing import Any, overload

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jaxtyping import Array, Float, Int, Num

from longspan.array_types import EngineName, no_type_check
from longspan.cache import Cache
from longspan.engines import Engine
from longspan.layout import BlockLayout
from longspan.maskinfo import MaskInfo
from longspan.masks import Mask
from longspan.nn.attend import attend
from longspan.nn.rope import resolved, rope_places, settled, turned
from longspan.nn.shared import Heads, Split, attention_fn, dot_general, resolve_heads, rms_norm, split_of
from longspan.parallel.sequence_sharding import SequenceSharding
from longspan.patterns import bigbird_attention, bigbird_random_blocks, longformer_attention

__all__ = ["BigBirdSelfAttention", "LongformerSelfAttention", "SelfAttention", "attention_fn"]


class _Attention(nn.Module, kw_only=True):
    """The projections around one call of a Longspan function."""

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qkv_features: int | None = None
    out_features: int | None = None
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = nn.initializers.lecun_normal()
    bias_init: Any = nn.initializers.zeros_init()
    mesh_axis: str | None = None
    rope: Any = None
    rope_interleaved: bool = False
    engine: EngineName | Engine = "auto"
    mesh: Any = None
    axis: str = "sp"
    order: str = "contiguous"

    def __post_init__(self):
        self.rope = settled(self.rope)
        super().__post_init__()

    @nn.nowrap
    def _project(self, x, *names: str) -> list:
        heads = self._heads(x)
        return [self._projection(name, heads, heads.of(name), 1)(x) for name in names]

    @nn.nowrap
    def _join(self, x, out):
        features = x.shape[-1] if self.out_features is None else self.out_features
        return self._projection("out", self._heads(x), (features,), 2)(out)

    @nn.nowrap
    def _rope(self, x, of_call):
        return resolved(self.rope, of_call, self._heads(x).size)

    @nn.nowrap
    def _heads(self, x) -> Heads:
        return resolve_heads(self.num_heads, self.num_kv_heads, self.head_dim, self.qkv_features, x.shape[-1])

    @nn.nowrap
    def _projection(self, name: str, heads: Heads, features: tuple[int, ...], axes: int) -> "_Projection":
        return _Projection(
            features=features,
            axes=axes,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            split=split_of(name, self.mesh_axis, heads),
            name=name,
        )

    @nn.nowrap
    def _shared(self) -> SequenceSharding:
        return SequenceSharding(self.mesh, self.axis, self.order)

    @nn.nowrap
    def _options(self, deterministic: bool | None) -> dict[str, Any]:
        given: dict[str, Any] = dict(engine=self.engine)
        if self.dropout_rate > 0 and not nn.merge_param("deterministic", self.deterministic, deterministic):
            return given | dict(dropout_rate=self.dropout_rate, dropout_key=self.make_rng("dropout"))
        return given


class SelfAttention(_Attention, kw_only=True):
    """Self-attention under any mask, with grouped key/value heads, rotary positions and dropout.

    Example:
        >>> layer, x = SelfAttention(num_heads=4, num_kv_heads=2), jnp.ones((1, 8, 16))
        >>> params = layer.init(jax.random.key(0), x)
        >>> layer.apply(params, x, mask=ls.Causal() & ls.Window(3, 0)).shape
        (1, 8, 16)

    Attributes:
        qk_norm: whether each head of queries and of keys is divided by its root mean square and scaled, before it is
            rotated. Where a checkpoint multiplies by 1 + weight (Gemma), `scale` is that sum.
        qk_norm_eps: what is added to the mean square.
        sinks: whether each head has a learned logit that takes part in its softmax and has no value.
    """

    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    sinks: bool = False

    @overload
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        mask: Mask | MaskInfo | BlockLayout | Num[Array, "..."] | None = ...,
        positions: Int[Array, "*B T"] | None = ...,
        rope_positions: Int[Array, "*B T"] | None = ...,
        rope: tuple[Float[Array, "*B half"], float | Float[Array, ""]] | None = ...,
        cache: None = ...,
        lengths: Int[Array, "B"] | None = ...,
        deterministic: bool | None = ...,
    ) -> Float[Array, "B T D_out"]: ...

    @overload
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        mask: Mask | MaskInfo | BlockLayout | Num[Array, "..."] | None = ...,
        positions: Int[Array, "*B T"] | None = ...,
        rope_positions: Int[Array, "*B T"] | None = ...,
        rope: tuple[Float[Array, "*B half"], float | Float[Array, ""]] | None = ...,
        cache: Cache,
        lengths: Int[Array, "B"] | None = ...,
        deterministic: bool | None = ...,
    ) -> tuple[Float[Array, "B T D_out"], Cache]: ...

    @no_type_check
    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        mask: Mask | MaskInfo | BlockLayout | Num[Array, "..."] | None = None,
        positions: Int[Array, "*B T"] | None = None,
        rope_positions: Int[Array, "*B T"] | None = None,
        rope: tuple[Float[Array, "*B half"], float | Float[Array, ""]] | None = None,
        cache: Cache | None = None,
        lengths: Int[Array, "B"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "B T D_out"] | tuple[Float[Array, "B T D_out"], Cache]:
        """Attends from every token of `x` to those that `mask` (as in `attention`) allows.

        `positions`, int [T] or [B, T], are those of the tokens as queries and as keys, for the mask and for `rope`; by
        default those that a `MaskInfo` or a `BlockLayout` holds, or else each slot's index. `rope_positions`, likewise,
        are for `rope` alone. In packed rows give `rope_positions=positions_from_segments(ids)`, which start from 0 in
        every document: the mask still goes by slots, where it skips most. `rope` replaces the module's.

        With a `cache` (`ls.cache.init`, for this layer's key/value heads and dtype), `x` holds the tokens that come
        after those in it, `lengths` [B] of them where rows have fewer, and the result is (output, new cache). The mask
        is by default the one that the cache was planned for. `rope_positions` are then those of the new tokens; by
        default each row's tokens are counted.
        """
        q, k, v = self._project(x, "query", "key", "value")
        if self.qk_norm:
            q, k = self._norm("query_norm")(q), self._norm("key_norm")(k)
        given = dict(mask=mask, positions=positions, cache=cache, lengths=lengths, shared=self._shared())
        turn = dict(rope=self._rope(x, rope), interleaved=self.rope_interleaved, rope_positions=rope_positions)
        out, cache = attend(q, k, v, **given, **turn, sinks=self._sink(), **self._options(deterministic))
        return self._join(x, out) if cache is None else (self._join(x, out), cache)

    @nn.nowrap
    def _norm(self, name: str) -> "_Norm":
        return _Norm(eps=self.qk_norm_eps, param_dtype=self.param_dtype, name=name)

    @nn.nowrap
    def _sink(self):
        if not self.sinks:
            return None
        init = nn.initializers.zeros_init()
        if self.mesh_axis is not None:
            init = nn.with_partitioning(init, (self.mesh_axis,))
        return self.param("sink", init, (self.num_heads,), self.param_dtype)


class LongformerSelfAttention(_Attention, kw_only=True):
    """Longformer's self-attention: windows, and global tokens with projections of their own.

    Example:
        >>> layer, x = LongformerSelfAttention(num_heads=2, window=3), jnp.ones((1, 8, 16))
        >>> params = layer.init(jax.random.key(0), x)
        >>> layer.apply(params, x, token_kinds=jnp.array([[1, 0, 0, 0, 0, 0, 0, -1]])).shape
        (1, 8, 16)

    Attributes:
        window: keys on each side of a query; half of Hugging Face's `attention_window`.
        dilation: distance between the keys of a window, an int or one per head.
        causal: also ask k <= q of every pair.
    """

    window: int
    dilation: int | Sequence[int] = 1
    causal: bool = False

    @no_type_check
    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        token_kinds: Num[Array, "B_or_1 T"] | None = None,
        positions: Int[Array, "*B T"] | None = None,
        rope_positions: Int[Array, "*B T"] | None = None,
        rope: tuple[Float[Array, "*B half"], float | Float[Array, ""]] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "B T D_out"]:
        """`token_kinds`: -1 padding, 0 local, +1 global; by default all tokens are local.

        `positions`, int [T] or [B, T], or `rope_positions` are for `rope` alone: windows go by slots. `rope`
        replaces the module's.
        """
        chosen = self._rope(x, rope)
        positions = rope_places(chosen, positions, rope_positions)
        shared = self._shared()
        positions = shared.positions(x.shape[1]) if positions is None else positions
        # Without kinds nobody is global; the parameters exist nevertheless.
        used = token_kinds is not None or self.is_initializing()
        sets = [("query", "key", "value"), ("query_global", "key_global", "value_global")][: 1 + used]
        projected = []
        for q, k, v in (self._project(x, *names) for names in sets):
            projected += [*turned(chosen, self.rope_interleaved, positions, q, k), v]
        out = longformer_attention(
            *projected,
            *[None] * (6 - len(projected)),
            window=self.window,
            token_kinds=token_kinds,
            dilation=self.dilation,
            causal=self.causal,
            **shared.options,
            **self._options(deterministic),
        )
        return self._join(x, out)


class BigBirdSelfAttention(_Attention, kw_only=True):
    """BigBird's self-attention: window, global and random blocks, drawn as in the original implementations.

    Example:
        >>> layer = BigBirdSelfAttention(num_heads=2, block_size=2, num_random_blocks=1)
        >>> x = jnp.ones((1, 16, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 16, 8)

    Attributes:
        block_size: tokens in a block; lengths must be multiples of it, of at least 5 blocks.
        num_random_blocks: random blocks that each block sees.
        seed: of the random blocks; in a model, the number of the layer.
        max_seq_len: as in `bigbird_random_blocks`.
        legacy_lengths: as in `bigbird_random_blocks`.
    """

    block_size: int = 64
    num_random_blocks: int = 3
    seed: int = 0
    max_seq_len: int = 4096
    legacy_lengths: tuple[int, ...] = (1024, 3072, 4096)

    @no_type_check
    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        token_mask: Num[Array, "B_or_1 T"] | None = None,
        rand_attn: Int[Array, "N_or_1 rows r"] | None = None,
        positions: Int[Array, "*B T"] | None = None,
        rope_positions: Int[Array, "*B T"] | None = None,
        rope: tuple[Float[Array, "*B half"], float | Float[Array, ""]] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "B T D_out"]:
        """`token_mask`: 0 where a token is padding. `rand_attn`: random blocks, instead of those drawn by `seed`.

        `positions`, int [T] or [B, T], or `rope_positions` are for `rope` alone: blocks go by slots. `rope`
        replaces the module's.
        """
        q, k, v = self._project(x, "query", "key", "value")
        chosen = self._rope(x, rope)
        positions = rope_places(chosen, positions, rope_positions)
        shared = self._shared()
        positions = shared.positions(x.shape[1]) if positions is None else positions
        q, k = turned(chosen, self.rope_interleaved, positions, q, k)
        blocks: Any = rand_attn
        if blocks is None:
            blocks = bigbird_random_blocks(
                x.shape[1],
                block_size=self.block_size,
                num_random_blocks=self.num_random_blocks,
                num_heads=self.num_heads,
                seed=self.seed,
                max_seq_len=self.max_seq_len,
                legacy_lengths=self.legacy_lengths,
            )
        masks: dict[str, Any] = dict(q_mask=token_mask, kv_mask=token_mask, **shared.options)
        out = bigbird_attention(
            q, k, v, block_size=self.block_size, rand_attn=blocks, **masks, **self._options(deterministic)
        )
        return self._join(x, out)


class _Norm(nn.Module, kw_only=True):
    """The root mean square norm of a head."""

    eps: float
    param_dtype: Any

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],), self.param_dtype)
        return rms_norm(x, scale, self.eps)


class _Projection(nn.Module, kw_only=True):
    """A linear map of the last `axes` axes to `features`.

    Not `nn.DenseGeneral`: on a mesh, its partitioned kernels are constrained while they are still 2-D, which fails.
    """

    features: tuple[int, ...]
    axes: int
    use_bias: bool
    dtype: Any
    param_dtype: Any
    kernel_init: Any
    bias_init: Any
    split: Split | None

    @nn.compact
    def __call__(self, x):
        shape = (*x.shape[x.ndim - self.axes :], *self.features)
        kernel_init, bias_init = self._flat_init, self.bias_init
        if self.split is not None:
            kernel_init = nn.with_partitioning(kernel_init, self.split.kernel)
            bias_init = nn.with_partitioning(bias_init, self.split.bias)
        kernel = self.param("kernel", kernel_init, shape, self.param_dtype)
        bias = self.param("bias", bias_init, self.features, self.param_dtype) if self.use_bias else None
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        summed = tuple(range(x.ndim - self.axes, x.ndim)), tuple(range(self.axes))
        y = dot_general(x, kernel, (summed, ((), ())))
        return y if bias is None else y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)

    @nn.nowrap
    def _flat_init(self, key, shape, dtype):
        # As Flax does: initialisers that look at fan-in and fan-out see a matrix.
        flat = (math.prod(shape[: self.axes]), math.prod(shape[self.axes :]))
        return jnp.reshape(self.kernel_init(key, flat, dtype), shape)
