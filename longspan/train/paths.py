"""Names of the arrays in a tree of parameters or of optimizer state."""

from typing import Any


def names_of(path: Any) -> list[str]:
    """The parts of a path from `jax.tree_util`, as text.

    Example:
        >>> tree = dict(up=dict(kernel=1))
        >>> [names_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        [['up', 'kernel']]
    """
    names = [str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path]
    # The last part of a path into an NNX variable, which every variable has.
    if len(names) > 1 and names[-1] == "value":
        names.pop()
    return names
