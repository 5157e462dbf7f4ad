"""The representations of a `MaskInfo`: dense masks, biases, ids, positions, lengths, offsets. None is stored."""

from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from longspan.array_types import EngineName, no_type_check
from longspan.layout import BlockLayout
from longspan.maskinfo.bound import BoundMask
from longspan.maskinfo.checks import check_size, is_traced
from longspan.maskinfo.ids import LAST_POSITION, PADDING, has_several, lengths_of, positions_of, sequences

if TYPE_CHECKING:
    from longspan.engines import Engine
    from longspan.explanation import Explanation

MAX_SEGMENTS = 128
KINDS = ("causal", "sliding_window", "chunked", "token_type_ids")


class Views(BoundMask):
    """The properties and conversions."""

    @property
    def attention_mask(self) -> Shaped[Array, "B N_or_1 T S"]:
        """The dense mask [B, 1 or N, T, S]; bool, or the dtype of `to_dtype`.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, -1]])).attention_mask[0, 0].astype(int).tolist()
            [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
        """
        return self.get_or_compute_attention_mask(self._dtype)

    @property
    def bias(self) -> Float[Array, "B N_or_1 T S"]:
        """The bias of `create_bias()`: 0 where attention is allowed, the least finite float32 elsewhere.

        Example:
            >>> bool(ls.MaskInfo.from_segments(np.array([[0, -1]])).bias[0, 0, 0, 1] < -1e38)
            True
        """
        return self.create_bias()

    @property
    def cu_seqlens_q(self) -> Int[Array, "129"]:
        """Cumulative lengths of the queries' sequences, row by row without padding; the tail repeats the total.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1], [0, 0, 0, -1]])).cu_seqlens_q[:5].tolist()
            [0, 2, 3, 6, 6]
        """
        return self.get_or_compute_qkv_cu_seqlens()[0]

    @property
    def cu_seqlens_kv(self) -> Int[Array, "129"]:
        """Cumulative lengths of the keys' sequences, in the same order as those of the queries.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.array([[0, 1]]), np.array([[0, 0, 1, 1, 1]]))
            >>> info.cu_seqlens_kv[:3].tolist()
            [0, 2, 5]
        """
        return self.get_or_compute_qkv_cu_seqlens()[1]

    @property
    def num_segments(self) -> Int[Array, ""]:
        """The number of sequences. If it exceeds `max_segments`, cumulative lengths computed under jit are cut off.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1], [0, 0, 0, -1]])).num_segments.item()
            3
        """
        return sequences(self.q_segment_ids, self.kv_segment_ids, 1).count

    @property
    def q_lens(self) -> Int[Array, "B"]:
        """The number of queries per row that are not padding. Lengths of packed sequences are `diff(cu_seqlens_q)`.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1], [0, -1, -1, -1]])).q_lens.tolist()
            [3, 1]
        """
        return lengths_of(self.q_segment_ids)

    @property
    def kv_lens(self) -> Int[Array, "B"]:
        """The number of keys per row that are not padding.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1], [0, -1, -1, -1]])).kv_lens.tolist()
            [3, 1]
        """
        return lengths_of(self.kv_segment_ids)

    @property
    def is_multi_sequence(self) -> Bool[Array, ""]:
        """Whether any row holds more than one distinct id.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[1, 1, -1]])).is_multi_sequence.item()
            False
        """
        return jnp.any(has_several(self.q_segment_ids)) | jnp.any(has_several(self.kv_segment_ids))

    @property
    def baked_in_masks(self) -> dict[str, bool]:
        """Which rules were applied.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0]])).apply_causal().baked_in_masks
            {'causal': True, 'sliding_window': False, 'chunked': False, 'token_type_ids': False}
        """
        return {kind: kind in self._applied for kind in KINDS}

    @property
    def q_attention_mask(self) -> Int[Array, "B T"]:
        """int32: 1 for queries, 0 for padding.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[3, 3, -1]])).q_attention_mask.tolist()
            [[1, 1, 0]]
        """
        return (self.q_segment_ids >= 0).astype(np.int32)

    @property
    def q_position_ids(self) -> Int[Array, "B T"]:
        """Positions that restart in each segment; -1 for padding.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, 1, 1, 1, -1]])).q_position_ids.tolist()
            [[0, 1, 0, 1, 2, -1]]
        """
        return positions_of(self.q_segment_ids, PADDING)

    @no_type_check
    def get_or_compute_attention_mask(self, dtype: Any = jnp.bool_) -> Shaped[Array, "B N_or_1 T S"]:
        """The dense mask in the given dtype.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, -1]])).get_or_compute_attention_mask("float16").dtype.name
            'float16'
        """
        batch, q_len, kv_len = self.shape
        mask = self.mask
        truth = mask.dense(q_len, kv_len, q_positions=self.q_positions, kv_positions=self.kv_positions)
        return jnp.broadcast_to(truth, (batch, *truth.shape[1:])).astype(dtype)

    @no_type_check
    def materialize_attention_mask(self, dtype: Any = jnp.bool_) -> Self:
        """The same mask with this dtype of `attention_mask`, as `to_dtype`. The dense mask is not stored.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.array([[0, -1]])).materialize_attention_mask("int8")
            >>> info.attention_mask.dtype.name
            'int8'
        """
        return self.to_dtype(dtype)

    @no_type_check
    def to_dtype(self, dtype: Any) -> Self:
        """The same mask with this dtype of `attention_mask`.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, -1]])).to_dtype(jnp.float32).attention_mask.dtype.name
            'float32'
        """
        return self._with(_dtype=jnp.dtype(dtype))

    @no_type_check
    def create_bias(self, dtype: Any = jnp.float32) -> Float[Array, "B N_or_1 T S"]:
        """A bias: 0 where attention is allowed, the dtype's least finite number elsewhere.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, -1]])).create_bias("float16")[0, 0, 0].tolist()
            [0.0, -65504.0]
        """
        dtype = _check_float(dtype)
        allowed = self.get_or_compute_attention_mask(jnp.bool_)
        return jnp.where(allowed, jnp.zeros((), dtype), jnp.finfo(dtype).min.astype(dtype))

    @no_type_check
    def get_qkv_masks(
        self, dtype: Any = jnp.bool_
    ) -> tuple[Shaped[Array, "B T"], Shaped[Array, "B S"], Shaped[Array, "B N_or_1 T S"]]:
        """The padding masks of both sides, and the dense mask of all rules.

        Example:
            >>> masks = ls.MaskInfo.from_segments(np.array([[0, 0, -1]])).apply_causal().get_qkv_masks(int)
            >>> masks[0].tolist(), masks[2][0, 0].tolist()
            ([[1, 1, 0]], [[1, 0, 0], [1, 1, 0], [0, 0, 0]])
        """
        q_mask, kv_mask = (self.q_segment_ids >= 0).astype(dtype), (self.kv_segment_ids >= 0).astype(dtype)
        return q_mask, kv_mask, self.get_or_compute_attention_mask(dtype)

    @no_type_check
    def get_or_compute_segment_ids(self, per_head: bool = False) -> tuple[Int[Array, "B *N T"], Int[Array, "B *N S"]]:
        """The ids of both sides, [B, L], or [B, N, L] with `per_head`.

        N is the number of heads of the mask, 1 if all heads are alike. If heads differ, a token without an allowed pair
        in a head is padding in that head.

        Example:
            >>> ids = ls.MaskInfo.from_segments(np.array([[0, 1, -1]])).get_or_compute_segment_ids()
            >>> ids[0].tolist()
            [[0, 1, -1]]
        """
        if not per_head:
            return self.q_segment_ids, self.kv_segment_ids
        batch, q_len, kv_len = self.shape
        heads = self.mask.heads
        q_ids = jnp.broadcast_to(self.q_segment_ids[:, None], (batch, heads, q_len))
        kv_ids = jnp.broadcast_to(self.kv_segment_ids[:, None], (batch, heads, kv_len))
        if heads == 1:
            return q_ids, kv_ids
        mask = self.get_or_compute_attention_mask(jnp.bool_)
        return jnp.where(mask.any(axis=3), q_ids, PADDING), jnp.where(mask.any(axis=2), kv_ids, PADDING)

    @no_type_check
    def materialize_segment_ids(self, per_head: bool = False) -> Self:
        """The same mask, because ids are always available.

        Example:
            >>> info = ls.MaskInfo.from_attention_mask(np.ones((1, 2, 3)))
            >>> info.materialize_segment_ids() is info
            True
        """
        return self

    def get_or_compute_positions(self) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
        """The given positions, or positions that restart in each segment.

        The latter have -1 for padded queries and int32's maximum for padded keys. They are never used by rules, which
        compare given positions, or slots if none are given.

        Example:
            >>> q, kv = ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1]])).get_or_compute_positions()
            >>> q.tolist(), kv.tolist()
            ([[0, 1, 0, -1]], [[0, 1, 0, 2147483647]])
        """
        q_positions, kv_positions = self.q_positions, self.kv_positions
        if q_positions is None:
            q_positions = positions_of(self.q_segment_ids, PADDING)
        if kv_positions is None:
            kv_positions = positions_of(self.kv_segment_ids, LAST_POSITION)
        return q_positions, kv_positions

    @no_type_check
    def get_or_compute_qkv_cu_seqlens(
        self, *, out_dtype: Any = jnp.int32, max_segments: int = MAX_SEGMENTS
    ) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
        """Cumulative lengths (max_segments + 1,) of both sides, FlashAttention-style: [0, n0, n0+n1, ...].

        The sequences of all rows are concatenated without padding; the tail repeats the total. A sequence that one side
        lacks has length 0 there. Outside jit, more than `max_segments` sequences raise a ValueError, and so does an id
        that reappears after another id. Under jit, compare `num_segments` with `max_segments`.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1], [0, 0, 0, -1]]))
            >>> info.get_or_compute_qkv_cu_seqlens(max_segments=4)[0].tolist()
            [0, 2, 3, 6, 6]
        """
        max_segments = check_size("max_segments", max_segments, least=1)
        found = sequences(self.q_segment_ids, self.kv_segment_ids, max_segments)
        _check_segments(found.count, found.in_order, max_segments)
        return found.q_offsets.astype(out_dtype), found.kv_offsets.astype(out_dtype)

    def is_self_attention(self) -> Bool[Array, ""]:
        """Whether queries and keys are the same tokens: as many, with equal ids and positions.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, -1]])).is_self_attention().item()
            True
        """
        if self.q_len != self.kv_len:
            return jnp.array(False)
        q_positions, kv_positions = self._rule_positions()
        return jnp.all(self.q_segment_ids == self.kv_segment_ids) & jnp.all(q_positions == kv_positions)

    @no_type_check
    def layout(self, q_tile: int = 128, kv_tile: int = 128) -> BlockLayout:
        """The key tiles that each query tile visits. One layout serves all layers.

        Example:
            >>> ls.MaskInfo.from_mask(ls.Window(1, 1), batch=1, q_len=512).layout().visits()
            10
        """
        positions = dict(q_positions=self.q_positions, kv_positions=self.kv_positions)
        return self.mask.layout(self.q_len, self.kv_len, q_tile=q_tile, kv_tile=kv_tile, **positions)

    @no_type_check
    def explain(
        self,
        *,
        heads: int | None = None,
        head_dim: int = 64,
        dtype: Any = jnp.float32,
        engine: "EngineName | Engine" = "auto",
    ) -> "Explanation":
        """A report of what `attention` would do with this mask: engine, tiles, FLOPs, and why tiles cannot be skipped.

        Args:
            heads: number of heads of q, k and v; by default the number of heads of the mask.
            head_dim: features per head.
            dtype: dtype of q, k and v.
            engine: as in `attention`.

        Example:
            >>> info = ls.MaskInfo.from_mask(ls.Causal(), batch=1, q_len=1024)
            >>> info.explain(engine="reference").engine
            'reference'
        """
        from longspan.explanation import explain

        heads = self.mask.heads if heads is None else check_size("heads", heads, least=1)
        q = jax.ShapeDtypeStruct((self.batch_size, self.q_len, heads, head_dim), dtype)
        kv = jax.ShapeDtypeStruct((self.batch_size, self.kv_len, heads, head_dim), dtype)
        info: Any = self
        return explain(q, kv, kv, mask=info, engine=engine)


def _check_segments(count: Any, in_order: Any, max_segments: int) -> None:
    """Raises a ValueError if offsets are too few or cannot represent the ids. Traced values are not checked."""
    if is_traced(count) or is_traced(in_order):
        return
    if int(count) > max_segments:
        raise ValueError(
            f"There are {int(count)} sequences, but max_segments={max_segments}. Call "
            f"`get_or_compute_qkv_cu_seqlens(max_segments={int(count)})` (or more)."
        )
    if not bool(in_order):
        raise ValueError(
            "Cumulative lengths cannot represent these segment ids: an id reappears after another id, or queries and "
            "keys have the ids in a different order. Sort the tokens by id, or use the ids."
        )


def _check_float(dtype: Any) -> Any:
    """The dtype of a bias; a TypeError if it is not a float dtype."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"A bias needs a float dtype, got {dtype.name}. For 0 and 1 use `attention_mask`.")
    return dtype
