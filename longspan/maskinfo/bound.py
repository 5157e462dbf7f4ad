"""What a `MaskInfo` holds: a rule, and the arrays of the batch that it is bound to. Everything else is derived."""

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
class Bound:
    """A rule and a batch. All arrays have a leading axis of the batch; every field is documented in `MaskInfo`."""

    _rule: Mask  # all but documents and padding
    _q_documents: Any  # int32 [B, T]; negative is padding
    _kv_documents: Any  # int32 [B, S]
    _q_names: Any = None  # int32 [B, T]: ids where they name more than the documents (chunks, types)
    _kv_names: Any = None
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
        """A new object from arrays that were checked, and positions and names that were not."""
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
        """The rule as a `Mask`: documents, padding and everything applied.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, 1, -1]])).apply_causal().mask
            Segments(i32[1,4], i32[1,4]) & Causal()
        """
        if not self._has_documents:
            return self._rule
        documents = Segments(self._q_documents, self._kv_documents)
        return documents if isinstance(self._rule, Full) else documents & self._rule

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
        """int32 [B, T]: which document, chunk or type each query belongs to; -1 is padding.

        Example:
            >>> ls.MaskInfo.from_attention_mask(np.array([[1, 1, 0]])).q_segment_ids.tolist()
            [[0, 0, -1]]
        """
        return self._q_documents if self._q_names is None else self._q_names

    @property
    def kv_segment_ids(self) -> Any:
        """int32 [B, S]: which document, chunk or type each key belongs to; -1 is padding.

        Example:
            >>> ls.MaskInfo.from_attention_mask(np.array([[1, 1, 0]])).kv_segment_ids.tolist()
            [[0, 0, -1]]
        """
        return self._kv_documents if self._kv_names is None else self._kv_names

    @no_type_check
    def _with(self, **fields: Any) -> Self:
        return replace(self, **fields)

    @no_type_check
    def _add(self, rule: Mask, applied: str, **fields: Any) -> Self:
        """One more rule that must hold."""
        both = rule if isinstance(self._rule, Full) else self._rule & rule
        return self._with(_rule=both, _applied=self._marked(applied), **fields)

    def _marked(self, applied: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._applied, applied)))

    @no_type_check
    def _cut(self, q: Kept, kv: Kept) -> Self:
        """The same for some slots of each side, [B, kept] or None for all. Tokens keep their positions."""
        q_positions, kv_positions = (
            given if slots is None else slots if given is None else gather(given, slots)
            for given, slots in ((self.q_positions, q), (self.kv_positions, kv))
        )
        return self._with(
            _rule=self._rule.cut(q, kv, q_len=self.q_len, kv_len=self.kv_len),
            _q_documents=gather(self._q_documents, q),
            _kv_documents=gather(self._kv_documents, kv),
            _q_names=gather(self._q_names, q),
            _kv_names=gather(self._kv_names, kv),
            q_positions=q_positions,
            kv_positions=kv_positions,
        )

    def _rule_positions(self) -> tuple[Any, Any]:
        """[B, T] and [B, S]: what the rules compare, the given positions or else the slots."""
        q, kv = (
            jnp.broadcast_to(jnp.arange(length, dtype=np.int32).reshape(1, -1), (self.batch_size, length))
            if given is None
            else given
            for given, length in ((self.q_positions, self.q_len), (self.kv_positions, self.kv_len))
        )
        return q, kv


def as_positions(name: str, positions: Any, length: int, batch: int) -> jax.Array | None:
    """Given positions, checked, as int32 [B, L]."""
    if positions is None:
        return None
    positions = positions if hasattr(positions, "dtype") else np.asarray(positions)
    check_positions(name, positions, length, batch)
    positions = to_int32(positions, jnp)
    return jnp.broadcast_to(positions[None] if positions.ndim == 1 else positions, (batch, length))


def check_axis_names(**names: Any) -> None:
    """Names of mesh axes: a name, a tuple of names, or None."""
    for name, value in names.items():
        axes = value if isinstance(value, tuple) else (value,)
        if not all(a is None or isinstance(a, str) for a in axes):
            raise TypeError(f"{name} must be the name of a mesh axis, a tuple of names or None, got {value!r}.")
