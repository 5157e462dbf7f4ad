"""What a `MaskInfo` gives: dense masks, biases, ids, positions, lengths, offsets; computed when asked, never kept."""

from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from longspan.array_types import EngineName, no_type_check
from longspan.layout import BlockLayout
from longspan.maskinfo.bound import Bound
from longspan.maskinfo.checks import check_size, is_traced
from longspan.maskinfo.ids import LAST_POSITION, PADDING, has_several, lengths_of, positions_of, sequences

if TYPE_CHECKING:
    from longspan.engines import Engine
    from longspan.explanation import Explanation

MOST_SEGMENTS = 128
KINDS = ("causal", "sliding_window", "chunked", "token_type_ids")


class Views(Bound):
    """The properties and conversions."""

    @property
    def attention_mask(self) -> Shaped[Array, "B N_or_1 T S"]:
        """The dense mask [B, 1 or N, T, S]; bool, unless `to_dtype` asked for another.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, -1]])).attention_mask[0, 0].astype(int).tolist()
            [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
        """
        return self.get_or_compute_attention_mask(self._dtype)

    @property
    def bias(self) -> Float[Array, "B N_or_1 T S"]:
        """`create_bias()`: 0 where attention is allowed, the least float32 elsewhere.

        Example:
            >>> bool(ls.MaskInfo.from_segments(np.array([[0, -1]])).bias[0, 0, 0, 1] < -1e38)
            True
        """
        return self.create_bias()

    @property
    def cu_seqlens_q(self) -> Int[Array, "129"]:
        """Cumulative lengths of the queries' sequences, row after row without padding; the tail repeats the total.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1], [0, 0, 0, -1]])).cu_seqlens_q[:5].tolist()
            [0, 2, 3, 6, 6]
        """
        return self.get_or_compute_qkv_cu_seqlens()[0]

    @property
    def cu_seqlens_kv(self) -> Int[Array, "129"]:
        """Cumulative lengths of the keys' sequences, numbered as those of the queries.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.array([[0, 1]]), np.array([[0, 0, 1, 1, 1]]))
            >>> info.cu_seqlens_kv[:3].tolist()
            [0, 2, 5]
        """
        return self.get_or_compute_qkv_cu_seqlens()[1]

    @property
    def num_segments(self) -> Int[Array, ""]:
        """How many sequences there are: more than `max_segments` means that offsets made under jit are cut off.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1], [0, 0, 0, -1]])).num_segments.item()
            3
        """
        return sequences(self.q_segment_ids, self.kv_segment_ids, 1).count

    @property
    def q_lens(self) -> Int[Array, "B"]:
        """How many queries of each row are not padding. For the lengths of packed sequences: `diff(cu_seqlens_q)`.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1], [0, -1, -1, -1]])).q_lens.tolist()
            [3, 1]
        """
        return lengths_of(self.q_segment_ids)

    @property
    def kv_lens(self) -> Int[Array, "B"]:
        """How many keys of each row are not padding.

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
        """The dense mask in the dtype asked for, whatever was asked before.

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
        """The same mask, whose `attention_mask` has this dtype. Nothing is stored.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.array([[0, -1]])).materialize_attention_mask("int8")
            >>> info.attention_mask.dtype.name
            'int8'
        """
        return self.to_dtype(dtype)

    @no_type_check
    def to_dtype(self, dtype: Any) -> Self:
        """The same mask, whose `attention_mask` has this dtype.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, -1]])).to_dtype(jnp.float32).attention_mask.dtype.name
            'float32'
        """
        return self._with(_dtype=jnp.dtype(dtype))

    @no_type_check
    def create_bias(self, dtype: Any = jnp.float32) -> Float[Array, "B N_or_1 T S"]:
        """0 where attention is allowed, the dtype's least finite number elsewhere.

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
        """The padding masks of both sides, and the dense mask with every rule in it.

        Example:
            >>> masks = ls.MaskInfo.from_segments(np.array([[0, 0, -1]])).apply_causal().get_qkv_masks(int)
            >>> masks[0].tolist(), masks[2][0, 0].tolist()
            ([[1, 1, 0]], [[1, 0, 0], [1, 1, 0], [0, 0, 0]])
        """
        sides = [(ids >= 0).astype(dtype) for ids in (self.q_segment_ids, self.kv_segment_ids)]
        return sides[0], sides[1], self.get_or_compute_attention_mask(dtype)

    @no_type_check
    def get_or_compute_segment_ids(self, per_head: bool = False) -> tuple[Int[Array, "B *N T"], Int[Array, "B *N S"]]:
        """The ids of both sides; with `per_head` [B, N, L] for the N heads that the mask tells apart.

        If it tells heads apart, a token that takes part in no pair of a head is padding there.

        Example:
            >>> ids = ls.MaskInfo.from_segments(np.array([[0, 1, -1]])).get_or_compute_segment_ids()
            >>> ids[0].tolist()
            [[0, 1, -1]]
        """
        ids = self.q_segment_ids, self.kv_segment_ids
        heads = self.mask.heads
        if not per_head:
            return ids
        q_ids, kv_ids = (jnp.broadcast_to(a[:, None], (a.shape[0], heads, a.shape[1])) for a in ids)
        if heads == 1:
            return q_ids, kv_ids
        mask = self.get_or_compute_attention_mask(jnp.bool_)
        return jnp.where(mask.any(axis=3), q_ids, PADDING), jnp.where(mask.any(axis=2), kv_ids, PADDING)

    @no_type_check
    def materialize_segment_ids(self, per_head: bool = False) -> Self:
        """The same mask: its ids are always there.

        Example:
            >>> info = ls.MaskInfo.from_attention_mask(np.ones((1, 2, 3)))
            >>> info.materialize_segment_ids() is info
            True
        """
        return self

    def get_or_compute_positions(self) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
        """The given positions, or those that restart in each segment (padding: -1 for queries, int32's max for keys).

        Rules compare given positions, or else slots; never the ones derived here.

        Example:
            >>> q, kv = ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1]])).get_or_compute_positions()
            >>> q.tolist(), kv.tolist()
            ([[0, 1, 0, -1]], [[0, 1, 0, 2147483647]])
        """
        q, kv = (
            positions_of(ids, padding) if given is None else given
            for given, ids, padding in (
                (self.q_positions, self.q_segment_ids, PADDING),
                (self.kv_positions, self.kv_segment_ids, LAST_POSITION),
            )
        )
        return q, kv

    @no_type_check
    def get_or_compute_qkv_cu_seqlens(
        self, *, out_dtype: Any = jnp.int32, max_segments: int = MOST_SEGMENTS
    ) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
        """Cumulative lengths (max_segments + 1,) of both sides, FlashAttention-style: [0, n0, n0+n1, ...].

        The sequences of the rows follow each other, without padding; the tail repeats the total. A sequence that one
        side lacks is empty there. More sequences than `max_segments`, or ids that come back after another one, raise
        outside jit; under jit compare `num_segments` with `max_segments`.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1], [0, 0, 0, -1]]))
            >>> info.get_or_compute_qkv_cu_seqlens(max_segments=4)[0].tolist()
            [0, 2, 3, 6, 6]
        """
        most = check_size("max_segments", max_segments, least=1)
        found = sequences(self.q_segment_ids, self.kv_segment_ids, most)
        _check_segments(found.count, found.in_order, most)
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
        """Which key tiles each query tile visits, planned once for every layer.

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
        q, kv = (
            jax.ShapeDtypeStruct((self.batch_size, length, heads, head_dim), dtype)
            for length in (self.q_len, self.kv_len)
        )
        info: Any = self
        return explain(q, kv, kv, mask=info, engine=engine)


def _check_segments(count: Any, in_order: Any, most: int) -> None:
    """That offsets can hold and tell the sequences, wherever that is known."""
    if is_traced(count) or is_traced(in_order):
        return
    if int(count) > most:
        raise ValueError(
            f"There are {int(count)} sequences, but max_segments={most}. Call "
            f"`get_or_compute_qkv_cu_seqlens(max_segments={int(count)})` (or more)."
        )
    if not bool(in_order):
        raise ValueError(
            "Cumulative lengths cannot tell these segment ids: an id comes back after another one, or queries and "
            "keys have them in a different order. Sort the tokens by id, or use the ids."
        )


def _check_float(dtype: Any) -> Any:
    """A dtype that a bias can have."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"A bias needs a float dtype, got {dtype.name}. For 0 and 1 use `attention_mask`.")
    return dtype
