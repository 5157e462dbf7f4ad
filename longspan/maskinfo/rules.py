"""The `apply_...` methods of `MaskInfo`: each returns a new object with one more rule, or with fewer slots."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from longspan.array_types import Array as AnyArray
from longspan.array_types import no_type_check
from longspan.checks import check_choice, check_lengths
from longspan.maskinfo.bound import BoundMask
from longspan.maskinfo.checks import check_id_array, check_size, is_traced
from longspan.maskinfo.ids import PADDING, chunk_ids, type_ids
from longspan.masks import Band, Causal, Chunk, Full, Mask, TokenTypes, Window
from longspan.masks.checks import clipped_to_int32

MODES = (None, "default", "decode", "prefill")
COMBINE = ("union", "intersect", "replace")
ZERO_POLICIES = ("q", "kv", "both", "none")

Number = int | Int[Array, ""] | Int[Array, "B"]


class MaskInfoRules(BoundMask):
    """The `apply_...` methods."""

    @no_type_check
    def apply_causal(self, offset: Number = 0) -> Self:
        """Allows only k <= q + offset, by position.

        Args:
            offset: number of later positions a query may attend to; an int, or an int array of shape () or (B,), which
                may be traced.

        Example:
            >>> print(ls.MaskInfo.from_segments(np.zeros((1, 3), int)).apply_causal().mask.show(3, 3))
            #..
            ##.
            ###
        """
        return self._add(Causal(_check_number("offset", offset, self.batch_size)), "causal")

    @no_type_check
    def apply_sliding_window(
        self,
        sliding_window: Number | tuple[Number, Number],
        *,
        offset: Number = 0,
        mode: str | None = None,
        index: Number | None = None,
    ) -> Self:
        """Allows only q + offset - left <= k <= q + offset + right, by position.

        Args:
            sliding_window: (left, right), or one size for both sides. Sizes count keys besides the query's own.
            offset: added to the query's position.
            mode: None or "default" keeps all slots. "decode" keeps the query in slot `index` and the left + right + 1
                keys of its window. "prefill" keeps all queries and the last `sliding_window` keys, or left + right + 1
                for a pair. Ids and positions are sliced too. Both modes need static sizes.
            index: for "decode", the slot of the query: an int, or an int array of shape () or (B,).

        Example:
            >>> info = ls.MaskInfo.from_segments(np.zeros((1, 8), int))
            >>> step = info.apply_sliding_window((3, 0), mode="decode", index=5)
            >>> step.shape, step.q_positions.tolist(), step.kv_positions.tolist()
            ((1, 1, 4), [[5]], [[2, 3, 4, 5]])
        """
        _check_mode(mode, index)
        left, right = _check_window(sliding_window, self.batch_size)
        offset = _check_number("offset", offset, self.batch_size)
        if isinstance(offset, int) and offset == 0:
            window: Mask = Window(left, right)
        else:
            window = Band(offset - left, offset + right)
        if mode in ("decode", "prefill"):
            left, right = _check_static_window(mode, left, right)
        info = self._add(window, "sliding_window")
        if mode == "decode":
            return info._cut(*self._decode_slots(window, left, right, offset, index))
        if mode == "prefill":
            is_pair = isinstance(sliding_window, tuple | list)
            return info._cut(None, self._last_keys(left + right + 1 if is_pair else left))
        return info

    @no_type_check
    def apply_chunked(self, chunk_size: Number, offset: int = 0) -> Self:
        """Allows only keys of the query's own chunk, and k <= q + offset, by position.

        Segment ids become those of the chunks: chunk + 1 in a row of one document, else one per (document, chunk),
        counted from 1 in order of appearance. Queries still attend only to their own document.

        Args:
            chunk_size: positions per chunk, > 0; an int, or an int array of shape () or (B,), which may be traced.
            offset: number of later positions a query may attend to.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.array([[0, 0, 0, 1, 1, -1]])).apply_chunked(2)
            >>> info.q_segment_ids.tolist()
            [[1, 1, 2, 3, 4, -1]]
            >>> print(info.mask.show(6, 6))
            #.....
            ##....
            ..#...
            ...#..
            ....#.
            ......
        """
        size = _check_number("chunk_size", chunk_size, self.batch_size, least=1)
        offset = _check_number("offset", offset, self.batch_size)
        step = jnp.asarray(size, np.int32).reshape(-1, 1)
        q_positions, kv_positions = self._rule_positions()
        q_ids, kv_ids = chunk_ids(self.q_segment_ids, self.kv_segment_ids, q_positions // step, kv_positions // step)
        return self._add(Chunk(size) & Causal(offset), "chunked", _q_ids=q_ids, _kv_ids=kv_ids)

    @no_type_check
    def apply_token_type_ids(
        self,
        token_type_ids: Int[AnyArray, "B L"] | tuple[Int[AnyArray, "B T"], Int[AnyArray, "B S"]],
        *,
        combine: str = "union",
        zero_policy: str = "q",
        update_segment_ids: bool | None = None,
    ) -> Self:
        """Combines the rule with equality of token types, within documents.

        Args:
            token_type_ids: the types of all tokens, or (q_types, kv_types).
            combine: "union" also allows pairs of equal type (images in a causal text), "intersect" allows only those,
                "replace" allows exactly those and removes all other rules and documents.
            zero_policy: the side on which type 0 never matches: "q", "kv", "both", or "none".
            update_segment_ids: whether segment ids become the types; by default only for "intersect" and "replace".

        Differs from ejkernel: padding always stays padding, and a union does not cross documents.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.zeros((1, 4), int)).apply_causal()
            >>> print(info.apply_token_type_ids(np.array([[0, 1, 1, 0]])).mask.show(4, 4))
            #...
            ###.
            ###.
            ####
        """
        check_choice("combine", combine, COMBINE)
        check_choice("zero_policy", zero_policy, ZERO_POLICIES)
        q_types, kv_types = _check_types(token_type_ids, *self.shape)
        types = TokenTypes(q_types, kv_types, zero=zero_policy)
        q_ids, kv_ids = self.q_segment_ids, self.kv_segment_ids
        fields: dict[str, Any] = dict(_applied=self._marked("token_type_ids"))
        if combine == "replace":
            fields = dict(_applied=("token_type_ids",), _q_ids=q_ids, _kv_ids=kv_ids)
            q_ids, kv_ids = jnp.minimum(self._q_documents, 0), jnp.minimum(self._kv_documents, 0)
            fields.update(_q_documents=q_ids, _kv_documents=kv_ids)
        if update_segment_ids is None:
            update_segment_ids = combine != "union"
        if update_segment_ids:
            if zero_policy != "none":
                q_types = jnp.where(q_types == 0, PADDING, q_types)
                kv_types = jnp.where(kv_types == 0, PADDING, kv_types)
            q_ids, kv_ids = type_ids(q_ids, kv_ids, q_types, kv_types)
            fields.update(_q_ids=q_ids, _kv_ids=kv_ids)
        return self._with(_rule=_combined(combine, self._rule, types), **fields)

    @no_type_check
    def apply_kv_lengths(
        self,
        kv_lengths: Number,
        *,
        q_len: int,
        end_index: Number | None = None,
        sliding_window: int | None = None,
    ) -> Self:
        """Masks keys past each row's length and keeps the last queries and keys before it: a decode step on a cache.

        Args:
            kv_lengths: number of slots that hold keys, an int or an int array (B,). Keys past it get the id -1.
            q_len: number of queries to keep, starting at slot clip(length - q_len, 0, Q - q_len).
            end_index: the slot at which the queries end; by default the length.
            sliding_window: number of keys to keep, the last ones before the length; by default all keys.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.zeros((1, 6), int)).apply_causal()
            >>> step = info.apply_kv_lengths(np.array([4]), q_len=1, sliding_window=3)
            >>> step.shape, step.q_positions.tolist(), step.kv_positions.tolist()
            ((1, 1, 3), [[3]], [[1, 2, 3]])
        """
        batch, all_queries, all_keys = self.shape
        lengths = jnp.broadcast_to(jnp.asarray(_check_number("kv_lengths", kv_lengths, batch), np.int32), (batch,))
        kept = check_size("q_len", q_len)
        if kept > all_queries:
            raise ValueError(f"q_len must be at most {all_queries}, the number of queries, got {kept}.")
        end, window = lengths, all_keys
        if end_index is not None:
            end = jnp.broadcast_to(jnp.asarray(_check_number("end_index", end_index, batch), np.int32), (batch,))
        if sliding_window is not None:
            window = check_size("sliding_window", sliding_window)
        masked = self._with_keys_before(lengths)
        q, kv = None, None
        if kept < all_queries:
            q = _consecutive_slots(jnp.clip(end - kept, 0, all_queries - kept), kept)
        if window < all_keys:
            kv = _consecutive_slots(jnp.clip(lengths - window, 0, all_keys - window), window)
        if q is None and kv is None:
            return masked
        return masked._cut(q, kv)

    @staticmethod
    @no_type_check
    def create_chunked_attention_mask(
        chunk_size: int, q_len: int, kv_len: int | None = None, offset: int = 0, dtype: Any = jnp.bool_
    ) -> Bool[Array, "T S"]:
        """The dense mask [T, S] of `apply_chunked`.

        Example:
            >>> ls.MaskInfo.create_chunked_attention_mask(2, 3, dtype=int).tolist()
            [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        if kv_len is None:
            kv_len = q_len
        check_lengths(q_len, kv_len)
        rule = Chunk(_check_number("chunk_size", chunk_size, 1, least=1)) & Causal(_check_number("offset", offset, 1))
        return rule.dense(q_len, kv_len)[0, 0].astype(dtype)

    @no_type_check
    def _with_keys_before(self, lengths: Any) -> Self:
        """The same mask, in which keys past each row's length [B] are padding."""
        inside = jnp.arange(self.kv_len, dtype=np.int32).reshape(1, -1) < lengths[:, None]
        fields = dict(_kv_documents=jnp.where(inside, self._kv_documents, PADDING), _has_documents=True)
        if self._kv_ids is not None:
            fields.update(_kv_ids=jnp.where(inside, self._kv_ids, PADDING))
        return self._with(**fields)

    def _decode_slots(self, window: Mask, left: int, right: int, offset: Any, index: Any):
        """The slot of the query [B, 1], and the slots of the keys of its window [B, width]."""
        batch, q_len, kv_len = self.shape
        query, width = _check_index(index, q_len, batch)[:, None], min(left + right + 1, kv_len)
        if self.q_positions is None and self.kv_positions is None:
            offset = jnp.broadcast_to(jnp.asarray(offset, np.int32), (batch,))
            return query, _consecutive_slots(jnp.clip(query[:, 0] + offset - left, 0, kv_len - width), width)
        # Given positions may be in any order (a rolling cache). A stable sort puts the slots that the query may attend
        # to first; the first `width` slots are kept, in ascending order.
        one = self._with(_rule=window, _has_documents=True)._cut(query, None)
        allowed = one.mask.dense(1, kv_len, q_positions=one.q_positions, kv_positions=one.kv_positions)
        allowed = jnp.broadcast_to(allowed[:, 0, 0], (batch, kv_len))
        kept = jnp.argsort(~allowed, axis=1, stable=True)[:, :width]
        return query, jnp.sort(kept, axis=1).astype(np.int32)

    def _last_keys(self, count: int):
        """The last `count` slots of keys; None if these are all."""
        if count >= self.kv_len:
            return None
        return _consecutive_slots(jnp.full((self.batch_size,), self.kv_len - count, np.int32), count)


def _combined(combine: str, rule: Mask, types: Mask) -> Mask:
    if combine == "replace":
        return types
    if isinstance(rule, Full):
        return rule if combine == "union" else types
    return rule | types if combine == "union" else rule & types


def _consecutive_slots(starts, size: int):
    """Slots [B, size], beginning at each row's start [B]."""
    return starts[:, None] + jnp.arange(size, dtype=np.int32).reshape(1, -1)


def _check_number(name: str, value: Any, batch: int, least: int | None = None) -> Any:
    """A Python int, or an int32 array of shape () or (B,), which may be traced."""
    if not hasattr(value, "dtype"):
        if least is None:
            least = -(2**31)
        return check_size(name, value, least)
    if not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"{name} must hold integers, got dtype {value.dtype}. Cast it with `.astype('int32')`.")
    if value.shape not in ((), (1,), (batch,)):
        raise ValueError(
            f"{name} must be an int, or an int array of shape () or ({batch},), one per batch row, got shape "
            f"{tuple(value.shape)}."
        )
    if least is not None and not is_traced(value) and np.any(np.asarray(value) < least):
        raise ValueError(f"{name} must be >= {least}, got {np.asarray(value).tolist()}.")
    return jnp.asarray(clipped_to_int32(value))


def _check_window(window: Any, batch: int) -> tuple[Any, Any]:
    """A window as (left, right); a single size is symmetric."""
    if not isinstance(window, tuple | list):
        window = window, window
    if len(window) != 2:
        raise ValueError(f"sliding_window must be a size or (left, right), got {len(window)} sizes.")
    left, right = window
    left = _check_number("sliding_window", left, batch, least=0)
    right = _check_number("sliding_window", right, batch, least=0)
    return left, right


def _check_static_window(mode: str, left: Any, right: Any) -> tuple[int, int]:
    """The static sizes of a window, for a mode that slices."""
    if any(is_traced(n) or np.ndim(n) for n in (left, right)):
        raise ValueError(
            f"mode={mode!r} slices arrays, so sliding_window must be static, got a traced size or one size per batch "
            "row. Pass Python ints, or leave `mode` out."
        )
    return int(left), int(right)


def _check_mode(mode: Any, index: Any) -> None:
    """Raises a ValueError for an unknown mode, or for a mode without the index it needs."""
    if mode not in MODES:
        check_choice("mode", mode, [m for m in MODES if m])
    if mode == "decode" and index is None:
        raise ValueError("mode='decode' needs `index`, the slot of the query: an int, or an int array of shape (B,).")


def _check_index(index: Any, q_len: int, batch: int) -> jax.Array:
    """The slot of one query per row, [B]. A traced slot out of range is clipped."""
    index = _check_number("index", index, batch)
    if not is_traced(index) and np.any((np.asarray(index) < 0) | (np.asarray(index) >= q_len)):
        raise ValueError(f"index must lie in [0, {q_len}), the slots of the queries, got {np.asarray(index).tolist()}.")
    return jnp.broadcast_to(jnp.clip(jnp.asarray(index, np.int32), 0, max(q_len - 1, 0)), (batch,))


def _check_types(token_type_ids: Any, batch: int, q_len: int, kv_len: int) -> tuple[jax.Array, jax.Array]:
    """Token types [B, T] and [B, S]."""
    pair = token_type_ids if isinstance(token_type_ids, tuple) else (token_type_ids, token_type_ids)
    if len(pair) != 2:
        raise ValueError(f"token_type_ids must be one array or (q_types, kv_types), got {len(pair)} arrays.")
    types = []
    for name, array, length in zip(("q_types", "kv_types"), pair, (q_len, kv_len), strict=True):
        array = check_id_array(name, array)
        if array.shape[0] not in (1, batch) or array.shape[1] != length:
            raise ValueError(
                f"{name} must have shape ({batch}, {length}), got {tuple(array.shape)}. If queries and keys differ in "
                "length, pass (q_types, kv_types)."
            )
        types.append(jnp.broadcast_to(array, (batch, length)))
    return types[0], types[1]
