"""Self-attention as Flax NNX modules: plain (any mask), Longformer's and BigBird's.

Names, arguments and parameters are those of `longspan.nn.linen`, where they are explained. As everywhere in NNX, the
constructor also takes `in_features` and `rngs`, and a call may bring `rngs` of its own for dropout.
"""

from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.module import first_from
from jaxtyping import Array, Float, Int, Num

from longspan.array_types import EngineName, no_type_check
from longspan.cache import Cache
from longspan.engines import Engine
from longspan.layout import BlockLayout
from longspan.maskinfo import MaskInfo
from longspan.masks import Mask
from longspan.nn.attend import attend
from longspan.nn.rope import resolved, rope_places, settled, turned
from longspan.nn.shared import attention_fn, dot_general, resolve_heads, rms_norm, split_of
from longspan.parallel.sequence_sharding import SequenceSharding
from longspan.patterns import bigbird_attention, bigbird_random_blocks, longformer_attention

__all__ = ["BigBirdSelfAttention", "LongformerSelfAttention", "SelfAttention", "attention_fn"]

KERNEL_INIT, BIAS_INIT = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


class _Attention(nnx.Module):
    """The projections around one call of a Longspan function."""

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
        mesh_axis: str | None = None,
        rope: Any = None,
        rope_interleaved: bool = False,
        engine: EngineName | Engine = "auto",
        mesh: Any = None,
        axis: str = "sp",
        order: str = "contiguous",
        rngs: nnx.Rngs,
    ):
        self.mesh, self.axis, self.order = mesh, axis, order
        heads = resolve_heads(num_heads, num_kv_heads, head_dim, qkv_features, in_features)
        self.rope, self.rope_interleaved = settled(resolved(rope, None, heads.size)), rope_interleaved
        self.num_heads, self.dropout_rate, self.deterministic, self.engine = (
            num_heads,
            dropout_rate,
            deterministic,
            engine,
        )

        def projection(name: str, inputs, features, **axis) -> nnx.LinearGeneral:
            split = split_of(name, mesh_axis, heads)
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
                kernel_metadata={} if split is None else _metadata(split.kernel),
                bias_metadata={} if split is None else _metadata(split.bias),
                rngs=rngs,
            )

        for name in self.projections:
            setattr(self, name, projection(name, in_features, heads.of(name)))
        features = in_features if out_features is None else out_features
        self.out = projection("out", (heads.num, heads.size), features, axis=(-2, -1))
        self.rngs = rngs.dropout.fork() if dropout_rate > 0 else None

    def _rope(self, of_call):
        return resolved(self.rope, of_call, self.out.kernel.shape[1])

    def _project(self, x, *names: str) -> list:
        return [getattr(self, name)(x) for name in names]

    def _shared(self) -> SequenceSharding:
        return SequenceSharding(self.mesh, self.axis, self.order)

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
        key = rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs()
        return given | dict(dropout_rate=self.dropout_rate, dropout_key=key)


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
        mesh_axis: str | None = None,
        param_dtype: Any = jnp.float32,
        **common: Any,
    ):
        super().__init__(mesh_axis=mesh_axis, param_dtype=param_dtype, **common)
        heads, size, _ = self.out.kernel.shape
        self.query_norm = RMSNorm(size, qk_norm_eps, param_dtype=param_dtype) if qk_norm else None
        self.key_norm = RMSNorm(size, qk_norm_eps, param_dtype=param_dtype) if qk_norm else None
        split = {} if mesh_axis is None else _metadata((mesh_axis,))
        self.sink = nnx.Param(jnp.zeros(heads, param_dtype), **split) if sinks else None

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
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        given = dict(mask=mask, positions=positions, cache=cache, lengths=lengths, shared=self._shared())
        turn = dict(rope=self._rope(rope), interleaved=self.rope_interleaved, rope_positions=rope_positions)
        sinks = None if self.sink is None else self.sink[...]
        out, cache = attend(q, k, v, **given, **turn, sinks=sinks, **self._options(deterministic, rngs))
        return self.out(out) if cache is None else (self.out(out), cache)


class LongformerSelfAttention(_Attention):
    """Longformer's self-attention: windows, and global tokens with projections of their own.

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
        """`token_kinds`: -1 padding, 0 local, +1 global; by default all tokens are local.

        `positions`, int [T] or [B, T], or `rope_positions` are for `rope` alone: windows go by slots. `rope`
        replaces the module's.
        """
        chosen = self._rope(rope)
        positions = rope_places(chosen, positions, rope_positions)
        shared = self._shared()
        positions = shared.positions(x.shape[1]) if positions is None else positions
        # Without kinds nobody is global.
        sets = [self.projections[:3], self.projections[3:]][: 1 + (token_kinds is not None)]
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
            **self._options(deterministic, rngs),
        )
        return self.out(out)


class BigBirdSelfAttention(_Attention):
    """BigBird's self-attention: window, global and random blocks, drawn as in the original implementations.

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
        """`token_mask`: 0 where a token is padding. `rand_attn`: random blocks, instead of those drawn by `seed`.

        `positions`, int [T] or [B, T], or `rope_positions` are for `rope` alone: blocks go by slots. `rope`
        replaces the module's.
        """
        q, k, v = self._project(x, "query", "key", "value")
        chosen = self._rope(rope)
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
            q, k, v, block_size=self.block_size, rand_attn=blocks, **masks, **self._options(deterministic, rngs)
        )
        return self.out(out)


class RMSNorm(nnx.Module):
    """The root mean square norm, of heads here and of whole tokens in `longspan.models`; see `rms_norm`."""

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
        self.scale = nnx.Param((jnp.zeros if adds_one else jnp.ones)(size, param_dtype))

    def __call__(self, x: Float[Array, "... D"], at: Any = None) -> Float[Array, "... D"]:
        """The norm; if it is a stack of them, that of layer `at`."""
        scale = self.scale[... if at is None else at]
        how = dict(dtype=self.dtype, adds_one=self.adds_one, rounds_first=self.rounds_first)
        return rms_norm(x, scale, self.eps, **how)


def _metadata(axes: tuple[str | None, ...]) -> dict[str, Any]:
    # Flax splits such a parameter at once, and refuses to make it where there is no mesh: there it is only noted.
    no_mesh = dict(eager_sharding=False) if jax.sharding.get_abstract_mesh().empty else {}
    return dict(out_sharding=axes, **no_mesh)
