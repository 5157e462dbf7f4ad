"""The constructors of `MaskInfo`: from ids, masks, lengths, any rule, or the arguments of a model."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped

from longspan.array_types import Array as AnyArray
from longspan.array_types import no_type_check
from longspan.checks import check_extents, check_lengths
from longspan.maskinfo.bound import BATCH_AXES, KVHEADS_AXIS, QHEADS_AXIS, SEQUENCE_AXIS, AxisName, BoundMask
from longspan.maskinfo.checks import check_ids, check_rank, check_size
from longspan.maskinfo.convert import as_bool, qkv_cu_seqlens_to_qkv_masks
from longspan.maskinfo.ids import PADDING, check_offsets, check_total, from_offsets
from longspan.masks import And, Dense, Full, KvLengths, Mask, QLengths, Segments


class Constructors(BoundMask):
    """The `from_...` methods."""

    @classmethod
    @no_type_check
    def from_segments(
        cls,
        q_segment_ids: Int[AnyArray, "B T"],
        kv_segment_ids: Int[AnyArray, "B S"] | None = None,
        q_positions: Int[AnyArray, "B T"] | None = None,
        kv_positions: Int[AnyArray, "B S"] | None = None,
        batch_axis_name: AxisName = BATCH_AXES,
        qheads_axis_name: AxisName = QHEADS_AXIS,
        kvheads_axis_name: AxisName = KVHEADS_AXIS,
        sequence_axis_name: AxisName = SEQUENCE_AXIS,
        is_attn_mask: bool = False,
    ) -> Self:
        """A mask of packed documents: equal ids attend to each other, -1 is padding.

        Args:
            q_segment_ids: the document of each query.
            kv_segment_ids: the document of each key; by default `q_segment_ids`.
            q_positions: the queries' positions, which causal, window and chunk rules compare; by default the slots.
            kv_positions: the keys' positions.
            batch_axis_name: mesh axes for the batch, see `get_shardings`.
            qheads_axis_name: mesh axes for query heads.
            kvheads_axis_name: mesh axes for key/value heads.
            sequence_axis_name: mesh axes for the sequence.
            is_attn_mask: whether the arrays are padding masks instead of ids: nonzero = a token, 0 = padding.

        Example:
            >>> print(ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1]])).mask.show(4, 4))
            ##..
            ##..
            ..#.
            ....
        """
        q_ids: Any = q_segment_ids
        kv_ids: Any = q_segment_ids if kv_segment_ids is None else kv_segment_ids
        if is_attn_mask:
            q_ids, kv_ids = _padding_ids(as_bool(q_ids)), _padding_ids(as_bool(kv_ids))
        q_ids, kv_ids = check_ids(q_ids, kv_ids)
        axes = _axes(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name)
        return cls._bind(Full(), q_ids, kv_ids, q_positions, kv_positions, **axes)

    @classmethod
    @no_type_check
    def from_attention_mask(
        cls,
        attention_mask: Shaped[AnyArray, "..."],
        q_positions: Int[AnyArray, "B T"] | None = None,
        kv_positions: Int[AnyArray, "B S"] | None = None,
        *,
        mask_is_valid: bool = True,
        batch_axis_name: AxisName = BATCH_AXES,
        qheads_axis_name: AxisName = QHEADS_AXIS,
        kvheads_axis_name: AxisName = KVHEADS_AXIS,
        sequence_axis_name: AxisName = SEQUENCE_AXIS,
    ) -> Self:
        """A `MaskInfo` of a padding mask [B, L], or of a dense mask [B, T, S] or [B, N, T, S], which is kept unchanged.

        Args:
            attention_mask: nonzero = valid. A token's id is 0 if it takes part in a pair, and -1 (padding) if not.
            q_positions: as in `from_segments`.
            kv_positions: as in `from_segments`.
            mask_is_valid: if False, nonzero = masked.
            batch_axis_name: as in `from_segments`.
            qheads_axis_name: as in `from_segments`.
            kvheads_axis_name: as in `from_segments`.
            sequence_axis_name: as in `from_segments`.

        Example:
            >>> info = ls.MaskInfo.from_attention_mask(np.array([[1, 1, 0]]))
            >>> info.mask, info.q_segment_ids.tolist()
            (Segments(i32[1,3], i32[1,3]), [[0, 0, -1]])
        """
        mask = as_bool(attention_mask)
        check_rank("attention_mask", mask, (2, 3, 4), "(B, L), (B, Q, K) or (B, H, Q, K)")
        if not mask_is_valid:
            mask = ~mask
        axes = _axes(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name)
        if mask.ndim == 2:
            ids = _padding_ids(mask)
            return cls._bind(Full(), ids, ids, q_positions, kv_positions, **axes)
        return cls._bind(*_dense(mask), q_positions, kv_positions, **axes)

    @classmethod
    @no_type_check
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Int[AnyArray, "2*B"],
        *,
        max_q_len: int,
        cu_seqlens_kv: Int[AnyArray, "2*B"] | None = None,
        max_kv_len: int | None = None,
        q_positions: Int[AnyArray, "B T"] | None = None,
        kv_positions: Int[AnyArray, "B S"] | None = None,
        batch_axis_name: AxisName = BATCH_AXES,
        qheads_axis_name: AxisName = QHEADS_AXIS,
        kvheads_axis_name: AxisName = KVHEADS_AXIS,
        sequence_axis_name: AxisName = SEQUENCE_AXIS,
    ) -> Self:
        """A `MaskInfo` of spans of valid tokens: pairs [start0, end0, start1, end1, ...], one pair per batch row.

        For cumulative lengths use `from_offsets`.

        Example:
            >>> ls.MaskInfo.from_cu_seqlens(np.array([0, 3, 1, 4]), max_q_len=5).q_segment_ids.tolist()
            [[0, 0, 0, -1, -1], [-1, 0, 0, 0, -1]]
        """
        masks = qkv_cu_seqlens_to_qkv_masks(
            cu_seqlens_q, max_q_len=max_q_len, cu_seqlens_kv=cu_seqlens_kv, max_kv_len=max_kv_len
        )
        axes = _axes(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name)
        q_ids, kv_ids = check_ids(*map(_padding_ids, masks), names=("cu_seqlens_q", "cu_seqlens_kv"))
        return cls._bind(Full(), q_ids, kv_ids, q_positions, kv_positions, **axes)

    @classmethod
    @no_type_check
    def from_offsets(
        cls,
        offsets: Int[AnyArray, "n"],
        *,
        max_q_len: int | None = None,
        kv_offsets: Int[AnyArray, "n"] | None = None,
        max_kv_len: int | None = None,
        q_positions: Int[AnyArray, "1 T"] | None = None,
        kv_positions: Int[AnyArray, "1 S"] | None = None,
        batch_axis_name: AxisName = BATCH_AXES,
        qheads_axis_name: AxisName = QHEADS_AXIS,
        kvheads_axis_name: AxisName = KVHEADS_AXIS,
        sequence_axis_name: AxisName = SEQUENCE_AXIS,
    ) -> Self:
        """One packed row of sequences, from FlashAttention-style cumulative lengths [0, n0, n0+n1, ...].

        The inverse of `cu_seqlens_q` and `cu_seqlens_kv`.

        Args:
            offsets: cumulative lengths of the queries; entries that repeat the total add no sequence.
            max_q_len: number of query slots; slots after the total are padding. By default the total. Required if
                `offsets` is traced.
            kv_offsets: cumulative lengths of the keys; by default `offsets`.
            max_kv_len: number of key slots, as `max_q_len`.
            q_positions: as in `from_segments`.
            kv_positions: as in `from_segments`.
            batch_axis_name: as in `from_segments`.
            qheads_axis_name: as in `from_segments`.
            kvheads_axis_name: as in `from_segments`.
            sequence_axis_name: as in `from_segments`.

        Example:
            >>> ls.MaskInfo.from_offsets(np.array([0, 2, 5])).q_segment_ids.tolist()
            [[0, 0, 1, 1, 1]]
        """
        offsets = check_offsets("offsets", offsets)
        q_ids = from_offsets(offsets, check_total("max_q_len", max_q_len, offsets))
        if kv_offsets is None and max_kv_len is None:
            kv_ids = q_ids
        elif kv_offsets is None:
            kv_ids = from_offsets(offsets, check_size("max_kv_len", max_kv_len))
        else:
            kv_offsets = check_offsets("kv_offsets", kv_offsets)
            kv_ids = from_offsets(kv_offsets, check_total("max_kv_len", max_kv_len, kv_offsets))
        axes = _axes(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name)
        return cls._bind(Full(), q_ids, kv_ids, q_positions, kv_positions, **axes)

    @classmethod
    @no_type_check
    def from_mask(
        cls,
        mask: Mask,
        batch: int,
        q_len: int,
        kv_len: int | None = None,
        q_positions: Int[AnyArray, "B T"] | None = None,
        kv_positions: Int[AnyArray, "B S"] | None = None,
        batch_axis_name: AxisName = BATCH_AXES,
        qheads_axis_name: AxisName = QHEADS_AXIS,
        kvheads_axis_name: AxisName = KVHEADS_AXIS,
        sequence_axis_name: AxisName = SEQUENCE_AXIS,
    ) -> Self:
        """Any `Mask`, bound to a batch. `Segments`, `KvLengths` and `QLengths` joined with `&` become segment ids.

        Example:
            >>> info = ls.MaskInfo.from_mask(ls.Causal() & ls.Window(511, 0), batch=2, q_len=1_000_000)
            >>> info.mask, info.shape
            (Causal() & Window(511, 0), (2, 1000000, 1000000))
        """
        if not isinstance(mask, Mask):
            raise TypeError(
                f"mask must be a `Mask`, got {type(mask).__name__}. For an array use `from_attention_mask`."
            )
        if kv_len is None:
            kv_len = q_len
        check_lengths(q_len, kv_len)
        batch = check_size("batch", batch)
        check_extents(mask, q_len=q_len, kv_len=kv_len, batch=batch)
        rule, q_ids, kv_ids = _lift_documents(mask, q_len, kv_len)
        static = _axes(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name)
        static["_has_documents"] = rule is not mask
        static["_applied"] = _kinds(mask)
        q_ids = jnp.broadcast_to(jnp.asarray(q_ids).astype(np.int32), (batch, q_len))
        kv_ids = jnp.broadcast_to(jnp.asarray(kv_ids).astype(np.int32), (batch, kv_len))
        return cls._bind(rule, q_ids, kv_ids, q_positions, kv_positions, **static)

    @classmethod
    @no_type_check
    def from_random(
        cls,
        batch_size: int,
        q_len: int,
        kv_len: int | None = None,
        sparsity: float = 0.5,
        seed: int = 0,
        q_positions: Int[AnyArray, "B T"] | None = None,
        kv_positions: Int[AnyArray, "B S"] | None = None,
        batch_axis_name: AxisName = BATCH_AXES,
        qheads_axis_name: AxisName = QHEADS_AXIS,
        kvheads_axis_name: AxisName = KVHEADS_AXIS,
        sequence_axis_name: AxisName = SEQUENCE_AXIS,
    ) -> Self:
        """A dense random mask for tests: each pair is masked with probability `sparsity`.

        Example:
            >>> ls.MaskInfo.from_random(2, 3, 5, sparsity=1.0).attention_mask.any().item()
            False
        """
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity must lie in [0, 1] (0 = all pairs are allowed), got {sparsity}.")
        if kv_len is None:
            kv_len = q_len
        shape = check_size("batch_size", batch_size), 1, check_size("q_len", q_len), check_size("kv_len", kv_len)
        mask = jax.random.bernoulli(jax.random.PRNGKey(seed), 1 - sparsity, shape)
        axes = _axes(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name)
        return cls._bind(*_dense(mask), q_positions, kv_positions, **axes)

    @classmethod
    @no_type_check
    def dynamic_init(
        cls,
        *,
        mask_info: Self | None = None,
        input_ids: Int[AnyArray, "B T"] | None = None,
        inputs_embeds: Float[AnyArray, "B T D"] | None = None,
        attention_mask: Shaped[AnyArray, "..."] | None = None,
    ) -> Self:
        """The mask of a model's inputs: the given mask, or one document without padding if only tokens are given.

        The first of `mask_info`, `attention_mask`, `input_ids` and `inputs_embeds` that is given is used.

        Example:
            >>> ids = np.array([[7, 8, 9]])
            >>> ls.MaskInfo.dynamic_init(input_ids=ids, attention_mask=np.array([[1, 1, 0]])).q_segment_ids.tolist()
            [[0, 0, -1]]
            >>> ls.MaskInfo.dynamic_init(input_ids=ids).q_segment_ids.tolist()
            [[0, 0, 0]]
        """
        if mask_info is not None:
            return mask_info
        if attention_mask is not None:
            return cls.from_attention_mask(attention_mask)
        if input_ids is not None:
            check_rank("input_ids", input_ids, (2,), "(B, T)")
            return cls.from_segments(jnp.zeros(input_ids.shape, np.int32))
        if inputs_embeds is not None:
            check_rank("inputs_embeds", inputs_embeds, (3,), "(B, T, D)")
            return cls.from_segments(jnp.zeros(inputs_embeds.shape[:2], np.int32))
        raise ValueError(
            "dynamic_init needs at least one of mask_info, input_ids, inputs_embeds and attention_mask. They set the "
            "number of batch rows and tokens."
        )


def _axes(batch, qheads, kvheads, sequence) -> dict[str, Any]:
    return dict(batch_axis_name=batch, qheads_axis_name=qheads, kvheads_axis_name=kvheads, sequence_axis_name=sequence)


def _padding_ids(mask):
    return jnp.where(mask, np.int32(0), np.int32(PADDING))


def _dense(mask) -> tuple[Mask, Any, Any]:
    """A dense mask as a rule, and the ids of both sides: 0 for tokens that take part in a pair, else padding."""
    if mask.ndim == 3:
        mask = mask[:, None]
    return Dense(mask), _padding_ids(mask.any(axis=(1, 3))), _padding_ids(mask.any(axis=(1, 2)))


def _kinds(mask: Mask) -> tuple[str, ...]:
    """The kinds of rules joined with `&`, as `baked_in_masks` lists them."""
    return tuple(dict.fromkeys(part.applied for part in _conjuncts(mask) if part.applied))


def _lift_documents(mask: Mask, q_len: int, kv_len: int) -> tuple[Mask, Any, Any]:
    """The mask without the documents and lengths joined to it with `&`, and these as ids of both sides.

    A mask without documents and lengths is returned as is, with ids of shape (1, 1).
    """
    parts = _conjuncts(mask)
    documents = next((p for p in parts if isinstance(p, Segments)), None)
    rest = [p for p in parts if p is not documents and not isinstance(p, KvLengths | QLengths)]
    q_ids, kv_ids = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32)
    if len(rest) == len(parts):
        return mask, q_ids, kv_ids
    if documents is not None:
        q_ids, kv_ids = documents._ids()
    for part in parts:
        if isinstance(part, QLengths):
            q_ids = _padded_ids(q_ids, part.lengths, q_len)
        elif isinstance(part, KvLengths):
            kv_ids = _padded_ids(kv_ids, part.lengths, kv_len)
    if not rest:
        return Full(), q_ids, kv_ids
    if len(rest) == 1:
        return rest[0], q_ids, kv_ids
    return And(tuple(rest)), q_ids, kv_ids


def _padded_ids(ids, lengths, length: int):
    """Ids in which all slots past each row's length are padding."""
    if isinstance(lengths, int):
        lengths = min(lengths, length)  # it may exceed int32
    inside = jnp.arange(length, dtype=np.int32).reshape(1, -1) < jnp.asarray(lengths).astype(np.int32).reshape(-1, 1)
    return jnp.where(inside, jnp.asarray(ids).astype(np.int32), PADDING)


def _conjuncts(mask: Mask) -> tuple[Mask, ...]:
    """The masks joined with `&`."""
    return mask.parts() if isinstance(mask, And) else (mask,)
