"""An extension of griffe, which reads the sources for the reference."""

import re
from typing import Any

import griffe


class Sources(griffe.Extension):
    """Treats classes with `@rule` as dataclasses, and `Example:` as a section of doctests."""

    def on_class_instance(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Shows the arguments of a rule, which are the fields of the dataclass that `@rule` makes."""
        if any(str(decorator.value).split("(")[0] == "rule" for decorator in cls.decorators):
            path = griffe.ExprName("dataclasses.dataclass")
            cls.decorators.append(griffe.Decorator(path, lineno=cls.lineno, endlineno=cls.lineno))

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames `Example:` to `Examples:`, because griffe renders doctests only under `Examples:`."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
