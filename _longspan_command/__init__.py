"""The entry point of the command `longspan`. It starts without importing JAX.

`import longspan` takes a second, since it imports JAX; help, usage errors and shell completion should not wait for it.
So `main` puts the package into `sys.modules` without running it and imports `longspan.cli` from it.
`longspan.cli.library` runs the package when a command needs it.
"""

import sys
from importlib.util import find_spec, module_from_spec


def main() -> None:
    """Runs the command and exits."""
    try:
        if "longspan" not in sys.modules:
            spec = find_spec("longspan")
            assert spec is not None, "longspan is installed together with this file"
            sys.modules["longspan"] = module_from_spec(spec)
        from longspan.cli import leave
        from longspan.cli import main as run

        leave(run())
    except KeyboardInterrupt:
        sys.exit(130)
