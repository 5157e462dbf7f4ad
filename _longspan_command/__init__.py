"""The door of the command `longspan`: it opens before JAX is loaded.

Help, wrong options and every press of TAB would otherwise wait a second for `import longspan`, which must load JAX.
Here the package is found but not yet run; `longspan.cli` is imported from inside of it, and runs it when a command
needs it (`longspan.cli.library`).
"""

import sys
from importlib.util import find_spec, module_from_spec


def main() -> None:
    """Runs the command and exits."""
    try:
        if "longspan" not in sys.modules:
            spec = find_spec("longspan")
            assert spec is not None, "it is installed with this file"
            sys.modules["longspan"] = module_from_spec(spec)
        from longspan.cli import leave
        from longspan.cli import main as run

        leave(run())
    except KeyboardInterrupt:
        sys.exit(130)
