"""An extension of griffe, which reads the sources for the reference."""

import re
from typing import Any

import griffe


class Sources(griffe.Extension):
    """Treats classes with `@rule` as dataclasses, `Example:` as a section of doctests, and `2**30` as code."""

    def on_class_instance(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Shows the arguments of a rule, which are the fields of the dataclass that `@rule` makes."""
        if any(str(decorator.value).split("(")[0] == "rule" for decorator in cls.decorators):
            path = griffe.ExprName("dataclasses.dataclass")
            cls.decorators.append(griffe.Decorator(path, lineno=cls.lineno, endlineno=cls.lineno))

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames `Example:` to `Examples:`, as griffe expects, and quotes powers, whose `**` would start bold text."""
        if obj.docstring is not None:
            lines = [re.sub(r"^( *)Example:$", r"\1Examples:", line) for line in obj.docstring.value.split("\n")]
            obj.docstring.value = "\n".join(line if ">>>" in line else _quote_powers(line) for line in lines)


def _quote_powers(line: str) -> str:
    """Puts numbers such as 2**30 into backticks, except in code that has them already."""
    return re.sub(r"`[^`]*`|\b\d+\*\*\d+", lambda m: m[0] if m[0].startswith("`") else f"`{m[0]}`", line)
