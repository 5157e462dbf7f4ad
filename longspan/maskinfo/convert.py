"""Conversions between masks, segment ids and pairs of offsets: plain functions of arrays.

A padding mask is [B, L]; an attention mask is [B, 1 or N, T, S]; ids are [B, L], negative for padding; pairs are
[2B]: the span [start, end) of valid tokens of each row, interleaved.
"""

from typing import Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from longspan.array_types import Array as AnyArray
from longspan.array_types import no_type_check
from longspan.checks import check_choice
from longspan.constants import unfolded
from longspan.maskinfo.checks import check_ids, check_ints, check_rank, check_size
from longspan.maskinfo.debug import logged
from longspan.maskinfo.ids import first_equal

HEADS = ("any", "all", "first")


@logged
@no_type_check
def mask_to_segment_ids(
    mask: Shaped[AnyArray, "*B T S"], per_head: bool = False
) -> tuple[Int[Array, "*B T"], Int[Array, "*B S"]]:
    """Segment ids recovered from a dense mask: equal rows share a query id, equal columns a key id.

    Ids count from 0 in order of first appearance; a row or column that is all false gets -1. The ids determine the
    mask only if it consists of blocks (documents, padding). In a causal mask every token gets a different id.

    Args:
        mask: [T, S], [B, T, S] or [B, N, T, S]; nonzero = may attend.
        per_head: for a mask [B, N, T, S], whether to return ids [B, N, L] per head, instead of those of head 0.

    Example:
        >>> q_ids, kv_ids = mask_to_segment_ids(np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]))
        >>> q_ids.tolist(), kv_ids.tolist()
        ([0, 0, 1], [0, 0, 1, -1])
    """
    mask = as_bool(mask)
    check_rank("mask", mask, (2, 3, 4), "(Q, K), (B, Q, K) or (B, H, Q, K)")
    if mask.ndim == 4 and not per_head:
        mask = mask[:, 0]
    ids_of_rows = _ids_of_rows
    for _ in range(mask.ndim - 2):
        ids_of_rows = jax.vmap(ids_of_rows)
    return ids_of_rows(mask), ids_of_rows(mask.swapaxes(-1, -2))


Separate: TypeAlias = tuple[Shaped[Array, "B T"], Shaped[Array, "B S"], Shaped[Array, "B 1 T S"]]


@overload
def segment_ids_to_mask(
    segment_ids: Int[AnyArray, "B L"] | tuple[Int[AnyArray, "B T"], Int[AnyArray, "B S"]],
    dtype: Any = ...,
    return_separate_masks: Literal[False] = ...,
) -> Shaped[Array, "B 1 T S"]: ...


@overload
def segment_ids_to_mask(
    segment_ids: Int[AnyArray, "B L"] | tuple[Int[AnyArray, "B T"], Int[AnyArray, "B S"]],
    dtype: Any = ...,
    *,
    return_separate_masks: Literal[True],
) -> Separate: ...


@logged
@no_type_check
def segment_ids_to_mask(
    segment_ids: Int[AnyArray, "B L"] | tuple[Int[AnyArray, "B T"], Int[AnyArray, "B S"]],
    dtype: Any = jnp.bool_,
    return_separate_masks: bool = False,
) -> Shaped[Array, "B 1 T S"] | Separate:
    """The dense mask [B, 1, T, S] of equal ids, both >= 0.

    Args:
        segment_ids: one array for queries and keys, or (q_ids, kv_ids).
        dtype: dtype of the result; 1 = may attend.
        return_separate_masks: whether to return (q_mask, kv_mask, attention_mask).

    Example:
        >>> segment_ids_to_mask(np.array([[0, 1, -1]]), dtype=int)[0, 0].tolist()
        [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    """
    pair = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(f"segment_ids must be one array or (q_ids, kv_ids), got {len(pair)} arrays.")
    q_ids, kv_ids = check_ids(*pair)
    attention_mask = (q_ids[:, None, :, None] == kv_ids[:, None, None, :]) & (q_ids >= 0)[:, None, :, None]
    if not return_separate_masks:
        return attention_mask.astype(dtype)
    return (q_ids >= 0).astype(dtype), (kv_ids >= 0).astype(dtype), attention_mask.astype(dtype)


@logged
@no_type_check
def segment_ids_to_qkv_masks(
    q_segment_ids: Int[AnyArray, "B T"], kv_segment_ids: Int[AnyArray, "B S"] | None = None, dtype: Any = jnp.bool_
) -> tuple[Shaped[Array, "B T"], Shaped[Array, "B S"], Shaped[Array, "B 1 T S"]]:
    """The padding masks of both sides and the dense mask of equal ids.

    Example:
        >>> q_mask, kv_mask, mask = segment_ids_to_qkv_masks(np.array([[0, -1]]), np.array([[0, 0, 1]]), dtype=int)
        >>> q_mask.tolist(), kv_mask.tolist(), mask[0, 0].tolist()
        ([[1, 0]], [[1, 1, 1]], [[1, 1, 0], [0, 0, 0]])
    """
    if kv_segment_ids is None:
        kv_segment_ids = q_segment_ids
    return segment_ids_to_mask((q_segment_ids, kv_segment_ids), dtype, return_separate_masks=True)


@logged
@no_type_check
def qkv_masks_to_cu_seqlens(
    q_mask: Shaped[AnyArray, "B T"], kv_mask: Shaped[AnyArray, "B S"] | None = None, *, out_dtype: Any = jnp.int32
) -> tuple[Int[Array, "2*B"], Int[Array, "2*B"]]:
    """The span of valid tokens of each row, as pairs [start0, end0, start1, end1, ...]; (0, 0) for an empty row.

    Example:
        >>> pairs, _ = qkv_masks_to_cu_seqlens(np.array([[0, 1, 1, 0], [0, 0, 0, 0]]))
        >>> pairs.tolist()
        [1, 3, 0, 0]
    """
    if kv_mask is None:
        kv_mask = q_mask
    check_rank("q_mask", q_mask, (2,), "(B, L)")
    check_rank("kv_mask", kv_mask, (2,), "(B, L)")
    return _spans(as_bool(q_mask)).astype(out_dtype), _spans(as_bool(kv_mask)).astype(out_dtype)


@logged
@no_type_check
def cu_seqlens_to_mask(cu_seqlens: Int[AnyArray, "2*B"], max_len: int, dtype: Any = jnp.bool_) -> Shaped[Array, "B L"]:
    """The padding masks [B, max_len] of pairs [start0, end0, start1, end1, ...].

    Example:
        >>> cu_seqlens_to_mask(np.array([1, 3, 0, 0]), 4, dtype=int).tolist()
        [[0, 1, 1, 0], [0, 0, 0, 0]]
    """
    pairs = _check_pairs("cu_seqlens", cu_seqlens)
    max_len = check_size("max_len", max_len)
    slots = jnp.arange(max_len, dtype=np.int32).reshape(1, -1)
    return ((pairs[0::2, None] <= slots) & (slots < pairs[1::2, None])).astype(dtype)


@logged
@no_type_check
def qkv_cu_seqlens_to_qkv_masks(
    cu_seqlens_q: Int[AnyArray, "2*B"],
    *,
    max_q_len: int,
    cu_seqlens_kv: Int[AnyArray, "2*B"] | None = None,
    max_kv_len: int | None = None,
    dtype: Any = jnp.bool_,
) -> tuple[Shaped[Array, "B T"], Shaped[Array, "B S"]]:
    """The padding masks of both sides. The pairs and the length of keys are by default those of queries.

    Example:
        >>> q_mask, kv_mask = qkv_cu_seqlens_to_qkv_masks(np.array([0, 2]), max_q_len=3, max_kv_len=4, dtype=int)
        >>> q_mask.tolist(), kv_mask.tolist()
        ([[1, 1, 0]], [[1, 1, 0, 0]])
    """
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
    if max_kv_len is None:
        max_kv_len = max_q_len
    return cu_seqlens_to_mask(cu_seqlens_q, max_q_len, dtype), cu_seqlens_to_mask(cu_seqlens_kv, max_kv_len, dtype)


@logged
@no_type_check
def qkv_cu_seqlens_to_attention_mask(
    cu_seqlens_q: Int[AnyArray, "2*B"],
    *,
    max_q_len: int,
    cu_seqlens_kv: Int[AnyArray, "2*B"] | None = None,
    max_kv_len: int | None = None,
    dtype: Any = jnp.bool_,
) -> Shaped[Array, "B 1 T S"]:
    """The dense mask [B, 1, T, S] of pairs: valid queries attend to the valid keys of their row.

    Example:
        >>> qkv_cu_seqlens_to_attention_mask(np.array([0, 1]), max_q_len=2, max_kv_len=3, dtype=int)[0, 0].tolist()
        [[1, 0, 0], [0, 0, 0]]
    """
    q_mask, kv_mask = qkv_cu_seqlens_to_qkv_masks(
        cu_seqlens_q, max_q_len=max_q_len, cu_seqlens_kv=cu_seqlens_kv, max_kv_len=max_kv_len
    )
    check_ids(q_mask.astype(np.int32), kv_mask.astype(np.int32))
    return (q_mask[:, None, :, None] & kv_mask[:, None, None, :]).astype(dtype)


@logged
@no_type_check
def attention_mask_to_qkv_cu_seqlens(
    attention_mask: Shaped[AnyArray, "..."], *, reduce_heads: str = "any", out_dtype: Any = jnp.int32
) -> tuple[Int[Array, "2*B"], Int[Array, "2*B"]]:
    """The spans of tokens that take part in a mask, as pairs for queries and for keys.

    Args:
        attention_mask: a padding mask [B, L], or [B, T, S] or [B, N, T, S].
        reduce_heads: how heads are combined: a pair is allowed if "any" head, "all" heads or the "first" head allow it.
        out_dtype: dtype of the pairs.

    Example:
        >>> q_pairs, kv_pairs = attention_mask_to_qkv_cu_seqlens(np.array([[[0, 1, 1], [0, 0, 0]]]))
        >>> q_pairs.tolist(), kv_pairs.tolist()
        ([0, 1], [1, 3])
    """
    check_choice("reduce_heads", reduce_heads, HEADS)
    mask = as_bool(attention_mask)
    check_rank("attention_mask", mask, (2, 3, 4), "(B, L), (B, Q, K) or (B, H, Q, K)")
    if mask.ndim == 2:
        return qkv_masks_to_cu_seqlens(mask, out_dtype=out_dtype)
    if mask.ndim == 4:
        mask = {"any": mask.any(axis=1), "all": mask.all(axis=1)}.get(reduce_heads, mask[:, 0])
    return qkv_masks_to_cu_seqlens(mask.any(axis=2), mask.any(axis=1), out_dtype=out_dtype)


def as_bool(mask: Any) -> Bool[Array, "..."]:
    """A mask of any dtype, as bools: nonzero = may attend."""
    mask = unfolded(jnp.asarray(mask))
    if mask.dtype == bool:
        return mask
    return mask != jnp.zeros((), mask.dtype)


@jax.jit
def _ids_of_rows(mask: Bool[AnyArray, "rows columns"]) -> Int[Array, "rows"]:
    """Ids of rows: equal rows have equal ids, numbered by first appearance; -1 for rows that are all false."""
    # Rows are packed to words of 32 columns, and compared one word at a time, so that memory stays near an eighth of
    # the mask. After each word, first[i] is the first row that equals row i in all words so far: two rows stay equal
    # if they had the same first row before and have the same word now.
    rows, columns = mask.shape
    words = -(-columns // 32)
    bits = jnp.pad(mask, ((0, 0), (0, words * 32 - columns))).reshape(rows, words, 32)
    weights = (np.uint32(1) << np.arange(32, dtype=np.uint32)).reshape(1, 1, 32)
    packed = jnp.sum(bits.astype(np.uint32) * weights, axis=2, dtype=np.uint32)

    def refine(first, word):
        return first_equal((word, first.astype(np.uint32))), None

    first, _ = jax.lax.scan(refine, jnp.zeros(rows, np.int32), packed.T)
    if not rows:
        return first
    has_keys = mask.any(axis=1)
    is_first = (first == jnp.arange(rows, dtype=np.int32)) & has_keys
    number = jnp.cumsum(is_first, dtype=np.int32) - 1
    return jnp.where(has_keys, number[first], -1)


def _spans(mask: Bool[AnyArray, "B L"]) -> Int[Array, "2*B"]:
    batch, length = mask.shape
    slots = jnp.arange(length, dtype=np.int32).reshape(1, -1)
    start = jnp.min(jnp.where(mask, slots, np.int32(length)), axis=1, initial=length)
    end = jnp.max(jnp.where(mask, slots + 1, np.int32(0)), axis=1, initial=0)
    return jnp.stack([jnp.where(end > 0, start, 0), end], axis=1).reshape(2 * batch)


def _check_pairs(name: str, pairs: Any) -> jax.Array:
    """Pairs [start0, end0, ...], as int32."""
    pairs = check_ints(name, pairs, 1, "(2B,)")
    if pairs.size % 2:
        raise ValueError(
            f"{name} must hold pairs [start0, end0, start1, end1, ...], got an odd length {pairs.size}. "
            "For cumulative lengths [0, n0, n0+n1, ...] use `MaskInfo.from_offsets`."
        )
    return pairs
