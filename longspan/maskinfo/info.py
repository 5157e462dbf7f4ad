"""`MaskInfo`: a mask bound to a batch."""

from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from longspan.array_types import no_type_check
from longspan.maskinfo.bound import as_positions, check_axis_names
from longspan.maskinfo.build import Constructors
from longspan.maskinfo.checks import check_ids, is_traced
from longspan.maskinfo.debug import log_methods
from longspan.maskinfo.ids import check_offsets, check_total, from_offsets
from longspan.maskinfo.picture import Pictures
from longspan.maskinfo.rules import MaskInfoRules
from longspan.maskinfo.sharding import Shardings
from longspan.maskinfo.views import Views
from longspan.masks import Full

KEEP: Any = object()  # the default of `replace`: the field stays
AXES = ("batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name")


@dataclass(frozen=True, eq=False, repr=False)
class MaskInfo(Constructors, MaskInfoRules, Views, Shardings, Pictures):
    """The mask of a batch, convertible between representations: dense masks, ids, positions, lengths, offsets, biases.

    A `MaskInfo` stores a symbolic `mask` and the ids and positions of the batch's tokens, so memory grows with the
    number of tokens. Dense masks are computed on request and never stored. Objects are immutable: `apply_...` and
    `replace` return new ones. They are pytrees, and work under jit, vmap, grad, scan, cond, remat and shard_map.

    Documents and padding (`from_segments`) stay in force whatever is applied later. Causal, window and chunk rules
    compare `q_positions` and `kv_positions` [B, L] if these are given, slots otherwise. Segment ids give each document,
    each chunk and the padding a number. They do not describe the whole mask.

    `==` compares values.

    Example:
        >>> info = MaskInfo.from_segments(np.array([[0, 0, 0, 1, 1, -1]])).apply_causal()
        >>> info
        MaskInfo(batch=1, q_len=6, kv_len=6, mask=Segments(i32[1,6], i32[1,6]) & Causal())
        >>> print(info.mask.show(6, 6))
        #.....
        ##....
        ###...
        ...#..
        ...##.
        ......
        >>> q = k = v = jnp.ones((1, 6, 2, 4))
        >>> ls.attention(q, k, v, mask=info).shape
        (1, 6, 2, 4)
    """

    @no_type_check
    def replace(
        self,
        *,
        attention_mask=KEEP,
        q_segment_ids=KEEP,
        kv_segment_ids=KEEP,
        cu_seqlens_q=KEEP,
        cu_seqlens_kv=KEEP,
        q_positions=KEEP,
        kv_positions=KEEP,
        **axis_names,
    ) -> Self:
        """A copy with some fields changed. Fields that are not given stay; `None` clears a field.

        A new `attention_mask` also replaces documents, padding and all applied rules. Other fields replace only
        themselves.

        Args:
            attention_mask: the new mask, as in `from_attention_mask`. Its ids replace the old ones unless ids are given
                too; positions stay if the sizes stay. None: documents and padding stay, all other rules are removed.
            q_segment_ids: new documents of the queries; all other rules stay. None: one document without padding.
            kv_segment_ids: new documents of the keys.
            cu_seqlens_q: new documents of the queries as cumulative lengths, for one packed row. None changes nothing,
                because cumulative lengths are never stored.
            cu_seqlens_kv: new documents of the keys as cumulative lengths.
            q_positions: new positions of the queries. None: slots.
            kv_positions: new positions of the keys.
            axis_names: `batch_axis_name`, `qheads_axis_name`, `kvheads_axis_name`, `sequence_axis_name`.

        Example:
            >>> info = MaskInfo.from_segments(np.array([[0, 0, 1, 1]])).apply_causal()
            >>> other = info.replace(q_segment_ids=np.array([[0, 1, 1, 1]]), kv_segment_ids=np.array([[0, 1, 1, 1]]))
            >>> print(other.mask.show(4, 4))
            #...
            .#..
            .##.
            .###
            >>> info.replace(attention_mask=np.ones((1, 4, 4))).q_segment_ids.tolist()
            [[0, 0, 0, 0]]
        """
        if unknown := sorted(set(axis_names) - set(AXES)):
            raise TypeError(
                f"replace() got an unknown field {unknown[0]!r}. The fields are attention_mask, q_segment_ids, "
                f"kv_segment_ids, cu_seqlens_q, cu_seqlens_kv, q_positions, kv_positions, {', '.join(AXES)}."
            )
        check_axis_names(**axis_names)
        info = self._with(**axis_names)
        if attention_mask is None:
            info = info._with(_rule=Full(), _applied=(), _has_documents=True)
        elif attention_mask is not KEEP:
            info = info._with_attention_mask(attention_mask)
        if _is_given(cu_seqlens_q) and not _is_given(q_segment_ids):
            q_segment_ids = _ids_of_offsets("cu_seqlens_q", cu_seqlens_q, self.q_len)
        if _is_given(cu_seqlens_kv) and not _is_given(kv_segment_ids):
            kv_segment_ids = _ids_of_offsets("cu_seqlens_kv", cu_seqlens_kv, self.kv_len)
        info = info._with_documents(q_segment_ids, kv_segment_ids)
        return info._with_positions(q_positions, kv_positions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskInfo):
            return NotImplemented
        (mine, my_tree), (theirs, their_tree) = jax.tree.flatten(self), jax.tree.flatten(other)
        if any(map(is_traced, (*mine, *theirs))):
            raise TypeError(
                "== compares the values of two MaskInfos, which are unknown while tracing. Compare them outside jit, "
                "or compare arrays, e.g. `jnp.all(a.attention_mask == b.attention_mask)`."
            )
        return my_tree == their_tree and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def __hash__(self) -> int:
        raise TypeError(
            "A MaskInfo holds arrays, so it has no hash. Pass it to jit as an ordinary argument (it is a pytree), "
            "not as a static one."
        )

    def __repr__(self) -> str:
        given = [name for name in ("q_positions", "kv_positions") if getattr(self, name) is not None]
        sizes = f"batch={self.batch_size}, q_len={self.q_len}, kv_len={self.kv_len}"
        return f"{type(self).__name__}({sizes}, mask={self.mask!r}{''.join(f', {name}=given' for name in given)})"

    @no_type_check
    def _with_attention_mask(self, attention_mask) -> Self:
        new = type(self).from_attention_mask(attention_mask)
        axes = {name: getattr(self, name) for name in AXES}
        if new.shape == self.shape:
            new = new._with(q_positions=self.q_positions, kv_positions=self.kv_positions)
        return new._with(**axes, _dtype=self._dtype)

    @no_type_check
    def _with_documents(self, q_ids, kv_ids) -> Self:
        if q_ids is KEEP and kv_ids is KEEP:
            return self
        batch, q_len, kv_len = self.shape
        q_ids, kv_ids = check_ids(_new_ids(q_ids, self._q_documents), _new_ids(kv_ids, self._kv_documents))
        if (q_ids.shape[0], q_ids.shape[1], kv_ids.shape[1]) != self.shape:
            got = f"{tuple(q_ids.shape)} and {tuple(kv_ids.shape)}"
            raise ValueError(
                f"replace() cannot change sizes: ids must have shapes ({batch}, {q_len}) and ({batch}, {kv_len}), got "
                f"{got}. For other sizes make a new MaskInfo with `from_segments`."
            )
        return self._with(_q_documents=q_ids, _kv_documents=kv_ids, _q_ids=None, _kv_ids=None, _has_documents=True)

    @no_type_check
    def _with_positions(self, q_positions, kv_positions) -> Self:
        fields = {}
        if q_positions is not KEEP:
            fields["q_positions"] = as_positions("q_positions", q_positions, self.q_len, self.batch_size)
        if kv_positions is not KEEP:
            fields["kv_positions"] = as_positions("kv_positions", kv_positions, self.kv_len, self.batch_size)
        return self._with(**fields)


def _is_given(value: Any) -> bool:
    return value is not KEEP and value is not None


def _new_ids(new: Any, old: Any) -> Any:
    """The ids after `replace`: the old ones, one document without padding (None), or the new ones."""
    if new is KEEP:
        return old
    if new is None:
        return np.zeros(old.shape, np.int32)
    return new


def _ids_of_offsets(name: str, offsets: Any, length: int):
    offsets = check_offsets(name, offsets)
    return from_offsets(offsets, check_total(name, length, offsets))


jax.tree_util.register_dataclass(MaskInfo)
log_methods(MaskInfo)
