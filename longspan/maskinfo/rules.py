"""How a `MaskInfo` is narrowed: each method returns a new one with one more rule, or with fewer slots."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from longspan.array_types import Array as AnyArray
from longspan.array_types import no_type_check
from longspan.checks import check_choice, check_lengths
from longspan.maskinfo.bound import Bound
from longspan.maskinfo.checks import check_names, check_size, is_traced
from longspan.maskinfo.ids import PADDING, name_chunks, name_types
from longspan.masks import Band, Causal, Chunk, Full, Mask, TokenTypes, Window
from longspan.masks.checks import clipped_to_int32

MODES = (None, "default", "decode", "prefill")
COMBINE = ("union", "intersect", "replace")
ZERO_POLICIES = ("q", "kv", "both", "none")

Number = int | Int[Array, ""] | Int[Array, "B"]


class Rules(Bound):
    """The `apply_...` methods."""

    @no_type_check
    def apply_causal(self, offset: Number = 0) -> Self:
        """Allows only k <= q + offset, by position.

        Args:
            offset: how far ahead a query may look; an int, or an int array of shape () or (B,), which may be traced.

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
                keys that it can see. "prefill" keeps all queries, and the last `sliding_window` (or left + right + 1)
                keys. Ids and positions are cut alike. Modes that cut need static sizes.
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
        window = Window(left, right) if _is_zero(offset) else Band(offset - left, offset + right)
        if mode in ("decode", "prefill"):
            left, right = _check_static_window(mode, left, right)
        both = self._add(window, "sliding_window")
        if mode == "decode":
            return both._cut(*self._decode_slots(window, left, right, offset, index))
        if mode == "prefill":
            pair = isinstance(sliding_window, tuple | list)
            return both._cut(None, self._last_keys(left + right + 1 if pair else left))
        return both

    @no_type_check
    def apply_chunked(self, chunk_size: Number, offset: int = 0) -> Self:
        """Allows only keys of the query's own chunk, and k <= q + offset, by position.

        Ids become those of the chunks: chunk + 1 in a row of one document, else one per (document, chunk), counted from
        1 in order of appearance. Documents still separate.

        Args:
            chunk_size: positions in a chunk, > 0; an int, or an int array of shape () or (B,), which may be traced.
            offset: how far ahead a query may look.

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
        names = name_chunks(self.q_segment_ids, self.kv_segment_ids, *(p // step for p in self._rule_positions()))
        return self._add(Chunk(size) & Causal(offset), "chunked", _q_names=names[0], _kv_names=names[1])

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
            combine: "union" also allows pairs of one type (images in a causal text), "intersect" allows only those,
                "replace" allows them instead of all other rules, documents included.
            zero_policy: on which side type 0 is disabled: "q", "kv", "both", or "none".
            update_segment_ids: whether ids become the types; by default, unless "union".

        Padding stays padding under all three, and a union does not cross documents (in ejkernel both happen).

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
        applied = ("token_type_ids",) if combine == "replace" else self._marked("token_type_ids")
        fields: dict[str, Any] = dict(_applied=applied)
        q_ids, kv_ids = self.q_segment_ids, self.kv_segment_ids
        if combine == "replace":
            documents = [jnp.minimum(ids, 0) for ids in (self._q_documents, self._kv_documents)]
            fields.update(_q_documents=documents[0], _kv_documents=documents[1], _q_names=q_ids, _kv_names=kv_ids)
            q_ids, kv_ids = documents
        if combine != "union" if update_segment_ids is None else update_segment_ids:
            shown = [t if zero_policy == "none" else jnp.where(t == 0, PADDING, t) for t in (q_types, kv_types)]
            names = name_types(q_ids, kv_ids, *shown)
            fields.update(_q_names=names[0], _kv_names=names[1])
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
        """Masks the keys past each row's length, and keeps the last queries and keys before it: a step on a cache.

        Args:
            kv_lengths: int (B,), or one for all rows: how many slots hold keys. The others get id -1.
            q_len: how many queries to keep, from slot clip(length - q_len, 0, Q - q_len) on.
            end_index: where the queries end, if not at the length.
            sliding_window: how many keys to keep, the last ones before the length; all by default.

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
        end = lengths if end_index is None else jnp.asarray(_check_number("end_index", end_index, batch), np.int32)
        window = all_keys if sliding_window is None else check_size("sliding_window", sliding_window)
        inside = jnp.arange(all_keys, dtype=np.int32).reshape(1, -1) < lengths[:, None]
        masked = self._with(
            _kv_documents=jnp.where(inside, self._kv_documents, PADDING),
            _kv_names=None if self._kv_names is None else jnp.where(inside, self._kv_names, PADDING),
            _has_documents=True,
        )
        end = jnp.broadcast_to(end, (batch,))
        q = None if kept == all_queries else _consecutive_slots(jnp.clip(end - kept, 0, all_queries - kept), kept)
        kv = (
            None if window >= all_keys else _consecutive_slots(jnp.clip(lengths - window, 0, all_keys - window), window)
        )
        return masked if q is None and kv is None else masked._cut(q, kv)

    @staticmethod
    @no_type_check
    def create_chunked_attention_mask(
        chunk_size: int, q_len: int, kv_len: int | None = None, offset: int = 0, dtype: Any = jnp.bool_
    ) -> Bool[Array, "T S"]:
        """The dense mask [T, S] of `apply_chunked`.

        Example:
            >>> Rules.create_chunked_attention_mask(2, 3, dtype=int).tolist()
            [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        kv_len = q_len if kv_len is None else kv_len
        check_lengths(q_len, kv_len)
        rule = Chunk(_check_number("chunk_size", chunk_size, 1, least=1)) & Causal(_check_number("offset", offset, 1))
        return rule.dense(q_len, kv_len)[0, 0].astype(dtype)

    def _decode_slots(self, window: Mask, left: int, right: int, offset: Any, index: Any):
        """The slot of the query and those of the keys that its window reaches."""
        batch, q_len, kv_len = self.shape
        query, width = _check_index(index, q_len, batch)[:, None], min(left + right + 1, kv_len)
        if self.q_positions is None and self.kv_positions is None:
            offset = jnp.broadcast_to(jnp.asarray(offset, np.int32), (batch,))
            return query, _consecutive_slots(jnp.clip(query[:, 0] + offset - left, 0, kv_len - width), width)
        # Given positions may lie anywhere (a rolling cache): the slots that the query sees come first, then others.
        one = self._with(_rule=window, _has_documents=True)._cut(query, None)
        seen = one.mask.dense(1, kv_len, q_positions=one.q_positions, kv_positions=one.kv_positions)
        seen = jnp.broadcast_to(seen[:, 0, 0], (batch, kv_len))
        return query, jnp.sort(jnp.argsort(~seen, axis=1, stable=True)[:, :width], axis=1).astype(np.int32)

    def _last_keys(self, count: int):
        batch, _, kv_len = self.shape
        return None if count >= kv_len else _consecutive_slots(jnp.full((batch,), kv_len - count, np.int32), count)


def _combined(combine: str, rule: Mask, types: Mask) -> Mask:
    if combine == "replace":
        return types
    if combine == "union":
        return Full() if isinstance(rule, Full) else rule | types
    return types if isinstance(rule, Full) else rule & types


def _consecutive_slots(starts, size: int):
    """Slots [B, size] from each row's start on."""
    return starts[:, None] + jnp.arange(size, dtype=np.int32).reshape(1, -1)


def _is_zero(number: Any) -> bool:
    return isinstance(number, int) and number == 0


def _check_number(name: str, value: Any, batch: int, least: int | None = None) -> Any:
    """An int, or an int array of shape () or (B,), which may be traced: a Python int, or int32."""
    if not hasattr(value, "dtype"):
        return check_size(name, value, -(2**31) if least is None else least)
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
    pair = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2:
        raise ValueError(f"sliding_window must be a size or (left, right), got {len(pair)} sizes.")
    left, right = (_check_number("sliding_window", side, batch, least=0) for side in pair)
    return left, right


def _check_static_window(mode: str, left: Any, right: Any) -> tuple[int, int]:
    """The sizes of a mode that slices."""
    if any(is_traced(n) or np.ndim(n) for n in (left, right)):
        raise ValueError(
            f"mode={mode!r} slices, so sliding_window must be static, got a traced size or one per batch row. "
            "Pass Python ints, or leave `mode` out."
        )
    return int(left), int(right)


def _check_mode(mode: Any, index: Any) -> None:
    """A mode of a sliding window, with what it needs."""
    if mode not in MODES:
        check_choice("mode", mode, [m for m in MODES if m])
    if mode == "decode" and index is None:
        raise ValueError("mode='decode' needs `index`, the slot of the query: an int, or an int array of shape (B,).")


def _check_index(index: Any, q_len: int, batch: int) -> jax.Array:
    """The slot of one query per row, [B]; a traced one is clipped."""
    index = _check_number("index", index, batch)
    if not is_traced(index) and np.any((np.asarray(index) < 0) | (np.asarray(index) >= q_len)):
        raise ValueError(f"index must lie in [0, {q_len}), the slots of the queries, got {np.asarray(index).tolist()}.")
    return jnp.broadcast_to(jnp.clip(jnp.asarray(index, np.int32), 0, max(q_len - 1, 0)), (batch,))


def _check_types(token_type_ids: Any, batch: int, q_len: int, kv_len: int) -> tuple[jax.Array, jax.Array]:
    """Token types [B, T] and [B, S]."""
    pair = token_type_ids if isinstance(token_type_ids, tuple) else (token_type_ids, token_type_ids)
    if len(pair) != 2:
        raise ValueError(f"token_type_ids must be one array or (q_types, kv_types), got {len(pair)} of them.")
    types = []
    for name, array, length in zip(("q_types", "kv_types"), pair, (q_len, kv_len), strict=True):
        array = check_names(name, array)
        if array.shape[0] not in (1, batch) or array.shape[1] != length:
            raise ValueError(
                f"{name} must have shape ({batch}, {length}), got {tuple(array.shape)}. If queries and keys differ in "
                "length, pass (q_types, kv_types)."
            )
        types.append(jnp.broadcast_to(array, (batch, length)))
    return types[0], types[1]
