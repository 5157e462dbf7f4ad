"""Marks parameters of tests: `make test` runs some of them, `make check` all."""

import pytest


def one_in(step: int, values) -> list:
    """Parameters of a test: `make test` runs the first of every `step` values, `make check` all of them."""
    return [_checked(value) if place % step else value for place, value in enumerate(values)]


def only(chosen, values) -> list:
    """Parameters of a test by name: `make test` runs the chosen ones, `make check` all of them."""
    missing = set(chosen) - set(values)
    assert not missing, f"{sorted(missing)} are not among the parameters."
    return [value if value in chosen else _checked(value) for value in values]


def _checked(value):
    if hasattr(value, "marks"):  # a `pytest.param`
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.check])
    return pytest.param(value, marks=pytest.mark.check)
