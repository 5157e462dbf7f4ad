"""`MaskInfo`: a rule bound to a batch."""

from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from longspan.array_types import no_type_check
from longspan.maskinfo.bound import as_positions, check_axis_names
from longspan.maskinfo.build import Constructors
from longspan.maskinfo.checks import check_ids, is_traced
from longspan.maskinfo.debug import trace_methods
from longspan.maskinfo.ids import check_offsets, check_total, from_offsets
from longspan.maskinfo.picture import Pictures
from longspan.maskinfo.rules import Rules
from longspan.maskinfo.sharding import Shardings
from longspan.maskinfo.views import Views
from longspan.masks import Full

KEEP: Any = object()
AXES = ("batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name")


@dataclass(frozen=True, eq=False, repr=False)
class MaskInfo(Constructors, Rules, Views, Shardings, Pictures):
    """The mask of a batch: one rule, and every representation of it.

    Inside are a symbolic `mask` and the ids and positions of the batch's tokens, so memory grows with the number of
    tokens; a dense mask exists only while someone asks for one. Objects never change: `apply_...` and `replace` return
    new ones. They are pytrees, and work under jit, vmap, grad, scan, cond, remat and shard_map.

    Documents and padding (`from_segments`) are one rule, and hold whatever is applied later. Causal, window and chunk
    rules compare positions where `q_positions`, `kv_positions` [B, L] are given, slots elsewhere. Ids, as
    `q_segment_ids`, name documents, chunks and padding; they do not say the whole rule.

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
        """A copy with some fields changed; what is not named stays, `None` clears.

        Only a new `attention_mask` takes more with it: documents, padding and all that was applied.

        Args:
            attention_mask: the whole rule from now on, as in `from_attention_mask`; the ids are those of the new mask,
                unless they are named too. Positions stay if the sizes do. None: only documents and padding stay.
            q_segment_ids: new documents; all other rules stay. None: one document without padding.
            kv_segment_ids: likewise, of the keys.
            cu_seqlens_q: new documents as cumulative lengths, for one packed row. They are never stored: None does
                nothing.
            cu_seqlens_kv: likewise, of the keys.
            q_positions: new positions; None: slots.
            kv_positions: likewise, of the keys.
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
                f"replace() got {unknown[0]!r}. Fields: attention_mask, q_segment_ids, kv_segment_ids, cu_seqlens_q, "
                f"cu_seqlens_kv, q_positions, kv_positions, {', '.join(AXES)}."
            )
        check_axis_names(**axis_names)
        info = self._with(**axis_names)
        if attention_mask is None:
            info = info._with(_rule=Full(), _applied=(), _has_documents=True)
        elif attention_mask is not KEEP:
            info = info._with_attention_mask(attention_mask)
        q_ids, kv_ids = (
            _from_lengths(f"cu_seqlens_{side}", offsets, length) if _is_given(offsets) and not _is_given(ids) else ids
            for side, ids, offsets, length in (
                ("q", q_segment_ids, cu_seqlens_q, self.q_len),
                ("kv", kv_segment_ids, cu_seqlens_kv, self.kv_len),
            )
        )
        info = info._with_documents(q_ids, kv_ids)
        return info._with_positions(q_positions, kv_positions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskInfo):
            return NotImplemented
        (mine, my_tree), (theirs, their_tree) = jax.tree.flatten(self), jax.tree.flatten(other)
        if any(map(is_traced, (*mine, *theirs))):
            raise TypeError(
                "== compares the values of two MaskInfos, which are not known while tracing. Compare them outside jit, "
                "or compare arrays, e.g. `jnp.all(a.attention_mask == b.attention_mask)`."
            )
        return my_tree == their_tree and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def __hash__(self) -> int:
        raise TypeError(
            "A MaskInfo holds arrays, and arrays do not hash. Pass it to jit as an ordinary argument (it is a pytree), "
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
        same = new.shape == self.shape
        positions = dict(q_positions=self.q_positions, kv_positions=self.kv_positions) if same else {}
        return new._with(**axes, **positions, _dtype=self._dtype)

    @no_type_check
    def _with_documents(self, q_ids, kv_ids) -> Self:
        if q_ids is KEEP and kv_ids is KEEP:
            return self
        batch, q_len, kv_len = self.shape
        q_ids, kv_ids = (
            old if new is KEEP else np.zeros((batch, length), np.int32) if new is None else new
            for new, old, length in ((q_ids, self._q_documents, q_len), (kv_ids, self._kv_documents, kv_len))
        )
        q_ids, kv_ids = check_ids(q_ids, kv_ids)
        if (q_ids.shape[0], q_ids.shape[1], kv_ids.shape[1]) != self.shape:
            got = f"{tuple(q_ids.shape)} and {tuple(kv_ids.shape)}"
            raise ValueError(
                f"replace() keeps the sizes: ids must have shapes ({batch}, {q_len}) and ({batch}, {kv_len}), got "
                f"{got}. For other sizes make a new MaskInfo with `from_segments`."
            )
        return self._with(_q_documents=q_ids, _kv_documents=kv_ids, _q_names=None, _kv_names=None, _has_documents=True)

    @no_type_check
    def _with_positions(self, q_positions, kv_positions) -> Self:
        given = (("q_positions", q_positions, self.q_len), ("kv_positions", kv_positions, self.kv_len))
        return self._with(
            **{
                name: as_positions(name, positions, length, self.batch_size)
                for name, positions, length in given
                if positions is not KEEP
            }
        )


def _is_given(value: Any) -> bool:
    return value is not KEEP and value is not None


def _from_lengths(name: str, offsets: Any, length: int):
    offsets = check_offsets(name, offsets)
    return from_offsets(offsets, check_total(name, length, offsets))


jax.tree_util.register_dataclass(MaskInfo)
trace_methods(MaskInfo)
