"""Checks of config fields: ints, numbers and flags."""

import math
from typing import Any

import numpy as np

MAX_INT32 = 2**31 - 1  # the largest size or count: JAX indexes with int32
FLOAT32 = np.finfo(np.float32)


def check_counts(config: Any, *names: str, minimum: int = 1) -> None:
    """Raises unless these fields are ints >= `minimum`; NumPy's become Python's, which JSON can hold."""
    for name in names:
        value: Any = getattr(config, name)
        if not is_count(value, minimum):
            raise ValueError(f"`{name}` must be an int from {minimum} to {MAX_INT32}, got {value!r}.")
        object.__setattr__(config, name, int(value))


def check_reals(config: Any, *names: str, below: float = math.inf) -> None:
    """Raises unless these fields are numbers in [0, below) that are finite in float32."""
    upper = f"less than {below:g}"
    if below == math.inf:
        upper = "finite in float32"
    for name in names:
        value: Any = getattr(config, name)
        if not is_number(value) or not 0 <= value < below:
            raise ValueError(f"`{name}` must be a number that is at least 0 and {upper}, got {value!r}.")
        object.__setattr__(config, name, float(value))


def check_positives(config: Any, *names: str, optional: bool = False) -> None:
    """Raises unless these fields are positive in float32: they are divisors."""
    for name in names:
        value: Any = getattr(config, name)
        if optional and value is None:
            continue
        if not is_positive(value):
            other = "None (null in config.json) or " if optional else ""
            raise ValueError(f"`{name}` must be {other}a positive number that is finite in float32, got {value!r}.")
        if not isinstance(value, int | float):
            object.__setattr__(config, name, float(value))


def check_flags(config: Any, *names: str) -> None:
    """Raises unless these fields are True or False."""
    for name in names:
        value: Any = getattr(config, name)
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"`{name}` must be True or False, got {value!r}.")
        object.__setattr__(config, name, bool(value))


def is_count(value: Any, minimum: int = 1) -> bool:
    """Whether a value is an int from `minimum` to `MAX_INT32`."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_int and bool(minimum <= value <= MAX_INT32)


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float that is finite in float32."""
    is_real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_real and bool(abs(value) <= float(FLOAT32.max))


def is_positive(value: Any) -> bool:
    """Whether a value is a positive number that float32 does not round to 0."""
    return is_number(value) and bool(value >= float(FLOAT32.tiny))
