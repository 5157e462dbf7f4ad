"""Optional dependencies: an error of one line names the extra to install."""

from importlib.util import find_spec


def needs(feature: str, module: str, extra: str) -> None:
    """Raises an ImportError that names the extra to install, unless the module is installed.

    The module is not imported. If it is installed but broken, its own error appears at its import.

    Args:
        feature: the module or feature that needs it, for the message.
        module: the top-level module of the dependency.
        extra: the extra of this package that installs it.

    Example:
        >>> needs("longspan.models", "no_such_module", "flax")
        Traceback (most recent call last):
        ImportError: longspan.models needs no_such_module: pip install 'longspan[flax]'
    """
    if not is_installed(module):
        raise ImportError(f"{feature} needs {module}: pip install 'longspan[{extra}]'", name=module)


def is_installed(module: str) -> bool:
    """Whether a top-level module is installed."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or `sys.modules` holds a stub without a spec
        return False
