"""Which releases of JAX the package was tested with; there is no upper cap, so others are warned of."""

import warnings

# Releases up to their second number: the whole suite passes with each. A weekly workflow runs it with the newest.
TESTED = ("0.10",)


def warn_unless_tested(version: str) -> None:
    """Warns if no release of this series of JAX was ever tested; says nothing otherwise.

    Args:
        version: the version of JAX that is installed.

    Example:
        >>> warn_unless_tested("0.10.2")
    """
    series = ".".join(version.split(".")[:2])
    if series not in TESTED:
        warnings.warn(
            f"longspan was never tested with JAX {version}, only with {' and '.join(TESTED)}. It probably works. "
            f"If results or errors look wrong, compare with `pip install 'jax=={TESTED[-1]}.*'`. To hide this: "
            "PYTHONWARNINGS='ignore:longspan was never tested with'",
            UserWarning,
            stacklevel=3,
        )
