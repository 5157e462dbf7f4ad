"""Self-attention as Flax linen modules: `SelfAttention` (any mask), Longformer's and BigBird's.

Parameters: `query`, `key`, `value` with kernels [D, heads, head_dim], and `out` [num_heads, head_dim, D]; Longformer
also has `query_global`, `key_global` and `value_global`. `SelfAttention` may have `query_norm` and `key_norm` with a
`scale` [head_dim], and `sink` [num_heads]. `longspan.nn.nnx` has the same parameters.

Arguments of all three constructors, by name:
    num_heads: number of query heads.
    num_kv_heads: number of key/value heads, a divisor of `num_heads`; by default `num_heads`.
    head_dim: size of a head; by default `qkv_features` / `num_heads`.
    qkv_features: features of all query heads together; by default those of the input.
    out_features: features of the output; by default those of the input.
    dropout_rate: probability of dropping an attention weight, with Flax's rng stream "dropout".
    deterministic: whether to disable dropout; given here or in the call. Required only if `dropout_rate` > 0.
    use_bias: whether projections add a bias.
    dtype: dtype of the computation; by default that of inputs and parameters.
    param_dtype: dtype of the parameters.
    kernel_init: initializer of kernels, called with their 2-D shape (input features, output features).
    bias_init: initializer of biases.
    rope: rotary positions: parameters as in `ls.rope.frequencies`, or the pair (inv_freq, attention_factor) that it
        returns. Queries and keys are rotated (in Longformer, both sets of them). A call may give another pair, of
        arrays that may be traced. By default nothing is rotated.
    rope_interleaved: whether neighbouring features form a pair, as in `ls.rope.rotate`.
    engine: as in `attention`.
    mesh: a mesh of devices, one of whose axes splits the sequence, as in `ls.parallel.attention`; by default none.
    axis: the mesh axis that splits the sequence.
    order: the order of tokens across devices, as `ls.parallel.shard_batch` returns them. Without `positions`, `rope`
        rotates each token by its index in the original order.
    batch_axes: the mesh axes that split batch rows, as in `ls.attention` and `ls.parallel.attention`.
    head_axis: the mesh axis that splits heads, likewise.
    partition_params: whether parameters carry Flax's partitioning metadata, which splits their heads over `head_axis`
        (tensor parallelism). This needs no `mesh`.
"""

import math
from collections.abc import Sequence
from typing import Any, overload

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jaxtyping import Array, Float, Int, Num

from longspan.array_types import EngineName, no_type_check
from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.cache import Cache
from longspan.engines import Engine
from longspan.layout import BlockLayout
from longspan.maskinfo import MaskInfo
from longspan.masks import Mask
from longspan.nn.attend import attend
from longspan.nn.flax_attention import attention_fn
from longspan.nn.projections import (
    Heads,
    Partitioning,
    check_partitioning,
    dot_general,
    partitioning_of,
    resolve_heads,
    rms_norm,
)
from longspan.nn.rope import apply_rope, hashable_rope, resolve_rope, select_rope_positions
from longspan.parallel.sequence_sharding import SequenceSharding
from longspan.patterns import bigbird_attention, bigbird_random_blocks, longformer_attention

__all__ = ["BigBirdSelfAttention", "LongformerSelfAttention", "SelfAttention", "attention_fn"]


class _Attention(nn.Module, kw_only=True):
    """The constructor's arguments and the projections that all three modules share."""

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
    rope: Any = None
    rope_interleaved: bool = False
    engine: EngineName | Engine = "auto"
    mesh: Any = None
    axis: str = "sp"
    order: str = "contiguous"
    batch_axes: str | Sequence[str] = BATCH_AXES
    head_axis: str | None = HEAD_AXIS
    partition_params: bool = False

    def __post_init__(self):
        self.rope = hashable_rope(self.rope)
        super().__post_init__()

    @nn.nowrap
    def _project(self, x, *names: str) -> list:
        heads = self._heads(x)
        return [self._projection(name, heads, heads.of(name), 1)(x) for name in names]

    @nn.nowrap
    def _join(self, x, out):
        features = self.out_features
        if features is None:
            features = x.shape[-1]
        return self._projection("out", self._heads(x), (features,), 2)(out)

    @nn.nowrap
    def _rope(self, x, of_call):
        return resolve_rope(self.rope, of_call, self._heads(x).size)

    @nn.nowrap
    def _heads(self, x) -> Heads:
        return resolve_heads(self.num_heads, self.num_kv_heads, self.head_dim, self.qkv_features, x.shape[-1])

    @nn.nowrap
    def _projection(self, name: str, heads: Heads, features: tuple[int, ...], axes: int) -> "_Projection":
        split_axis, partitioning = check_partitioning(self.partition_params, self.head_axis), None
        if split_axis is not None:
            partitioning = partitioning_of(name, split_axis, heads)
        return _Projection(
            features=features,
            axes=axes,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            partitioning=partitioning,
            name=name,
        )

    @nn.nowrap
    def _sharding(self) -> SequenceSharding:
        return SequenceSharding(self.mesh, self.axis, self.order, self.batch_axes, self.head_axis)

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
            rotated. For checkpoints that multiply by 1 + weight (Gemma), `scale` is that sum.
        qk_norm_eps: the number added to the mean square.
        sinks: whether each head has a learned sink logit, which takes part in its softmax and has no value.
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
        """Self-attention of `x` [B, T, D] under `mask` (as in `attention`).

        `positions`, int [T] or [B, T], are the tokens' positions for the mask and for `rope`, as queries and as keys.
        They default to those of a `MaskInfo` or a `BlockLayout`, and otherwise to the slots. `rope_positions` replace
        them for `rope` only. For packed rows give `rope_positions=positions_from_segments(ids)`, which start at 0 in
        every document, and no `positions`: a mask that compares slots skips the most tiles. `rope` replaces the
        module's.

        With a `cache` (from `ls.cache.init`, for this layer's key/value heads and dtype), `x` holds the tokens that
        follow the cached ones, and the call returns (output, new cache). `lengths`, int [B], are the numbers of new
        tokens, if some rows have fewer than T. `mask` defaults to the cache plan's mask. `rope_positions` are those of
        the new tokens; by default each row's tokens are counted.
        """
        q, k, v = self._project(x, "query", "key", "value")
        if self.qk_norm:
            q, k = self._norm("query_norm")(q), self._norm("key_norm")(k)
        given = dict(mask=mask, positions=positions, cache=cache, lengths=lengths, sharding=self._sharding())
        rotation = dict(rope=self._rope(x, rope), interleaved=self.rope_interleaved, rope_positions=rope_positions)
        out, cache = attend(q, k, v, **given, **rotation, sinks=self._sink(), **self._options(deterministic))
        out = self._join(x, out)
        if cache is None:
            return out
        return out, cache

    @nn.nowrap
    def _norm(self, name: str) -> "_Norm":
        return _Norm(eps=self.qk_norm_eps, param_dtype=self.param_dtype, name=name)

    @nn.nowrap
    def _sink(self):
        if not self.sinks:
            return None
        init = nn.initializers.zeros_init()
        split_axis = check_partitioning(self.partition_params, self.head_axis)
        if split_axis is not None:
            init = nn.with_partitioning(init, (split_axis,))
        return self.param("sink", init, (self.num_heads,), self.param_dtype)


class LongformerSelfAttention(_Attention, kw_only=True):
    """Longformer's self-attention: windows, and global tokens with separate projections.

    Example:
        >>> layer, x = LongformerSelfAttention(num_heads=2, window=3), jnp.ones((1, 8, 16))
        >>> params = layer.init(jax.random.key(0), x)
        >>> layer.apply(params, x, token_kinds=jnp.array([[1, 0, 0, 0, 0, 0, 0, -1]])).shape
        (1, 8, 16)

    Attributes:
        window: keys on each side of a query; half of Hugging Face's `attention_window`.
        dilation: distance between the keys of a window, an int or one per head.
        causal: whether to also require k <= q of every pair, global or not.
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
        """Longformer's self-attention of `x` [B, T, D].

        `token_kinds`, [B or 1, T], are -1 for padding, 0 for local and +1 for global tokens; by default all tokens are
        local. `positions` or `rope_positions`, int [T] or [B, T], are used by `rope` only: windows compare slots.
        `rope` replaces the module's.
        """
        chosen = self._rope(x, rope)
        positions = select_rope_positions(chosen, positions, rope_positions)
        sharding = self._sharding()
        if positions is None:
            positions = sharding.positions(x.shape[1])

        def project(*names: str) -> tuple:
            q, k, v = self._project(x, *names)
            return *apply_rope(chosen, self.rope_interleaved, positions, q, k), v

        local_qkv, global_qkv = project("query", "key", "value"), (None, None, None)
        # Without kinds no token is global and these are not computed, but their parameters exist.
        if token_kinds is not None or self.is_initializing():
            global_qkv = project("query_global", "key_global", "value_global")
        out = longformer_attention(
            *local_qkv,
            *global_qkv,
            window=self.window,
            token_kinds=token_kinds,
            dilation=self.dilation,
            causal=self.causal,
            **sharding.options,
            **self._options(deterministic),
        )
        return self._join(x, out)


class BigBirdSelfAttention(_Attention, kw_only=True):
    """BigBird's self-attention: window, global and random blocks.

    The random blocks are drawn as in the original implementations.

    Example:
        >>> layer = BigBirdSelfAttention(num_heads=2, block_size=2, num_random_blocks=1)
        >>> x = jnp.ones((1, 16, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 16, 8)

    Attributes:
        block_size: tokens in a block; lengths must be multiples of it, of at least 5 blocks.
        num_random_blocks: random blocks that each query block attends to.
        seed: seed of the random blocks; in a model, the layer's number.
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
        """BigBird's self-attention of `x` [B, T, D].

        `token_mask`, [B or 1, T], is 0 for padding. `rand_attn` replaces the random blocks that `seed` draws.
        `positions` or `rope_positions`, int [T] or [B, T], are used by `rope` only: blocks compare slots. `rope`
        replaces the module's.
        """
        q, k, v = self._project(x, "query", "key", "value")
        chosen = self._rope(x, rope)
        positions = select_rope_positions(chosen, positions, rope_positions)
        sharding = self._sharding()
        if positions is None:
            positions = sharding.positions(x.shape[1])
        q, k = apply_rope(chosen, self.rope_interleaved, positions, q, k)
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
        masks: dict[str, Any] = dict(q_mask=token_mask, kv_mask=token_mask, **sharding.options)
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

    Not `nn.DenseGeneral`: on a mesh, it applies the sharding constraint of a partitioned kernel while the kernel is
    still 2-D, which fails.
    """

    features: tuple[int, ...]
    axes: int
    use_bias: bool
    dtype: Any
    param_dtype: Any
    kernel_init: Any
    bias_init: Any
    partitioning: Partitioning | None

    @nn.compact
    def __call__(self, x):
        shape = (*x.shape[x.ndim - self.axes :], *self.features)
        kernel_init, bias_init = self._flat_init, self.bias_init
        if self.partitioning is not None:
            kernel_init = nn.with_partitioning(kernel_init, self.partitioning.kernel)
            bias_init = nn.with_partitioning(bias_init, self.partitioning.bias)
        kernel, bias = self.param("kernel", kernel_init, shape, self.param_dtype), None
        if self.use_bias:
            bias = self.param("bias", bias_init, self.features, self.param_dtype)
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        summed = tuple(range(x.ndim - self.axes, x.ndim)), tuple(range(self.axes))
        y = dot_general(x, kernel, (summed, ((), ())))
        if bias is None:
            return y
        return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)

    @nn.nowrap
    def _flat_init(self, key, shape, dtype):
        # As in Flax, initializers get a matrix, whose shape gives fan-in and fan-out.
        flat = (math.prod(shape[: self.axes]), math.prod(shape[self.axes :]))
        return jnp.reshape(self.kernel_init(key, flat, dtype), shape)
