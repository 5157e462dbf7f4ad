"""Optional dependencies: a missing one is one line that says what to install."""

from importlib.util import find_spec


def needs(room: str, module: str, extra: str) -> None:
    """Raises an ImportError that names the extra to install, unless the module is there.

    The module itself is not imported: if it is there and broken, its own error is the one to read.

    Args:
        room: who needs it, a dotted name of ours.
        module: the top-level module of the dependency.
        extra: the extra of this package that brings it.

    Example:
        >>> needs("longspan.models", "no_such_module", "flax")
        Traceback (most recent call last):
        ImportError: longspan.models needs no_such_module: pip install 'longspan[flax]'
    """
    if not is_there(module):
        raise ImportError(f"{room} needs {module}: pip install 'longspan[{extra}]'", name=module)


def is_there(module: str) -> bool:
    """Whether a top-level module can be found."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a finder that refuses it, or a stand-in without a spec
        return False
