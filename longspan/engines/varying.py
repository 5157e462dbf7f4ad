"""The mesh axes along which arrays vary inside `shard_map`, which loops, foreign calls and gradients must name."""

import jax


def varying_axes(*trees) -> frozenset[str]:
    """The mesh axes of the enclosing `shard_map` along which any of the arrays varies."""
    kinds = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(trees)]
    return frozenset().union(*(kind.varying for kind in kinds))


def vary(tree, axes: frozenset[str]):
    """The same arrays, marked as varying along `axes`. Its transpose sums gradients over the axes it added."""

    def mark(x):
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        if not missing:
            return x
        return jax.lax.pcast(x, missing, to="varying")

    return jax.tree.map(mark, tree)
