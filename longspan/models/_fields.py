"""Checks of a config's fields: whole numbers, real numbers, shares, yes or no."""

import math
from typing import Any

import numpy as np

MOST = 2**31 - 1  # of anything that is counted: JAX indexes with int32


def check_counts(config: Any, *names: str, least: int = 1) -> None:
    """These fields are ints, at least so many; NumPy's become Python's, which JSON can hold."""
    for name in names:
        value = getattr(config, name)
        if not _is_int(value) or not least <= value <= MOST:
            raise ValueError(f"`{name}` must be an int from {least} to {MOST}, got {value!r}.")
        object.__setattr__(config, name, int(value))


def check_reals(config: Any, *names: str, below: float = math.inf) -> None:
    """These fields are numbers in [0, below): finite ones."""
    for name in names:
        value = getattr(config, name)
        is_number = _is_int(value) or isinstance(value, float | np.floating)
        if not is_number or not 0 <= value < below:
            upper = "finite" if below == math.inf else f"below {below:g}"
            raise ValueError(f"`{name}` must be a number from 0 on and {upper}, got {value!r}.")
        object.__setattr__(config, name, value if isinstance(value, int | float) else float(value))


def check_flags(config: Any, *names: str) -> None:
    """These fields are True or False."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"`{name}` must be True or False, got {value!r}.")
        object.__setattr__(config, name, bool(value))


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
