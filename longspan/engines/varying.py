"""What `shard_map` wants to know of loop carries, foreign calls and gradients: along which mesh axes they vary."""

import jax


def varying_axes(*trees) -> frozenset[str]:
    """The mesh axes of an enclosing `shard_map` along which any of the arrays varies."""
    kinds = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(trees)]
    return frozenset().union(*(kind.varying for kind in kinds))


def vary(tree, axes: frozenset[str]):
    """The same arrays, marked as varying along `axes`. Its transpose sums gradients over the axes it added."""

    def mark(x):
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)
