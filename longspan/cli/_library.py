"""`library`: Longspan itself, for a command that runs."""

import sys
from typing import Any


def library() -> Any:
    """The package, run now if the command's door left that for later (`_longspan_command`)."""
    package = sys.modules["longspan"]
    if not hasattr(package, "attention"):
        assert package.__spec__ is not None and package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)
    return package
