"""The fields of a `MaskInfo`: a rule, and the arrays of a batch. Everything else is derived from them."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import no_type_check
from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.checks import check_positions, to_int32
from longspan.masks import Full, Mask, Segments
from longspan.masks.cut import Kept, gather

QHEADS_AXIS, KVHEADS_AXIS, SEQUENCE_AXIS = HEAD_AXIS, HEAD_AXIS, "sp"

AxisName = str | tuple[str, ...] | None
STATIC = dict(static=True)


@dataclass(frozen=True, eq=False, repr=False)
class BoundMask:
    """A rule and the arrays of a batch, all with a leading batch axis. `MaskInfo` documents the public fields."""

    _rule: Mask  # the mask without documents and padding
    _q_documents: Any  # int32 [B, T]; negative is padding
    _kv_documents: Any  # int32 [B, S]
    _q_ids: Any = None  # int32 [B, T]: segment ids, if they differ from the documents (chunks, types)
    _kv_ids: Any = None
    q_positions: Any = None  # int32 [B, T], if given
    kv_positions: Any = None
    _has_documents: bool = field(default=True, metadata=STATIC)  # whether the documents restrict anything
    _applied: tuple[str, ...] = field(default=(), metadata=STATIC)
    _dtype: Any = field(default=np.dtype(bool), metadata=STATIC)
    batch_axis_name: AxisName = field(default=BATCH_AXES, metadata=STATIC)
    qheads_axis_name: AxisName = field(default=QHEADS_AXIS, metadata=STATIC)
    kvheads_axis_name: AxisName = field(default=KVHEADS_AXIS, metadata=STATIC)
    sequence_axis_name: AxisName = field(default=SEQUENCE_AXIS, metadata=STATIC)

    @classmethod
    @no_type_check
    def _bind(cls, rule: Mask, q_documents, kv_documents, q_positions=None, kv_positions=None, **static: Any) -> Self:
        """A new object. The ids are already checked; positions and axis names are checked here."""
        check_axis_names(**{name: value for name, value in static.items() if name.endswith("_axis_name")})
        batch = q_documents.shape[0]
        return cls(
            rule,
            q_documents,
            kv_documents,
            q_positions=as_positions("q_positions", q_positions, q_documents.shape[1], batch),
            kv_positions=as_positions("kv_positions", kv_positions, kv_documents.shape[1], batch),
            **static,
        )

    @property
    def mask(self) -> Mask:
        """The rule as a `Mask`: documents, padding and all applied rules.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1]])).apply_causal().mask
            Segments(i32[1,4], i32[1,4]) & Causal()
        """
        if not self._has_documents:
            return self._rule
        documents = Segments(self._q_documents, self._kv_documents)
        if isinstance(self._rule, Full):
            return documents
        return documents & self._rule

    @property
    def batch_size(self) -> int:
        """The number of batch rows, B.

        Example:
            >>> ls.MaskInfo.from_segments(np.zeros((2, 3), int)).batch_size
            2
        """
        return self._q_documents.shape[0]

    @property
    def q_len(self) -> int:
        """The number of queries, T.

        Example:
            >>> ls.MaskInfo.from_segments(np.zeros((2, 3), int)).q_len
            3
        """
        return self._q_documents.shape[1]

    @property
    def kv_len(self) -> int:
        """The number of keys, S.

        Example:
            >>> ls.MaskInfo.from_segments(np.zeros((2, 3), int), np.zeros((2, 5), int)).kv_len
            5
        """
        return self._kv_documents.shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, T, S).

        Example:
            >>> ls.MaskInfo.from_segments(np.zeros((2, 3), int)).shape
            (2, 3, 3)
        """
        return self.batch_size, self.q_len, self.kv_len

    @property
    def q_segment_ids(self) -> Any:
        """int32 [B, T]: the document, chunk or type of each query; -1 is padding.

        Example:
            >>> ls.MaskInfo.from_attention_mask(np.array([[1, 1, 0]])).q_segment_ids.tolist()
            [[0, 0, -1]]
        """
        return self._q_documents if self._q_ids is None else self._q_ids

    @property
    def kv_segment_ids(self) -> Any:
        """int32 [B, S]: the document, chunk or type of each key; -1 is padding.

        Example:
            >>> ls.MaskInfo.from_attention_mask(np.array([[1, 1, 0]])).kv_segment_ids.tolist()
            [[0, 0, -1]]
        """
        return self._kv_documents if self._kv_ids is None else self._kv_ids

    @no_type_check
    def _with(self, **fields: Any) -> Self:
        return replace(self, **fields)

    @no_type_check
    def _add(self, rule: Mask, applied: str, **fields: Any) -> Self:
        """The intersection with one more rule."""
        if not isinstance(self._rule, Full):
            rule = self._rule & rule
        return self._with(_rule=rule, _applied=self._marked(applied), **fields)

    def _marked(self, applied: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._applied, applied)))

    @no_type_check
    def _cut(self, q: Kept, kv: Kept) -> Self:
        """The same mask for some slots of each side, [B, kept] or None for all. Tokens keep their positions."""
        return self._with(
            _rule=self._rule.cut(q, kv, q_len=self.q_len, kv_len=self.kv_len),
            _q_documents=gather(self._q_documents, q),
            _kv_documents=gather(self._kv_documents, kv),
            _q_ids=gather(self._q_ids, q),
            _kv_ids=gather(self._kv_ids, kv),
            q_positions=_kept_positions(self.q_positions, q),
            kv_positions=_kept_positions(self.kv_positions, kv),
        )

    def _rule_positions(self) -> tuple[Any, Any]:
        """The positions [B, T] and [B, S] that rules compare: the given ones, by default the slots."""
        q = _positions_or_slots(self.q_positions, self.batch_size, self.q_len)
        kv = _positions_or_slots(self.kv_positions, self.batch_size, self.kv_len)
        return q, kv


def as_positions(name: str, positions: Any, length: int, batch: int) -> jax.Array | None:
    """Checked positions as int32 [B, L]; None stays None."""
    if positions is None:
        return None
    if not hasattr(positions, "dtype"):
        positions = np.asarray(positions)
    check_positions(name, positions, length, batch)
    positions = to_int32(positions, jnp)
    if positions.ndim == 1:
        positions = positions[None]
    return jnp.broadcast_to(positions, (batch, length))


def _kept_positions(positions: Any, slots: Any) -> Any:
    """The positions of kept slots; without given positions, the numbers that the slots had."""
    if slots is None:
        return positions
    if positions is None:
        return slots
    return gather(positions, slots)


def _positions_or_slots(positions: Any, batch: int, length: int) -> Any:
    if positions is not None:
        return positions
    return jnp.broadcast_to(jnp.arange(length, dtype=np.int32).reshape(1, -1), (batch, length))


def check_axis_names(**names: Any) -> None:
    """Raises a TypeError unless each value is the name of a mesh axis, a tuple of names, or None."""
    for name, value in names.items():
        axes = value if isinstance(value, tuple) else (value,)
        if not all(a is None or isinstance(a, str) for a in axes):
            raise TypeError(f"{name} must be the name of a mesh axis, a tuple of names or None, got {value!r}.")
