"""Self-attention as Flax NNX modules: `SelfAttention` (any mask), Longformer's and BigBird's.

Names, arguments and parameters are those of `longspan.nn.linen`, which documents them. As in all of NNX, the
constructor also takes `in_features` and `rngs`, and a call may give other `rngs` for dropout.
"""

from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.module import first_from
from jaxtyping import Array, Float, Int, Num

from longspan.array_types import EngineName, no_type_check
from longspan.axes import BATCH_AXES, HEAD_AXIS, axis_names
from longspan.cache import Cache
from longspan.engines import Engine
from longspan.layout import BlockLayout
from longspan.maskinfo import MaskInfo
from longspan.masks import Mask
from longspan.nn.attend import attend
from longspan.nn.flax_attention import attention_fn
from longspan.nn.projections import check_partitioning, dot_general, partitioning_of, resolve_heads, rms_norm
from longspan.nn.rope import apply_rope, hashable_rope, resolve_rope, select_rope_positions
from longspan.parallel.sequence_sharding import SequenceSharding
from longspan.patterns import bigbird_attention, bigbird_random_blocks, longformer_attention

__all__ = ["BigBirdSelfAttention", "LongformerSelfAttention", "SelfAttention", "attention_fn"]

KERNEL_INIT, BIAS_INIT = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


class _Attention(nnx.Module):
    """The constructor's arguments and the projections that all three modules share."""

    projections: tuple[str, ...] = ("query", "key", "value")

    @no_type_check
    def __init__(
        self,
        *,
        num_heads: int,
        in_features: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qkv_features: int | None = None,
        out_features: int | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = KERNEL_INIT,
        bias_init: Any = BIAS_INIT,
        rope: Any = None,
        rope_interleaved: bool = False,
        engine: EngineName | Engine = "auto",
        mesh: Any = None,
        axis: str = "sp",
        order: str = "contiguous",
        batch_axes: str | Sequence[str] = BATCH_AXES,
        head_axis: str | None = HEAD_AXIS,
        partition_params: bool = False,
        rngs: nnx.Rngs,
    ):
        self.mesh, self.axis, self.order = mesh, axis, order
        self.batch_axes, self.head_axis = axis_names("batch_axes", batch_axes), head_axis
        heads = resolve_heads(num_heads, num_kv_heads, head_dim, qkv_features, in_features)
        self.rope, self.rope_interleaved = hashable_rope(resolve_rope(rope, None, heads.size)), rope_interleaved
        self.num_heads, self.dropout_rate = num_heads, dropout_rate
        self.deterministic, self.engine = deterministic, engine
        split_axis = check_partitioning(partition_params, head_axis)

        def projection(name: str, inputs, features, **axis) -> nnx.LinearGeneral:
            metadata: dict[str, Any] = {}
            if split_axis is not None:
                partitioning = partitioning_of(name, split_axis, heads)
                metadata = dict(
                    kernel_metadata=_metadata(partitioning.kernel), bias_metadata=_metadata(partitioning.bias)
                )
            return nnx.LinearGeneral(
                inputs,
                features,
                **axis,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                bias_init=bias_init,
                dot_general=dot_general,
                **metadata,
                rngs=rngs,
            )

        for name in self.projections:
            setattr(self, name, projection(name, in_features, heads.of(name)))
        if out_features is None:
            out_features = in_features
        self.out = projection("out", (heads.num, heads.size), out_features, axis=(-2, -1))
        self.rngs = rngs.dropout.fork() if dropout_rate > 0 else None

    def _rope(self, of_call):
        return resolve_rope(self.rope, of_call, self.out.kernel.shape[1])

    def _project(self, x, *names: str) -> list:
        return [getattr(self, name)(x) for name in names]

    def _sharding(self) -> SequenceSharding:
        return SequenceSharding(self.mesh, self.axis, self.order, self.batch_axes, self.head_axis)

    def _options(self, deterministic: bool | None, rngs) -> dict[str, Any]:
        given: dict[str, Any] = dict(engine=self.engine)
        if self.dropout_rate == 0:
            return given
        name = type(self).__name__
        wanted = f"No `deterministic` argument was provided to {name} as either a __call__ argument or class attribute."
        if first_from(deterministic, self.deterministic, error_msg=wanted):
            return given
        wanted = f"No `rngs` argument was provided to {name} as either a __call__ argument or class attribute."
        rngs = first_from(rngs, self.rngs, error_msg=wanted)
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        return given | dict(dropout_rate=self.dropout_rate, dropout_key=stream())


class SelfAttention(_Attention):
    """Self-attention under any mask, with grouped key/value heads, rotary positions and dropout.

    Example:
        >>> layer = SelfAttention(num_heads=4, num_kv_heads=2, in_features=16, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 8, 16)), mask=ls.Causal() & ls.Window(3, 0)).shape
        (1, 8, 16)
    """

    @no_type_check
    def __init__(
        self,
        *,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        sinks: bool = False,
        head_axis: str | None = HEAD_AXIS,
        partition_params: bool = False,
        param_dtype: Any = jnp.float32,
        **common: Any,
    ):
        super().__init__(head_axis=head_axis, partition_params=partition_params, param_dtype=param_dtype, **common)
        heads, size, _ = self.out.kernel.shape

        def norm() -> RMSNorm | None:
            return RMSNorm(size, qk_norm_eps, param_dtype=param_dtype) if qk_norm else None

        self.query_norm, self.key_norm = norm(), norm()
        split_axis = check_partitioning(partition_params, head_axis)
        metadata = {} if split_axis is None else _metadata((split_axis,))
        self.sink = nnx.Param(jnp.zeros(heads, param_dtype), **metadata) if sinks else None

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
        rngs: nnx.Rngs | nnx.RngStream | None = ...,
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
        rngs: nnx.Rngs | nnx.RngStream | None = ...,
    ) -> tuple[Float[Array, "B T D_out"], Cache]: ...

    @no_type_check
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
        rngs: nnx.Rngs | nnx.RngStream | None = None,
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
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        given = dict(mask=mask, positions=positions, cache=cache, lengths=lengths, sharding=self._sharding())
        rotation = dict(rope=self._rope(rope), interleaved=self.rope_interleaved, rope_positions=rope_positions)
        sinks = None if self.sink is None else self.sink[...]
        out, cache = attend(q, k, v, **given, **rotation, sinks=sinks, **self._options(deterministic, rngs))
        out = self.out(out)
        if cache is None:
            return out
        return out, cache


class LongformerSelfAttention(_Attention):
    """Longformer's self-attention: windows, and global tokens with separate projections.

    Example:
        >>> layer = LongformerSelfAttention(num_heads=2, window=3, in_features=16, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 8, 16)), token_kinds=jnp.array([[1, 0, 0, 0, 0, 0, 0, -1]])).shape
        (1, 8, 16)
    """

    projections = ("query", "key", "value", "query_global", "key_global", "value_global")

    @no_type_check
    def __init__(self, *, window: int, dilation: int | Sequence[int] = 1, causal: bool = False, **common: Any):
        super().__init__(**common)
        self.window, self.causal = window, causal
        self.dilation = dilation if isinstance(dilation, int) else tuple(dilation)

    @no_type_check
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        token_kinds: Num[Array, "B_or_1 T"] | None = None,
        positions: Int[Array, "*B T"] | None = None,
        rope_positions: Int[Array, "*B T"] | None = None,
        rope: tuple[Float[Array, "*B half"], float | Float[Array, ""]] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Float[Array, "B T D_out"]:
        """Longformer's self-attention of `x` [B, T, D].

        `token_kinds`, [B or 1, T], are -1 for padding, 0 for local and +1 for global tokens; by default all tokens are
        local. `positions` or `rope_positions`, int [T] or [B, T], are used by `rope` only: windows compare slots.
        `rope` replaces the module's.
        """
        chosen = self._rope(rope)
        positions = select_rope_positions(chosen, positions, rope_positions)
        sharding = self._sharding()
        if positions is None:
            positions = sharding.positions(x.shape[1])

        def project(*names: str) -> tuple:
            q, k, v = self._project(x, *names)
            return *apply_rope(chosen, self.rope_interleaved, positions, q, k), v

        local_qkv, global_qkv = project("query", "key", "value"), (None, None, None)
        if token_kinds is not None:  # without kinds no token is global
            global_qkv = project("query_global", "key_global", "value_global")
        out = longformer_attention(
            *local_qkv,
            *global_qkv,
            window=self.window,
            token_kinds=token_kinds,
            dilation=self.dilation,
            causal=self.causal,
            **sharding.options,
            **self._options(deterministic, rngs),
        )
        return self.out(out)


class BigBirdSelfAttention(_Attention):
    """BigBird's self-attention: window, global and random blocks.

    The random blocks are drawn as in the original implementations.

    Example:
        >>> blocks = dict(block_size=2, num_random_blocks=1)
        >>> layer = BigBirdSelfAttention(num_heads=2, **blocks, in_features=8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 16, 8))).shape
        (1, 16, 8)
    """

    @no_type_check
    def __init__(
        self,
        *,
        block_size: int = 64,
        num_random_blocks: int = 3,
        seed: int = 0,
        max_seq_len: int = 4096,
        legacy_lengths: Sequence[int] = (1024, 3072, 4096),
        **common: Any,
    ):
        super().__init__(**common)
        self.block_size, self.num_random_blocks, self.seed = block_size, num_random_blocks, seed
        self.max_seq_len, self.legacy_lengths = max_seq_len, tuple(legacy_lengths)

    @no_type_check
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
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Float[Array, "B T D_out"]:
        """BigBird's self-attention of `x` [B, T, D].

        `token_mask`, [B or 1, T], is 0 for padding. `rand_attn` replaces the random blocks that `seed` draws.
        `positions` or `rope_positions`, int [T] or [B, T], are used by `rope` only: blocks compare slots. `rope`
        replaces the module's.
        """
        q, k, v = self._project(x, "query", "key", "value")
        chosen = self._rope(rope)
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
            q, k, v, block_size=self.block_size, rand_attn=blocks, **masks, **self._options(deterministic, rngs)
        )
        return self.out(out)


class RMSNorm(nnx.Module):
    """The root mean square norm (`rms_norm`) of a head here, and of a token's features in `longspan.models`."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        adds_one: bool = False,
        rounds_first: bool = False,
    ):
        self.eps, self.dtype, self.adds_one, self.rounds_first = eps, dtype, adds_one, rounds_first
        start = 0 if adds_one else 1
        self.scale = nnx.Param(jnp.full(size, start, param_dtype))

    def __call__(self, x: Float[Array, "... D"], at: Any = None) -> Float[Array, "... D"]:
        """The norm of `x`. If the parameters of several layers are stacked, `at` is the layer."""
        scale = self.scale[...] if at is None else self.scale[at]
        how = dict(dtype=self.dtype, adds_one=self.adds_one, rounds_first=self.rounds_first)
        return rms_norm(x, scale, self.eps, **how)


def _metadata(axes: tuple[str | None, ...]) -> dict[str, Any]:
    """Flax's metadata of a parameter that mesh axes split."""
    metadata: dict[str, Any] = dict(out_sharding=axes)
    if jax.sharding.get_abstract_mesh().empty:
        # Flax would shard the parameter at once, which fails without a mesh.
        metadata["eager_sharding"] = False
    return metadata
