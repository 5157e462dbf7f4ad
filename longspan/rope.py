"""Rotary positions (RoPE): the frequencies of Hugging Face's configs, and the rotation of queries and keys.

`frequencies` computes them once from a config, in NumPy, outside of `jit`. Every layer then rotates its queries and its
keys by their positions, so that scores depend only on the distance between a query and a key.

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
    - "llama3": x if its wavelength is below old/high_freq_factor, x / factor if it is above old/low_freq_factor, and an
      interpolation in between; old = original_max_position_embeddings.
    - "yarn": x for high frequencies, x / factor for low ones, a linear ramp in between; its attention factor is
      0.1·ln(factor) + 1.
    - "longrope" (formerly "su"): x / short_factor[i], or x / long_factor[i] if seq_len > old.
    - "proportional": x = b^(-2i/head_dim) for the first fraction `partial_rotary_factor` of pairs, 0 for the others.

    Args:
        parameters: a mapping with Hugging Face's keys, in the new form (rope_type, rope_theta, ...) or the old one
            (`rope_scaling` and `rope_theta`), or a whole config with `rope_parameters` or `rope_scaling`. If a config
            has one set of parameters per layer type, give one of them. A key that is null counts as missing.
        head_dim: size of a head.
        max_position_embeddings: the config's value, if `parameters` lacks it. "dynamic" requires it. "longrope" and
            "yarn" require it if their `factor` is null (which means max_position_embeddings / old). Types that use
            `old` fall back to it if `old` is missing.
        seq_len: the greatest length that will occur, on which "dynamic" and "longrope" depend. By default, "dynamic"
            uses the frequencies of lengths up to L, and "longrope" those of lengths up to `old`.

    Returns:
        inv_freq, float32 [D/2], and the attention factor, a float: 1.0 except for "yarn" and "longrope".

    Example:
        >>> frequencies(dict(rope_scaling=dict(type="linear", factor=4.0), rope_theta=100.0), head_dim=4)
        (array([0.25 , 0.025], dtype=float32), 1.0)

    Differs from Hugging Face: frequencies do not change while tokens are generated. There, "dynamic" and "longrope"
    depend on the longest row of each call, so cached keys keep older frequencies and a row depends on its batch.
    """
    fields = _flatten(parameters)
    if max_position_embeddings is not None:
        fields["max_position_embeddings"] = max_position_embeddings
    kind = fields.get("rope_type")
    if kind is None:
        kind = fields.get("type")
    if kind is None:
        kind = "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"rope_type={kind!r} is not one of {', '.join(map(repr, _KINDS))}.")
    size = check_static_size("head_dim", head_dim, 2)
    if seq_len is not None:
        seq_len = check_static_size("seq_len", seq_len, 1)
    config = _RopeConfig(kind, fields, size, seq_len)
    with np.errstate(over="ignore", divide="ignore"):
        inv_freq, factor = _KINDS[kind](config)
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
    """Queries or keys, each pair of features rotated by position · frequency and multiplied by a factor.

    A pair (a, b) becomes (a·cos - b·sin, b·cos + a·sin)·attention_factor, where the angle is float32(position) ·
    float32(inv_freq). Pair i consists of features i and i + D/2 (Llama and most others), or 2i and 2i + 1 if
    interleaved. Features from D on are not changed.

    Args:
        x: queries [B, T, N, H], or keys [B, S, K, H].
        positions: int [T] or [B, T]. Float32 represents all of them exactly up to 2²⁴.
        inv_freq: [D/2], D <= H, or [B, D/2] if rows differ; see `frequencies`.
        attention_factor: multiplies cos and sin, so it multiplies scores by its square.
        interleaved: whether the features of a pair are neighbours.

    Returns:
        The rotated array, with the shape and dtype of `x`. It is computed in float32 (float64 for float64) and rounded
        once.

    Example:
        >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
        >>> rotate(x, jnp.array([1]), jnp.array([np.pi / 2])).round(3).tolist()
        [[[[-0.0, 1.0]]]]

    Differs from Hugging Face in half precision: there, cos, sin and each product are rounded to the dtype of `x`.
    """
    check_heads("x", x)
    if positions is None:
        raise TypeError(f"`positions` must be int [T] or [B, T], got None. Give `jnp.arange({x.shape[1]})`.")
    check_positions("positions", positions, x.shape[1], x.shape[0])
    _check_inv_freq(inv_freq, x)
    _check_attention_factor(attention_factor)
    x, inv_freq = jnp.asarray(x), jnp.asarray(inv_freq).astype(jnp.float32)
    float_positions = to_int32(positions, jnp).astype(jnp.float32)
    angles = (
        _with_rows(float_positions)[:, :, None, None] * _with_rows(inv_freq)[:, None, None, :]
    )  # [B or 1, T, 1, D/2]
    factor, dtype = jnp.asarray(attention_factor, jnp.float32), statistics_dtype(x.dtype)
    cos, sin = (jnp.cos(angles) * factor).astype(dtype), (jnp.sin(angles) * factor).astype(dtype)
    size = 2 * inv_freq.shape[-1]
    pair_axis = -1 if interleaved else -2  # of [..., D/2, 2] or [..., 2, D/2]
    first, second = _pairs(x[..., :size].astype(dtype), interleaved)
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=pair_axis)
    rotated = rotated.reshape(*x.shape[:-1], size).astype(x.dtype)
    if size == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., size:]], axis=-1)


class _RopeConfig(NamedTuple):
    """The values from which the frequencies of a RoPE type are computed."""

    kind: str
    fields: dict[str, Any]
    head_dim: int
    seq_len: int | None

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def value(self, name: str, default: Any) -> Any:
        return self.fields[name] if self.has(name) else default

    def number(self, name: str, default: float | None = None) -> float:
        """The value of a field, a positive number."""
        value = self.value(name, default)
        if value is None:
            raise self.missing(name)
        largest = float(np.finfo(np.float32).max)
        if not isinstance(value, int | float | np.number) or isinstance(value, bool) or not 0 < value <= largest:
            raise ValueError(f"`{name}` must be a finite number > 0, got {value!r}.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.value(name, default)
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"`{name}` must be True or False, got {value!r}.")
        return bool(value)

    def missing(self, name: str) -> ValueError:
        present = [f"`{field}`" for field in self.fields if self.has(field)]
        got = f"has only {', '.join(present)}" if present else "is empty"
        cure = "Add it."
        if name.endswith("max_position_embeddings"):
            cure = "Add it, or give `max_position_embeddings=`."
        return ValueError(f"RoPE of type {self.kind!r} needs `{name}`, but `parameters` {got}. {cure}")

    def rotated(self) -> int:
        """D, the number of rotated features."""
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
        name = "original_max_position_embeddings"
        if not self.has(name) and self.has("max_position_embeddings"):
            name = "max_position_embeddings"
        length = self.number(name)
        if not length.is_integer():
            raise ValueError(f"`{name}` must be a whole number of positions, got {length!r}.")
        return length

    def stretch(self) -> float:
        """The factor that extends the context: given, or the quotient of the new and the original length."""
        if self.has("factor"):
            return self.number("factor")
        return self.number("max_position_embeddings") / self.original()


def _default(config: _RopeConfig):
    return np.float32(1) / _wavelengths(config.number("rope_theta"), config.rotated()), 1.0


def _linear(config: _RopeConfig):
    inv_freq, _ = _default(config)
    return inv_freq / np.float32(config.number("factor")), 1.0


def _dynamic(config: _RopeConfig):
    size, factor, trained = config.rotated(), config.number("factor"), config.number("max_position_embeddings")
    if size == 2:
        raise ValueError(
            "RoPE of type 'dynamic' needs 4 rotated features or more, got 2. Its formula divides by the number of "
            "rotated features minus 2."
        )
    length = max(trained, config.seq_len or 0)
    base = config.number("rope_theta") * (factor * length / trained - (factor - 1)) ** (size / (size - 2))
    return np.float32(1) / _wavelengths(base, size), 1.0


def _llama3(config: _RopeConfig):
    inv_freq, _ = _default(config)
    old, factor = config.original(), np.float32(config.number("factor"))
    low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
    if not low < high:
        raise ValueError(f"`low_freq_factor` must be less than `high_freq_factor`, got {low:g} and {high:g}.")
    # PyTorch divides a number by an array as number · (1 / array), which rounds differently: up to 4 units in the last
    # place. So does this.
    wavelength = np.float32(1) / inv_freq * np.float32(2 * math.pi)
    share = (np.float32(1) / wavelength * np.float32(old) - np.float32(low)) / np.float32(high - low)
    between = (1 - share) * inv_freq / factor + share * inv_freq
    slow, fast = wavelength > np.float32(old / low), wavelength < np.float32(old / high)
    return np.where(slow, inv_freq / factor, np.where(fast, inv_freq, between)), 1.0


def _yarn(config: _RopeConfig):
    size, base, old = config.rotated(), config.number("rope_theta"), config.original()
    if base == 1:
        raise ValueError(
            "RoPE of type 'yarn' needs a `rope_theta` other than 1, because it divides by log(rope_theta)."
        )
    if "factor" not in config.fields:  # null means the quotient of the lengths; a missing key is an error
        raise config.missing("factor")
    factor = config.stretch()

    def pair_with_rotations(times: float) -> float:
        """The index (fractional) of the pair that makes this number of full turns within the original length."""
        return size * math.log(old / (times * 2 * math.pi)) / (2 * math.log(base))

    low = pair_with_rotations(config.number("beta_fast", 32.0))
    high = pair_with_rotations(config.number("beta_slow", 1.0))
    if config.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high = low + 0.001  # a step instead of a ramp, without a division by 0
    pairs = np.arange(size // 2, dtype=np.float32)
    kept = 1 - np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    wavelengths = _wavelengths(base, size)
    slow, fast = np.float32(1) / (np.float32(factor) * wavelengths), np.float32(1) / wavelengths
    return slow * (1 - kept) + fast * kept, _yarn_attention(config, factor)


def _yarn_attention(config: _RopeConfig, factor: float) -> float:
    def level(scale: float) -> float:
        if factor <= 1:
            return 1.0
        return 0.1 * scale * math.log(factor) + 1.0

    if config.has("attention_factor"):
        return config.number("attention_factor")
    # As in Hugging Face, 0 counts as missing.
    if all(config.has(name) and config.fields[name] != 0 for name in ("mscale", "mscale_all_dim")):
        return level(config.number("mscale")) / level(config.number("mscale_all_dim"))
    return level(1.0)


def _longrope(config: _RopeConfig):
    size, old = config.rotated(), config.original()
    divisors, long_divisors = _divisors(config, "short_factor", size // 2), _divisors(config, "long_factor", size // 2)
    if config.seq_len is not None and config.seq_len > old:
        divisors = long_divisors
    inv_freq = np.float32(1) / (divisors * _wavelengths(config.number("rope_theta"), size))
    if config.has("attention_factor"):
        return inv_freq, config.number("attention_factor")
    stretch = config.stretch()
    if stretch <= 1:
        return inv_freq, 1.0
    if old <= 1:
        raise ValueError(f"`original_max_position_embeddings` must be more than 1, got {old:g}.")
    return inv_freq, math.sqrt(1 + math.log(stretch) / math.log(old))


def _divisors(config: _RopeConfig, name: str, half: int) -> np.ndarray:
    if not config.has(name):
        raise config.missing(name)
    values = config.fields[name]
    is_list = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
    are_numbers = is_list and all(isinstance(v, int | float | np.number) and not isinstance(v, bool) for v in values)
    if are_numbers:
        array = np.asarray(values, np.float32)
        if array.shape == (half,) and np.isfinite(array).all() and (array > 0).all():
            return array
    got = f"{len(values)} values" if is_list else repr(values)
    raise ValueError(f"`{name}` must be a list of {half} positive numbers, one per pair of features, got {got}.")


def _proportional(config: _RopeConfig):
    share, factor = config.number("partial_rotary_factor", 1.0), config.number("factor", 1.0)
    if share > 1 or config.head_dim % 2:
        raise ValueError(
            "RoPE of type 'proportional' needs an even head_dim and a `partial_rotary_factor` of at most 1, got "
            f"{config.head_dim} and {share:g}."
        )
    inv_freq = np.float32(1) / _wavelengths(config.number("rope_theta"), config.head_dim)
    rotated = np.arange(config.head_dim // 2) < int(share * config.head_dim // 2)
    return np.where(rotated, inv_freq, np.float32(0)) / np.float32(factor), 1.0


_KINDS: dict[str, Callable[[_RopeConfig], tuple[np.ndarray, float]]] = {
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

    Computed as in PyTorch: exponents in float32, and a power that is rounded once. One unit in the last place of a
    frequency changes the angle at position 1,000,000 by up to 0.06, so a more exact result would differ more from the
    frequencies that a checkpoint was trained with.
    """
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


def _flatten(parameters: Any) -> dict[str, Any]:
    """The fields of `rope_parameters` or `rope_scaling`, and those top-level fields of the config that they omit.

    As in Hugging Face, the nested fields take precedence; only a top-level `original_max_position_embeddings` does so
    over the nested one, since Phi-3 has the true value there.
    """
    if not isinstance(parameters, Mapping):
        raise TypeError(
            "`parameters` must be a mapping as in a Hugging Face config, for example "
            f"dict(rope_type='default', rope_theta=10000.0), got {type(parameters).__name__}."
        )
    original = "original_max_position_embeddings"
    top_level = ("rope_theta", "partial_rotary_factor", "max_position_embeddings", original)
    fields = dict(parameters)
    if "rope_scaling" in parameters or "rope_parameters" in parameters:
        inner = dict(parameters.get("rope_scaling") or parameters.get("rope_parameters") or {})
        fields = {name: parameters[name] for name in top_level if name in parameters} | inner
        if parameters.get(original) is not None:
            fields[original] = parameters[original]
    layers = [name for name, value in fields.items() if isinstance(value, Mapping)]
    if layers:
        raise ValueError(
            f"`parameters` must be one set of numbers, got one per layer type ({', '.join(map(repr, layers))}). Give "
            f"one of them, for example parameters[{layers[0]!r}]."
        )
    return fields


def _with_rows(array: jax.Array) -> jax.Array:
    """Adds a row axis of size 1 to an array that has none."""
    return array if array.ndim == 2 else array[None]


def _pairs(x: jax.Array, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """The first and the second features of all pairs."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _check_inv_freq(inv_freq: Any, x: Any) -> None:
    if not is_array(inv_freq) or inv_freq.dtype.name not in FLOATS:
        got = f"dtype {inv_freq.dtype}" if is_array(inv_freq) else type(inv_freq).__name__
        raise TypeError(f"`inv_freq` must be a float array [D/2] or [B, D/2], got {got}. `frequencies` makes one.")
    shape, (B, _, _, H) = tuple(inv_freq.shape), x.shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] not in (1, B)):
        raise ValueError(f"`inv_freq` must have shape [D/2] or [B, D/2] with B = {B}, got {shape}.")
    if not 1 <= shape[-1] <= H // 2:
        raise ValueError(
            f"`inv_freq` has {shape[-1]} frequencies, one per pair, but `x` has heads of {H} features. "
            f"Give 1 to {H // 2} frequencies, such as those of `frequencies(parameters, head_dim={H})`."
        )


def _check_attention_factor(factor: Any) -> None:
    traced = is_array(factor) and factor.shape == () and factor.dtype.name in FLOATS
    if not traced and number_of(factor) is None:
        got = f"shape {factor.shape}, {factor.dtype}" if is_array(factor) else repr(factor)
        raise TypeError(f"`attention_factor` must be one number, got {got}.")
