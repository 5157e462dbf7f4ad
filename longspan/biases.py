"""Biases that are computed from positions, tile by tile: no T×S array is ever built.

`Bias.at` computes the values that are added to the scores of some slots. A bias that depends only on the head and the
distance k − q also defines `by_distance`, which lets the cpu kernel compute it.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from longspan.array_types import Array, no_type_check
from longspan.checks import FLOATS, check_broadcast, check_static_size, is_array, is_known
from longspan.masks.checks import counted, parameter_forms
from longspan.masks.pytree import Value, rule, short
from longspan.masks.sides import Slots, two_sides


@no_type_check
def alibi(slopes: Float[Array, "N"]) -> "Bias":
    """The bias −slope·|q − k| of ALiBi (arXiv:2108.12409), with one slope per query head; q and k are positions.

    Gradients reach the slopes.

    Args:
        slopes: finite floats [N]. The paper's, for N a power of two, are 2^(−8·n/N) for n = 1 … N.

    Example:
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> ls.attention(q, k, v, mask=ls.Causal(), bias=ls.alibi(2.0 ** jnp.array([-4.0, -8.0]))).shape
        (1, 8, 2, 4)

    Differs from the paper, which assumes causal masks, where |q − k| = q − k. Here a key at some distance after the
    query gets the same bias as the key at that distance before the query.
    """
    _check_floats("slopes", slopes, 1, "[N], one per query head")
    if is_known(slopes) and not np.isfinite(np.asarray(slopes, np.float64)).all():
        raise ValueError(f"`slopes` must be finite, got {np.asarray(slopes, np.float64)}. To mask keys, use `mask`.")
    return Alibi(slopes)


@no_type_check
def relative_bias(table: Float[Array, "buckets N"], *, bidirectional: bool = True, max_distance: int = 128) -> "Bias":
    """The bias table[bucket(k − q), head] of T5 (arXiv:1910.10683); q and k are positions.

    In each direction, half of the buckets hold one distance each. The other half grow logarithmically up to
    `max_distance`; the last bucket also holds all larger distances. Gradients reach the table.

    Args:
        table: floats [buckets, N]; −inf is a masked key.
        bidirectional: whether keys before and after the query have separate buckets; if not, all keys after the query
            share the first bucket.
        max_distance: the last bucket begins at this distance or before it.

    Example:
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> ls.attention(q, k, v, bias=ls.relative_bias(jnp.zeros((32, 2)))).shape
        (1, 8, 2, 4)
    """
    _check_floats("table", table, 2, "[buckets, N], one column per query head")
    if is_known(table) and np.isnan(np.asarray(table, np.float64)).any():
        raise ValueError(
            "`table` contains NaN, which would make every score of that bucket NaN. Replace it with a number."
        )
    if not isinstance(bidirectional, bool):
        raise TypeError(f"`bidirectional` must be a Python bool, got {bidirectional!r}.")
    least, directions = 2, "one direction"
    if bidirectional:
        least, directions = 4, "two directions"
    exact = table.shape[0] // least
    if exact < 1:
        raise ValueError(
            f"`table` must have at least {least} buckets for {directions}, got shape {tuple(table.shape)}."
        )
    max_distance = check_static_size("max_distance", max_distance, 1)
    if max_distance <= exact:
        raise ValueError(
            f"`max_distance` must be greater than {exact}, got {max_distance}. With {table.shape[0]} buckets, "
            f"each distance below {exact} has its own bucket, and larger distances share the other buckets."
        )
    return Relative(table, bidirectional, max_distance)


class Distances(NamedTuple):
    """−slopes[n]·|k − q| + table[n, clip(k − q, −reach, reach) + reach]; slopes or table may be None."""

    slopes: Any = None  # [N]
    table: Any = None  # [N, 2·reach + 1]

    def at(self, q: Slots, kv: Slots, dtype):
        ahead, parts = kv.position - q.position, []
        if self.slopes is not None:
            slopes = q.table(self.slopes).astype(dtype)
            if _in_order(q, slopes):
                slopes = slopes.reshape(1, -1, 1, 1)
            else:
                slopes = slopes[q.side.heads_of(len(slopes))]
            parts.append(-slopes * abs(ahead).astype(dtype))
        if self.table is not None:
            table, reach = q.table(self.table).astype(dtype), self.table.shape[1] // 2
            place = jnp.clip(ahead, -reach, reach) + reach
            if _in_order(q, table):
                parts.append(jnp.take(table, place[:, 0], axis=1).swapaxes(0, 1))
            else:
                parts.append(table[q.side.heads_of(len(table)), place])
        return sum(parts[1:], start=parts[0])

    def fits(self, heads: int) -> bool:
        """Whether slopes and table have the right shapes for this number of heads."""
        slopes = self.slopes is None or self.slopes.shape == (heads,)
        table = self.table is None or (self.table.ndim == 2 and self.table.shape[1] % 2 == 1)
        given = [x.shape[0] for x in self if x is not None]
        return slopes and table and given != [] and set(given) == {heads}


class Bias(Value):
    """A term that is added to the scores after the soft cap, computed from positions in each visited tile.

    `attention(..., bias=)` takes a bias, an array, or a tuple of them, which are summed. A bias is a pytree whose
    leaves are its arrays: they may be traced and have gradients, and new arrays never retrace.

    Subclass with `longspan.masks.rule` and define `at`. If the bias depends only on the head and k − q, define
    `by_distance` instead: then `engine="cpu"` supports it too.

    Example:
        >>> isinstance(ls.alibi(jnp.ones(2)), ls.Bias)
        True
    """

    def at(self, q: Slots, kv: Slots, dtype: Any) -> Any:
        """The values added to the scores of each pair of slots, of rank 4, in `dtype`."""
        distances = self.by_distance()
        if distances is None:
            raise NotImplementedError(f"{type(self).__name__} must define `at(q, kv, dtype)` or `by_distance()`.")
        return distances.at(q, kv, dtype)

    def by_distance(self) -> Distances | None:
        """The same values as a function of head and k − q; None if they depend on more."""
        return None

    def check(self, shape: tuple[int, int, int, int]) -> None:
        """Raises if the bias does not fit a call of [B, N, T, S]."""
        B, N, T, S = shape
        distances = jax.eval_shape(lambda bias: bias.by_distance(), self)
        if distances is not None and not distances.fits(N):
            got = ", ".join(f"{name} {x.shape}" for name, x in distances._asdict().items() if x is not None)
            raise ValueError(
                f"{self!r}.by_distance() returned {got or 'nothing'}. It must return slopes [N], a table [N, 2·reach "
                f"+ 1] or both, and the call has N = {N} query heads."
            )

        def values(bias):
            return bias.at(*(side.slots() for side in two_sides(T, S, batch=B, heads=N)), np.float32)

        got = jax.eval_shape(values, self)
        if got.ndim != 4 or any(n not in (1, m) for n, m in zip(got.shape, shape, strict=True)):
            raise ValueError(
                f"{self!r} gives values of shape {got.shape}, which must broadcast to [B, N, T, S] = {list(shape)}. "
                "Compute the values from the batch rows, heads and positions that the bias receives: these arrays "
                "have rank 4 and broadcast."
            )


@rule
class Alibi(Bias):
    """The bias of `alibi(slopes)`."""

    array_axes: ClassVar = {"slopes": "N"}

    slopes: Any

    def by_distance(self) -> Distances:
        return Distances(slopes=self.slopes)

    def check(self, shape):
        _check_heads("alibi", "slopes", self.slopes.shape[0], shape[1])


@rule
class Relative(Bias):
    """The bias of `relative_bias(table, ...)`."""

    array_axes: ClassVar = {"table": ".N"}

    table: Any
    bidirectional: bool = True
    max_distance: int = 128

    def by_distance(self) -> Distances:
        buckets = _buckets(self.table.shape[0], self.bidirectional, self.max_distance)
        return Distances(table=jnp.asarray(self.table)[buckets].T)

    def check(self, shape):
        _check_heads("relative_bias", "columns in its table", self.table.shape[1], shape[1])


@rule
class Whole(Bias):
    """A bias of all heads in a call that computes some of them. It has only `at`, which reads the head indices."""

    bias: Bias

    def at(self, q, kv, dtype):
        return self.bias.at(q, kv, dtype)


@rule
class ScoreBias(Bias):
    """Adds `fn(q, k, *arrays)` or `fn(b, h, q, k, *arrays)` to the scores.

    `q` and `k` are positions, `b` is the batch row and `h` the query head: int arrays of rank 4 that broadcast against
    each other. Rows and heads have their global indices on any sharding; under `vmap`, the indices within each mapped
    call. −inf is a masked key. Gradients reach the float arrays. `engine="xla"` and `"reference"` support it; `"cpu"`
    cannot call a Python function.

    `fn` is part of the compiled program, and a function equals only itself. Define it once, outside of loops, and pass
    values that change as `arrays`: then nothing is compiled again. A new lambda per call compiles at every call; the
    programs of the last 32 functions are kept.

    Args:
        fn: any traceable function. The number of its required positional parameters decides between the two forms.
        arrays: data of the function. Floats are passed as float32 (float64 for float64 queries); new values do not
            retrace. Pass traced values here: `engine="xla"` cannot differentiate or map a function that closes over
            one.

    Example:
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> nearer = ls.ScoreBias(lambda b, h, q, k, slopes: -slopes[h] * jnp.log1p(abs(q - k)), jnp.ones(2))
        >>> ls.attention(q, k, v, bias=(nearer, jnp.zeros((8, 8)))).shape
        (1, 8, 2, 4)
        >>> def slope(q, k, by):  # defined once
        ...     return -by * jnp.log1p(abs(q - k))
        >>> for by in (0.1, 0.2, 0.3):  # one program for all three
        ...     out = ls.attention(q, k, v, bias=ls.ScoreBias(slope, jnp.asarray(by)))
    """

    fn: Callable
    arrays: tuple = ()
    by_row: bool = False  # whether `fn` takes the batch row and the head

    @no_type_check
    def __init__(self, fn: Callable, *arrays):
        for place, array in enumerate(arrays):
            if not is_array(array):
                raise TypeError(
                    f"ScoreBias: `arrays[{place}]` must be an array, got {type(array).__name__}. Convert it with "
                    "`jnp.asarray`, or let `fn` close over static values."
                )
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "by_row", _leading_parameters(fn, len(arrays)) == 4)

    def at(self, q, kv, dtype):
        row_and_head = ()
        if self.by_row:
            row_and_head = (q.side.batch, q.side.head)
        arrays = [q.table(a) for a in self.arrays]
        # Always in one dtype: gradients are summed in it, and `fn` may give other values for narrower floats.
        arrays = [a.astype(dtype) if _is_float(a) else a for a in arrays]
        values = jnp.asarray(self.fn(*row_and_head, q.position, kv.position, *arrays))
        if values.dtype == bool:
            raise TypeError(
                f"{self!r} gives bools, but a bias is added to the scores. Use a `Custom` mask to allow or mask pairs."
            )
        if not jnp.issubdtype(values.dtype, np.floating) and not jnp.issubdtype(values.dtype, np.integer):
            raise TypeError(f"{self!r} must give real numbers, got {values.dtype}.")
        if values.ndim == 0:
            values = values.reshape(1, 1, 1, 1)
        return values.astype(dtype)

    def _arguments(self):
        return [getattr(self.fn, "__name__", repr(self.fn)), *map(short, self.arrays)]


Term: TypeAlias = Float[Array, "..."] | Bias
AnyBias: TypeAlias = Term | tuple[Term, ...]  # the type of `attention(..., bias=)`


def bound(bias: Any, shape: tuple[int, int, int, int]) -> Any:
    """Checks a bias for a call of [B, N, T, S], and returns it with arrays of rank 4; an empty tuple becomes None."""
    if bias is None:
        return None
    if isinstance(bias, tuple):
        return tuple(_bound(f"bias[{i}]", term, shape) for i, term in enumerate(bias)) or None
    return _bound("bias", bias, shape)


def terms(bias: Any) -> tuple[Any, ...]:
    """The arrays and `Bias` objects that are summed."""
    if bias is None:
        return ()
    if isinstance(bias, tuple):
        return bias
    return (bias,)


def map_terms(of: Callable[[Any], Any], bias: Any) -> Any:
    """The bias with `of` applied to each of its terms."""
    if bias is None:
        return None
    if isinstance(bias, tuple):
        return tuple(of(term) for term in bias)
    return of(bias)


def total(bias: Any, q: Slots, kv: Slots, dtype: Any) -> Any:
    """The sum of all terms for these slots, of rank 4."""
    parts = []
    for term in terms(bias):
        if isinstance(term, Bias):
            parts.append(term.at(q, kv, dtype))
        else:
            parts.append(q.pairs(term, kv).astype(dtype))
    return sum(parts[1:], start=parts[0])


def partition_floats(tree: Any) -> tuple[Any, Any]:
    """Splits a tree into its float arrays, which have gradients, and the others: None marks the missing leaves."""
    floats = jax.tree.map(lambda x: x if _is_float(x) else None, tree)
    return floats, jax.tree.map(lambda x: None if _is_float(x) else x, tree)


def combine_floats(floats: Any, others: Any) -> Any:
    """The inverse of `partition_floats`."""
    return jax.tree.map(lambda a, b: b if a is None else a, floats, others, is_leaf=lambda x: x is None)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.floating)


def _bound(name: str, term: Any, shape: tuple[int, int, int, int]) -> Any:
    if isinstance(term, Bias):
        term.check(shape)
        return term
    if name != "bias" and not is_array(term):
        raise TypeError(f"`{name}` must be an array or a Bias, got {type(term).__name__}.")
    full = check_broadcast(name, term, shape, kind="float")
    if isinstance(term, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(full, term.dtype)
    return jnp.asarray(term).reshape(full)


def _in_order(q: Slots, by_head: Any) -> bool:
    """Whether the call has all heads in order. Then no gather is needed, and sharded heads stay sharded."""
    return q.side.whole and q.side.head.size == len(by_head)


def _check_floats(name: str, array: Any, rank: int, wanted: str) -> None:
    if not is_array(array):
        raise TypeError(f"`{name}` must be a float array {wanted}, got {type(array).__name__}.")
    if np.dtype(array.dtype).name not in FLOATS:
        raise TypeError(f"`{name}` must hold floats, got {array.dtype}. Cast it with `.astype('float32')`.")
    if array.ndim != rank:
        raise ValueError(f"`{name}` must be {wanted}, got shape {tuple(array.shape)}.")


def _check_heads(name: str, noun: str, got: int, heads: int) -> None:
    if got != heads:
        raise ValueError(f"`{name}` has {got} {noun}, but the call has {heads} query heads. Give {heads}.")


def _leading_parameters(fn: Any, arrays: int) -> int:
    """The number of parameters of a function before its arrays: 2 for (q, k), 4 for (b, h, q, k)."""
    if not callable(fn):
        raise TypeError(f"ScoreBias needs a function of (q, k) or (b, h, q, k), got {type(fn).__name__}.")
    expected = f"With {counted(arrays, 'array')}, the function of ScoreBias must have "
    expected += parameter_forms(arrays, "required positional parameters")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:
        raise TypeError(
            f"ScoreBias cannot read the parameters of {fn!r}. {expected}. Wrap the function in a Python function."
        ) from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)
    if required - arrays not in (2, 4):
        raise TypeError(
            f"{getattr(fn, '__name__', repr(fn))} has {required} required positional parameters. {expected}. "
            "Parameters with a default, `*args` and keywords do not count."
        )
    return required - arrays


@cache
def _buckets(count: int, bidirectional: bool, max_distance: int) -> np.ndarray:
    """T5's bucket of every k − q from −max_distance to max_distance. Larger distances are in the same buckets."""
    ahead = np.arange(-max_distance, max_distance + 1)
    if bidirectional:
        count //= 2
        first, distance = np.where(ahead > 0, count, 0), np.abs(ahead)
    else:
        first, distance = np.zeros_like(ahead), np.maximum(-ahead, 0)
    exact = count // 2
    # In float32, like the code that trained the checkpoints, with the logarithm rounded once.
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    logarithm = np.log(ratio.astype(np.float64)).astype(np.float32)
    share = logarithm / np.float32(np.log(max_distance / exact)) * np.float32(count - exact)
    far = np.minimum(exact + share.astype(np.int64), count - 1)
    return (first + np.where(distance < exact, distance, far)).astype(np.int32)
