"""Debug mode: the logger `longspan.maskinfo` records every call of `MaskInfo` and its conversions."""

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

LOG = logging.getLogger("longspan.maskinfo")
VARIABLE = "LONGSPAN_MASK_DEBUG"

F = TypeVar("F", bound=Callable)


def set_debug_mode(enabled: bool) -> None:
    """Switches the logging of calls on or off. The environment variable `LONGSPAN_MASK_DEBUG=1` switches it on.

    Calls are logged at DEBUG level by the logger `longspan.maskinfo`; `logging.basicConfig(level="DEBUG")` shows them.

    Example:
        >>> set_debug_mode(True)
        >>> get_debug_mode()
        True
        >>> set_debug_mode(False)
    """
    LOG.setLevel(logging.DEBUG if enabled else logging.NOTSET)
    LOG.disabled = not enabled


def get_debug_mode() -> bool:
    """Whether calls are logged.

    Example:
        >>> get_debug_mode()
        False
    """
    return not LOG.disabled


def logged(fn: F, label: str | None = None) -> F:
    """The same function; in debug mode each call is logged."""
    name = label or fn.__name__

    @functools.wraps(fn)
    def call(*args, **kwargs):
        if get_debug_mode():
            LOG.debug("%s(%s)", name, _arguments(args, kwargs))
        return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


def log_methods(cls: type) -> type:
    """Logs the calls of all public methods of a class, with inherited ones, labelled with the class's name."""
    for name, _ in inspect.getmembers(cls):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(cls, name)
        label = f"{cls.__name__}.{name}"
        if isinstance(member, classmethod | staticmethod):
            setattr(cls, name, type(member)(logged(member.__func__, label)))
        elif inspect.isfunction(member):
            setattr(cls, name, logged(member, label))
    return cls


def _arguments(args: tuple, kwargs: dict) -> str:
    shown = [_short(a) for a in args] + [f"{name}={_short(a)}" for name, a in kwargs.items()]
    return ", ".join(shown)


def _short(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


set_debug_mode(os.environ.get(VARIABLE, "").strip().lower() in ("1", "true", "yes", "on"))
