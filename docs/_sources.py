"""An extension of griffe, which reads the sources for the reference: what is ours, said in words that it knows."""

import re
from typing import Any

import griffe


class Sources(griffe.Extension):
    """Classes with `@rule` are dataclasses, and `Example:` is a section of doctests."""

    def on_class_instance(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Lets the arguments of a rule be seen: those of the dataclass that the decorator makes of it."""
        if any(str(decorator.value).split("(")[0] == "rule" for decorator in cls.decorators):
            path = griffe.ExprName("dataclasses.dataclass")
            cls.decorators.append(griffe.Decorator(path, lineno=cls.lineno, endlineno=cls.lineno))

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Doctests under `Example:` would be paragraphs."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
