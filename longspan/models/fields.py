"""Checks of a config's fields: whole numbers, real numbers, shares, yes or no."""

import math
from typing import Any

import numpy as np

MOST = 2**31 - 1  # of anything that is counted: JAX indexes with int32
FLOAT32 = np.finfo(np.float32)


def check_counts(config: Any, *names: str, least: int = 1) -> None:
    """These fields are ints, at least so many; NumPy's become Python's, which JSON can hold."""
    for name in names:
        value: Any = getattr(config, name)
        if not is_count(value, least):
            raise ValueError(f"`{name}` must be an int from {least} to {MOST}, got {value!r}.")
        object.__setattr__(config, name, int(value))


def check_reals(config: Any, *names: str, below: float = math.inf) -> None:
    """These fields are numbers in [0, below): finite ones, in float32 too."""
    for name in names:
        value: Any = getattr(config, name)
        if not is_number(value) or not 0 <= value < below:
            upper = "finite in float32" if below == math.inf else f"below {below:g}"
            raise ValueError(f"`{name}` must be a number from 0 on and {upper}, got {value!r}.")
        object.__setattr__(config, name, float(value))


def check_positives(config: Any, *names: str, optional: bool = False) -> None:
    """These fields are numbers above 0, in float32 too: something is divided by them."""
    for name in names:
        if optional and getattr(config, name) is None:
            continue
        value: Any = getattr(config, name)
        if not is_positive(value):
            other = "None (null in config.json) or " if optional else ""
            raise ValueError(f"`{name}` must be {other}a number above 0, finite in float32, got {value!r}.")
        object.__setattr__(config, name, value if isinstance(value, int | float) else float(value))


def check_flags(config: Any, *names: str) -> None:
    """These fields are True or False."""
    for name in names:
        value: Any = getattr(config, name)
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"`{name}` must be True or False, got {value!r}.")
        object.__setattr__(config, name, bool(value))


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is an int that JAX can count to."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_int and bool(least <= value <= MOST)


def is_number(value: Any) -> bool:
    """Whether a value is a number, int or float, that is finite in float32."""
    is_real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_real and bool(abs(value) <= float(FLOAT32.max))


def is_positive(value: Any) -> bool:
    """Whether a value is a number above 0 that float32 does not round to 0."""
    return is_number(value) and bool(value >= float(FLOAT32.tiny))
