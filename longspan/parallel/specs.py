"""The sharding of a call's arrays on a mesh: which axis of each array is split over which mesh axes."""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from longspan.axes import axis_names
from longspan.biases import Bias, terms
from longspan.masks import Mask
from longspan.masks.base import SLOT
from longspan.masks.pytree import axes_of


@dataclass(frozen=True)
class Axes:
    """The mesh axes that split the batch, the heads and the sequence."""

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    sequence: str

    @classmethod
    def of(cls, mesh: Any, axis: str, batch_axes: Any, head_axis: Any) -> "Axes":
        """The given names that the mesh has; the axis of the sequence is required."""
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(
                f"`mesh` must be a jax.sharding.Mesh, as from `ls.parallel.mesh`, got {type(mesh).__name__}."
            )
        if axis not in mesh.axis_names:
            listed = ", ".join(repr(name) for name in mesh.axis_names)
            raise ValueError(
                f"axis={axis!r} is not in the mesh, whose axes are {listed}. Name the axis that shards the sequence."
            )
        batch = tuple(name for name in axis_names("batch_axes", batch_axes) if name in mesh.axis_names)
        heads = tuple(name for name in axis_names("head_axis", head_axis) if name in mesh.axis_names)
        twice = {name for name in (*batch, *heads, axis) if (*batch, *heads, axis).count(name) > 1}
        if twice:
            raise ValueError(
                f"The mesh axis {sorted(twice)[0]!r} is named twice in `axis`, `batch_axes` and `head_axis`. Name "
                "it once."
            )
        return cls(mesh, batch, heads, axis)

    def count(self, names: tuple[str, ...]) -> int:
        return int(np.prod([self.mesh.shape[name] for name in names], dtype=np.int64))

    @property
    def shards(self) -> int:
        return self.mesh.shape[self.sequence]

    @property
    def numbered(self) -> bool:
        """Whether devices hold different batch rows or heads."""
        return self.count((*self.batch, *self.heads)) > 1

    def repeats(self, kv_heads: int) -> int:
        """The number of times that key/value heads are repeated, so that they can be split like the query heads."""
        parts = self.count(self.heads)
        if kv_heads % parts == 0:
            return 1
        return int(np.lcm(kv_heads, parts)) // kv_heads

    def spec(self, letters: str, shape: tuple[int, ...]) -> P:
        """The spec of an array whose axes are these letters; "t" is the sequence, and axes of size 1 are not split."""
        names = {"B": self.batch, "N": self.heads, "t": (self.sequence,)}
        entries: list[tuple[str, ...] | None] = []
        for letter, size in zip(letters, shape, strict=True):
            split = names.get(letter, ()) if size > 1 else ()
            entries.append(split or None)
        return P(*entries)

    def explicit(self, spec: P) -> P:
        """The spec without mesh axes that are not explicit, as in the types of arrays."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        entries: list[tuple[str, ...] | None] = []
        for entry in spec:
            names = (entry,) if isinstance(entry, str) else entry or ()
            entries.append(tuple(name for name in names if kinds[name] == AxisType.Explicit) or None)
        return P(*entries)

    def number(self, names: tuple[str, ...]) -> Any:
        """The number of this device along some mesh axes; inside `shard_map`."""
        if not names:
            return jnp.zeros((), np.int32)
        return jax.lax.axis_index(names).astype(np.int32)


def rule_specs(axes: Axes, rule: Bias) -> Any:
    """The spec of each array of a `Bias`: batch rows and heads are split, the sequence is not.

    Arrays of unknown axes are replicated; rules read them by the indices of rows and heads.
    """
    leaves, tree = jax.tree.flatten(rule)
    return tree.unflatten([axes.spec(names, np.shape(leaf)) for names, leaf in zip(axes_of(rule), leaves, strict=True)])


def as_data(mask: Mask) -> Mask:
    """The mask in which tables with an axis of heads are arrays that can be sharded, not constants."""
    parts = mask.parts()
    if parts:
        return mask.with_parts([as_data(part) for part in parts])
    tables = {
        name: jnp.asarray(getattr(mask, name))
        for name, letters in type(mask).array_axes.items()
        if isinstance(getattr(mask, name), np.ndarray) and "N" in letters
    }
    if not tables:
        return mask
    return replace(cast(Any, mask), **tables)


def rule_by_slot(mask: Mask) -> Mask | None:
    """A rule of the mask that reads slots other than by token, and so is wrong in another order; None if none does."""
    return next((part for part in mask.walk() if not part.parts() and SLOT in part.reads and not part.by_token), None)


def check_zigzag(mask: Mask, bias: Any = None) -> None:
    """The mask and the bias have no rules by slot."""
    bad = rule_by_slot(mask)
    if bad is not None:
        raise ValueError(
            f"order='zigzag' moves tokens to other slots, but {bad!r} depends on the slots. Use order='contiguous', "
            "or a rule that compares positions or ids."
        )
    for term in terms(bias):
        if not isinstance(term, Bias) and min(term.shape[2:]) > 1:
            raise ValueError(
                f"order='zigzag' moves tokens to other slots, but a bias of shape {tuple(term.shape)} depends on the "
                "slots. Use order='contiguous', or a `Bias`, which is computed from positions."
            )
