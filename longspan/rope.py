"""Rotary positions: the frequencies that Hugging Face's configs describe, and the rotation of queries and keys.

Frequencies are numbers of a config, computed once, in NumPy, outside of `jit`. Every layer then rotates its queries and
its keys by their positions; scores depend on the distance of the two alone.

Example:
    >>> inv_freq, factor = ls.rope.frequencies(dict(rope_type="default", rope_theta=10000.0), head_dim=8)
    >>> x = jnp.ones((1, 3, 2, 8))
    >>> ls.rope.rotate(x, jnp.arange(3), inv_freq, attention_factor=factor).shape
    (1, 3, 2, 8)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from longspan.array_types import Array, Real, no_type_check, statistics_dtype
from longspan.checks import FLOATS, check_heads, check_positions, check_static_size, is_array, number_of, to_int32

__all__ = ["frequencies", "rotate"]


@no_type_check
def frequencies(
    parameters: Mapping[str, Any],
    head_dim: int,
    *,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
) -> tuple[Float[np.ndarray, "half"], float]:
    """The frequencies [D/2] of a config, and the factor of cos and sin: (inv_freq, attention_factor) for `rotate`.

    D = int(head_dim · partial_rotary_factor), b = rope_theta, and x = b^(-2i/D), i < D/2. By `rope_type`:

    - "default": x.
    - "linear": x / factor.
    - "dynamic": x of the base b·(factor·n/L - (factor - 1))^(D/(D-2)), n = max(L, seq_len),
      L = max_position_embeddings.
    - "llama3": x where its wavelength is below old/high_freq_factor, x / factor where it is above old/low_freq_factor,
      and a mixture in between; old = original_max_position_embeddings.
    - "yarn": x for fast pairs, x / factor for slow ones, a ramp in between; its attention factor is 0.1·ln(factor) + 1.
    - "longrope" (formerly "su"): x / short_factor[i], or x / long_factor[i] if seq_len > old.
    - "proportional": x = b^(-2i/head_dim) for the first share `partial_rotary_factor` of pairs, 0 for the others.

    Args:
        parameters: in Hugging Face's words, new or old: `rope_parameters` (rope_type, rope_theta, ...), `rope_scaling`
            (type or rope_type, ...) with `rope_theta` beside it, or the whole config that holds either. Where a config
            has one set per layer type, give one of them. A field that is null is one that is missing.
        head_dim: size of a head.
        max_position_embeddings: the config's, unless it stands in `parameters`; "dynamic" needs it, "longrope" and
            "yarn" if their `factor` is null (it is then max_position_embeddings / old), and every type of which `old`
            is asked, if that is missing: it then stands for it.
        seq_len: the greatest length that will be reached, for "dynamic" and "longrope", which are functions of it. By
            default they are those of lengths up to L and old.

    Returns:
        inv_freq, float32 [D/2], and the attention factor, a float that is 1.0 for all but "yarn" and "longrope".

    Example:
        >>> frequencies(dict(rope_scaling=dict(type="linear", factor=4.0), rope_theta=100.0), head_dim=4)
        (array([0.25 , 0.025], dtype=float32), 1.0)

    Differs from Hugging Face: lengths do not change while tokens are generated. There, "dynamic" and "longrope" follow
    the longest row of each call, so that old keys keep old frequencies and a row depends on its batch.
    """
    fields = _flat(parameters)
    if max_position_embeddings is not None:
        fields["max_position_embeddings"] = max_position_embeddings
    named = (fields.get(name) for name in ("rope_type", "type"))
    kind = next((name for name in named if name is not None), "default")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"rope_type={kind!r} is not one of {', '.join(map(repr, _KINDS))}.")
    size = check_static_size("head_dim", head_dim, 2)
    length = None if seq_len is None else check_static_size("seq_len", seq_len, 1)
    given = _Given(kind, fields, size, length)
    with np.errstate(over="ignore", divide="ignore"):
        inv_freq, factor = _KINDS[kind](given)
    if not np.isfinite(inv_freq).all() or not math.isfinite(factor):
        numbers = ", ".join(f"{name}={value!r}" for name, value in fields.items() if isinstance(value, int | float))
        raise ValueError(
            f"RoPE of type {kind!r} with {numbers} has frequencies that are not finite in float32. Change the numbers."
        )
    return inv_freq, factor


@no_type_check
def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "*B T"],
    inv_freq: Float[Array, "*B half"],
    *,
    attention_factor: Real = 1.0,
    interleaved: bool = False,
) -> Float[jax.Array, "B T N H"]:
    """Queries or keys, each pair of features turned by position · frequency and multiplied by a factor.

    A pair (a, b) becomes (a·cos - b·sin, b·cos + a·sin)·attention_factor, where the angle is float32(position) ·
    float32(inv_freq). Pair i is made of features i and i + D/2 (Llama and most others), or 2i and 2i + 1 if
    interleaved. Features from D on stay as they are.

    Args:
        x: queries [B, T, N, H], or keys [B, S, K, H].
        positions: int [T] or [B, T]. Float32 knows every one up to 2²⁴.
        inv_freq: [D/2], D <= H, or [B, D/2] where rows differ; see `frequencies`.
        attention_factor: what cos and sin are multiplied by; scores then get its square.
        interleaved: whether the features of a pair are neighbours.

    Returns:
        What `x` was, in its dtype. It is computed in float32 (float64 for float64) and rounded once.

    Example:
        >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
        >>> rotate(x, jnp.array([1]), jnp.array([np.pi / 2])).round(3).tolist()
        [[[[-0.0, 1.0]]]]

    Differs from Hugging Face in half precision: there, cos, sin and each product are rounded to the dtype of `x`.
    """
    check_heads("x", x)
    check_positions("positions", _given_positions(positions, x), x.shape[1], x.shape[0])
    _check_inv_freq(inv_freq, x)
    _check_attention_factor(attention_factor)
    x, inv_freq = jnp.asarray(x), jnp.asarray(inv_freq).astype(jnp.float32)
    places = to_int32(positions, jnp).astype(jnp.float32)
    angles = _rows(places)[:, :, None, None] * _rows(inv_freq)[:, None, None, :]  # [B or 1, T, 1, D/2]
    factor, dtype = jnp.asarray(attention_factor, jnp.float32), statistics_dtype(x.dtype)
    cos, sin = ((f(angles) * factor).astype(dtype) for f in (jnp.cos, jnp.sin))
    size = 2 * inv_freq.shape[-1]
    first, second = _halves(x[..., :size].astype(dtype), interleaved)
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1 if interleaved else -2)
    turned = turned.reshape(*x.shape[:-1], size).astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


class _Given(NamedTuple):
    """What a type of RoPE is computed from."""

    kind: str
    fields: dict[str, Any]
    head_dim: int
    seq_len: int | None

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number of the config."""
        value = self.fields[name] if self.has(name) else default
        if value is None:
            raise self.missing(name)
        largest = float(np.finfo(np.float32).max)
        if not isinstance(value, int | float | np.number) or isinstance(value, bool) or not 0 < value <= largest:
            raise ValueError(f"`{name}` must be a finite number > 0, got {value!r}.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields[name] if self.has(name) else default
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"`{name}` must be True or False, got {value!r}.")
        return bool(value)

    def missing(self, name: str) -> ValueError:
        there = ", ".join(f"`{field}`" for field in self.fields if self.has(field)) or "nothing"
        return ValueError(
            f"RoPE of type {self.kind!r} needs `{name}`, but `parameters` hold {there}. Add it"
            f"{', or give `max_position_embeddings=`' if name.endswith('max_position_embeddings') else ''}."
        )

    def rotated(self) -> int:
        """D, the features that are rotated."""
        share = self.number("partial_rotary_factor", 1.0)
        size = int(self.head_dim * share)
        if share > 1 or size < 2 or size % 2:
            raise ValueError(
                f"RoPE rotates pairs, so head_dim · partial_rotary_factor must be an even number from 2 to head_dim, "
                f"got {self.head_dim} · {share:g} = {self.head_dim * share:g}."
            )
        return size

    def original(self) -> float:
        """The length that the model was trained on."""
        old, new = "original_max_position_embeddings", "max_position_embeddings"
        name = new if self.has(new) and not self.has(old) else old
        length = self.number(name)
        if not length.is_integer():
            raise ValueError(f"`{name}` must be a whole number of positions, got {length!r}.")
        return length

    def stretch(self) -> float:
        """The factor by which a context was made longer: given, or the quotient of its two lengths."""
        if self.has("factor"):
            return self.number("factor")
        return self.number("max_position_embeddings") / self.original()


def _default(given: _Given):
    return np.float32(1) / _wavelengths(given.number("rope_theta"), given.rotated()), 1.0


def _linear(given: _Given):
    inv_freq, _ = _default(given)
    return inv_freq / np.float32(given.number("factor")), 1.0


def _dynamic(given: _Given):
    size, factor, most = given.rotated(), given.number("factor"), given.number("max_position_embeddings")
    if size == 2:
        raise ValueError("RoPE of type 'dynamic' needs 4 rotated features or more (its exponent is D/(D-2)), got 2.")
    length = max(most, given.seq_len or 0)
    base = given.number("rope_theta") * (factor * length / most - (factor - 1)) ** (size / (size - 2))
    return np.float32(1) / _wavelengths(base, size), 1.0


def _llama3(given: _Given):
    inv_freq, _ = _default(given)
    old, factor = given.original(), np.float32(given.number("factor"))
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if not low < high:
        raise ValueError(f"`low_freq_factor` must be less than `high_freq_factor`, got {low:g} and {high:g}.")
    # PyTorch divides a number by an array as number · (1 / array): other roundings, 4 units in the last place.
    wavelength = np.float32(1) / inv_freq * np.float32(2 * math.pi)
    share = (np.float32(1) / wavelength * np.float32(old) - np.float32(low)) / np.float32(high - low)
    between = (1 - share) * inv_freq / factor + share * inv_freq
    slow, fast = wavelength > np.float32(old / low), wavelength < np.float32(old / high)
    return np.where(slow, inv_freq / factor, np.where(fast, inv_freq, between)), 1.0


def _yarn(given: _Given):
    size, base, old = given.rotated(), given.number("rope_theta"), given.original()
    if base == 1:
        raise ValueError("RoPE of type 'yarn' needs a `rope_theta` other than 1: it divides by its logarithm.")
    if "factor" not in given.fields:  # null is the quotient of lengths, absence a mistake
        raise given.missing("factor")
    factor = given.stretch()

    def pair_that_turns(times: float) -> float:
        return size * math.log(old / (times * 2 * math.pi)) / (2 * math.log(base))

    low = pair_that_turns(given.number("beta_fast", 32.0))
    high = pair_that_turns(given.number("beta_slow", 1.0))
    if given.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high = low + 0.001 if low == high else high  # a step, without a division by 0
    pairs = np.arange(size // 2, dtype=np.float32)
    kept = 1 - np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    wavelengths = _wavelengths(base, size)
    slow, fast = np.float32(1) / (np.float32(factor) * wavelengths), np.float32(1) / wavelengths
    return slow * (1 - kept) + fast * kept, _yarn_attention(given, factor)


def _yarn_attention(given: _Given, factor: float) -> float:
    def level(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.has("attention_factor"):
        return given.number("attention_factor")
    # As in Hugging Face, a 0 of either means that it is not there.
    if all(given.has(name) and given.fields[name] != 0 for name in ("mscale", "mscale_all_dim")):
        return level(given.number("mscale")) / level(given.number("mscale_all_dim"))
    return level(1.0)


def _longrope(given: _Given):
    size, old = given.rotated(), given.original()
    is_long = given.seq_len is not None and given.seq_len > old
    both = [_divisors(given, name, size // 2) for name in ("short_factor", "long_factor")]
    inv_freq = np.float32(1) / (both[is_long] * _wavelengths(given.number("rope_theta"), size))
    if given.has("attention_factor"):
        return inv_freq, given.number("attention_factor")
    stretch = given.stretch()
    if stretch > 1 and old <= 1:
        raise ValueError(f"`original_max_position_embeddings` must be more than 1, got {old:g}.")
    return inv_freq, math.sqrt(1 + math.log(stretch) / math.log(old)) if stretch > 1 else 1.0


def _divisors(given: _Given, name: str, half: int) -> np.ndarray:
    if not given.has(name):
        raise given.missing(name)
    values = given.fields[name]
    is_list = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
    are_numbers = is_list and all(isinstance(v, int | float | np.number) and not isinstance(v, bool) for v in values)
    array = np.asarray(values, np.float32) if are_numbers else None
    if array is None or array.shape != (half,) or not (np.isfinite(array).all() and (array > 0).all()):
        got = f"{len(values)} values" if is_list else repr(values)
        raise ValueError(f"`{name}` must be a list of {half} positive numbers, one per pair of features, got {got}.")
    return array


def _proportional(given: _Given):
    share, factor = given.number("partial_rotary_factor", 1.0), given.number("factor", 1.0)
    if share > 1 or given.head_dim % 2:
        raise ValueError(
            "RoPE of type 'proportional' needs an even head_dim and a `partial_rotary_factor` of at most 1, got "
            f"{given.head_dim} and {share:g}."
        )
    inv_freq = np.float32(1) / _wavelengths(given.number("rope_theta"), given.head_dim)
    rotated = np.arange(given.head_dim // 2) < int(share * given.head_dim // 2)
    return np.where(rotated, inv_freq, np.float32(0)) / np.float32(factor), 1.0


_KINDS: dict[str, Callable[[_Given], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "proportional": _proportional,
}


def _wavelengths(base: float, size: int) -> np.ndarray:
    """b^(2i/D), the wavelengths over 2π.

    As PyTorch has it: exponents in float32, a power that is rounded once. A frequency that is off by one unit in the
    last place turns the angle at position 1,000,000 by up to 0.06, so what is more exact is further from what a
    checkpoint was trained with.
    """
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


def _flat(parameters: Any) -> dict[str, Any]:
    """Both spellings as one: what stands in `rope_parameters` or `rope_scaling`, and what stands beside them."""
    if not isinstance(parameters, Mapping):
        raise TypeError(
            "`parameters` must be a mapping as in a Hugging Face config, for example "
            f"dict(rope_type='default', rope_theta=10000.0), got {type(parameters).__name__}."
        )
    beside = ("rope_theta", "partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings")
    fields = dict(parameters)
    if "rope_scaling" in parameters or "rope_parameters" in parameters:
        inner = dict(parameters.get("rope_scaling") or parameters.get("rope_parameters") or {})
        fields = {name: parameters[name] for name in beside if name in parameters} | inner
        # Phi-3 keeps the true one outside.
        if parameters.get(beside[-1]) is not None:
            fields[beside[-1]] = parameters[beside[-1]]
    layers = [name for name, value in fields.items() if isinstance(value, Mapping)]
    if layers:
        raise ValueError(
            f"`parameters` has one set of numbers per layer type ({', '.join(map(repr, layers))}): give one of them, "
            f"for example parameters[{layers[0]!r}]."
        )
    return fields


def _rows(array: jax.Array) -> jax.Array:
    return array if array.ndim == 2 else array[None]


def _halves(x: jax.Array, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """The first and the second features of all pairs."""
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _given_positions(positions: Any, x: Any) -> Any:
    if positions is None:
        raise TypeError(f"`positions` must be int [T] or [B, T], got None. Give `jnp.arange({x.shape[1]})`.")
    return positions


def _check_inv_freq(inv_freq: Any, x: Any) -> None:
    if not is_array(inv_freq) or inv_freq.dtype.name not in FLOATS:
        got = f"dtype {inv_freq.dtype}" if is_array(inv_freq) else type(inv_freq).__name__
        raise TypeError(f"`inv_freq` must be a float array [D/2] or [B, D/2], got {got}. `frequencies` makes one.")
    shape, (B, _, _, H) = tuple(inv_freq.shape), x.shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] not in (1, B)):
        raise ValueError(f"`inv_freq` must have shape [D/2] or [B, D/2] with B = {B}, got {shape}.")
    if not 1 <= shape[-1] <= H // 2:
        raise ValueError(
            f"`inv_freq` holds {shape[-1]} frequencies, one per pair, but `x` has heads of {H} features. "
            f"Give 1 to {H // 2}: those of `frequencies(parameters, head_dim={H})`."
        )


def _check_attention_factor(factor: Any) -> None:
    traced = is_array(factor) and factor.shape == () and factor.dtype.name in FLOATS
    if not traced and number_of(factor) is None:
        got = f"shape {factor.shape}, {factor.dtype}" if is_array(factor) else repr(factor)
        raise TypeError(f"`attention_factor` must be one number, got {got}.")
