"""Programs compiled for users' functions: those of the 32 functions used last are kept, and no others.

`Custom` and `ScoreBias` make a Python function part of what is compiled, and JAX keeps every program that it compiled.
A loop that makes a new lambda per call would compile at each step and keep megabytes of each, without end.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Any

import jax

from longspan.masks.pytree import Value

KEPT = 32  # sets of users' functions whose programs are kept, per jitted function of ours


def jit_by_function(run: Callable, kept: int = KEPT, **options: Any) -> Callable:
    """`jax.jit(run, **options)`, with programs of their own for the users' functions in its arguments.

    The programs of the `kept` sets of functions used last exist; the others are freed.

    Example:
        >>> double = jit_by_function(lambda mask, x: 2 * x)
        >>> [int(double(ls.Custom(lambda q, k: q >= k), 3)) for _ in range(2)]
        [6, 6]
    """
    for_all = jax.jit(run, **options)

    # JAX keeps programs by the function that was jitted, as long as that exists. So those of a copy go with the copy.
    @lru_cache(maxsize=kept)
    def for_these(functions: tuple[Callable, ...]) -> Callable:
        @wraps(run)
        def copy(*args, **named):
            return run(*args, **named)

        return jax.jit(copy, **options)

    @wraps(run)
    def call(*args, **named):
        functions = tuple(users_functions((args, named)))
        return (for_these(functions) if functions else for_all)(*args, **named)

    call.cache_info = for_these.cache_info  # type: ignore[attr-defined]
    return call


def users_functions(tree: Any) -> Iterator[Callable]:
    """The functions that are part of the structure of masks and biases in a tree.

    Example:
        >>> [f.__name__ for f in users_functions((1, ls.Causal() & ls.Custom(lambda q, k: q > k)))]
        ['<lambda>']
    """
    flat = None if tree is None else jax.tree_util.default_registry.flatten_one_level(tree)
    if flat is None:
        return
    children, structure = flat
    if isinstance(tree, Value):
        fields = [value for _, value in structure[1]]
        tuples = [item for value in fields if isinstance(value, tuple) for item in value]
        yield from (value for value in (*fields, *tuples) if callable(value))
    for child in children:
        yield from users_functions(child)
