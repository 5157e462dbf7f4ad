"""A bounded cache of compiled programs for user functions: the programs of the last 32 functions are kept.

`Custom` and `ScoreBias` make a Python function part of the compiled program, and JAX keeps every program it compiled.
Without a bound, a loop that makes a new lambda per call would keep megabytes for each call.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Any

import jax

from longspan.masks.pytree import Value

KEPT = 32  # per jitted function of Longspan: the number of sets of user functions whose programs are kept


def jit_by_function(run: Callable, kept: int = KEPT, **options: Any) -> Callable:
    """`jax.jit(run, **options)` that compiles separately for each set of user functions in its arguments.

    The programs of the last `kept` sets of functions are kept; older ones are freed.

    Example:
        >>> double = jit_by_function(lambda mask, x: 2 * x)
        >>> [int(double(ls.Custom(lambda q, k: q >= k), 3)) for _ in range(2)]
        [6, 6]
    """
    without_functions = jax.jit(run, **options)

    # JAX keeps a program as long as the jitted function exists. Each set of user functions therefore gets a copy of
    # `run`: when the copy leaves this cache, its programs are freed with it.
    @lru_cache(maxsize=kept)
    def jit_copy(functions: tuple[Callable, ...]) -> Callable:
        @wraps(run)
        def copy(*args, **named):
            return run(*args, **named)

        return jax.jit(copy, **options)

    @wraps(run)
    def call(*args, **named):
        functions = tuple(users_functions((args, named)))
        if functions:
            return jit_copy(functions)(*args, **named)
        return without_functions(*args, **named)

    call.cache_info = jit_copy.cache_info  # type: ignore[attr-defined]
    return call


def users_functions(tree: Any) -> Iterator[Callable]:
    """Yields the user functions in the static structure of the masks and biases in a tree.

    Example:
        >>> [f.__name__ for f in users_functions((1, ls.Causal() & ls.Custom(lambda q, k: q > k)))]
        ['<lambda>']
    """
    if tree is None:
        return
    flat = jax.tree_util.default_registry.flatten_one_level(tree)
    if flat is None:
        return
    children, structure = flat
    if isinstance(tree, Value):
        fields = [value for _, value in structure[1]]
        tuples = [item for value in fields if isinstance(value, tuple) for item in value]
        yield from (value for value in (*fields, *tuples) if callable(value))
    for child in children:
        yield from users_functions(child)
