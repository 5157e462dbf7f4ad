"""How the operands of a call are laid out on a mesh: which axis of each array is split, and over which devices."""

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
    """The axes of a mesh by what they split."""

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    sequence: str

    @classmethod
    def of(cls, mesh: Any, axis: str, batch_axes: Any, head_axis: Any) -> "Axes":
        """Of the names given, those that the mesh has; the sequence's must be there."""
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(
                f"`mesh` must be a jax.sharding.Mesh, as `ls.parallel.mesh` makes, got {type(mesh).__name__}."
            )
        if axis not in mesh.axis_names:
            listed = ", ".join(repr(name) for name in mesh.axis_names)
            raise ValueError(f"axis={axis!r} is not in the mesh, whose axes are {listed}. Name the one that shares T.")
        given = axis_names("batch_axes", batch_axes), axis_names("head_axis", head_axis)
        batch, heads = (tuple(name for name in names if name in mesh.axis_names) for names in given)
        twice = {name for name in (*batch, *heads, axis) if (*batch, *heads, axis).count(name) > 1}
        if twice:
            raise ValueError(
                f"The mesh axis {sorted(twice)[0]!r} is named twice, as `axis`, `batch_axes` or `head_axis`."
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
        """How often key/value heads are repeated, so that they can be split like the heads."""
        parts = self.count(self.heads)
        return 1 if kv_heads % parts == 0 else int(np.lcm(kv_heads, parts)) // kv_heads

    def spec(self, letters: str, shape: tuple[int, ...]) -> P:
        """Of an array whose axes are these letters, t being the sequence; an axis of size 1 stands for all."""
        names = {"B": self.batch, "N": self.heads, "t": (self.sequence,)}
        return P(
            *(names.get(letter, ()) or None if size > 1 else None for letter, size in zip(letters, shape, strict=True))
        )

    def explicit(self, spec: P) -> P:
        """The part of a spec that types say: of axes that are explicit."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
        kept = (tuple(name for name in names if kinds[name] == AxisType.Explicit) for names in entries)
        return P(*(names or None for names in kept))

    def number(self, names: tuple[str, ...]) -> Any:
        """The number of this device among those that split an axis; inside `shard_map`."""
        return jax.lax.axis_index(names).astype(np.int32) if names else jnp.zeros((), np.int32)


def rule_specs(axes: Axes, rule: Bias) -> Any:
    """A spec for every array of a bias: batch rows and heads are split, the sequence is not.

    Arrays whose axes nobody knows are whole everywhere; rules read them by the numbers of rows and heads.
    """
    leaves, tree = jax.tree.flatten(rule)
    return tree.unflatten([axes.spec(names, np.shape(leaf)) for names, leaf in zip(axes_of(rule), leaves, strict=True)])


def as_data(mask: Mask) -> Mask:
    """The mask, where tables that tell heads or rows apart are arrays that can be split, not constants."""
    parts = mask.parts()
    if parts:
        return mask.with_parts([as_data(part) for part in parts])
    tables = {
        name: jnp.asarray(getattr(mask, name))
        for name, letters in type(mask).array_axes.items()
        if isinstance(getattr(mask, name), np.ndarray) and "N" in letters
    }
    return replace(cast(Any, mask), **tables) if tables else mask


def about_slots(mask: Mask) -> Mask | None:
    """A rule of the mask that is told by slots, not by tokens, and means nothing in another order; None: no such."""
    return next((part for part in mask.walk() if not part.parts() and SLOT in part.reads and not part.by_token), None)


def check_zigzag(mask: Mask, bias: Any = None) -> None:
    """Nothing that is told by slots."""
    bad = about_slots(mask)
    if bad is not None:
        raise ValueError(
            f"order='zigzag' moves tokens to other slots, and {bad!r} is about slots. Use order='contiguous', or a "
            "rule by position or by ids."
        )
    for term in terms(bias):
        if not isinstance(term, Bias) and min(term.shape[2:]) > 1:
            raise ValueError(
                f"order='zigzag' moves tokens to other slots, and a bias of shape {tuple(term.shape)} is about slots. "
                "Use order='contiguous', or a `Bias` by position."
            )
