"""The engines that tests run on.

Without the native library, tests of `cpu` are skipped. test_cpu_engine.py fails if there is a compiler.
"""

import pytest

from longspan.engines import tried
from longspan.engines.cpu import library

NATIVE = pytest.mark.skipif(library.missing() is not None, reason=f"engine='cpu': {library.missing()}")
RUNNING = tried("cpu")  # `pallas_tpu` runs on TPUs only: tests/test_pallas_tpu*.py interpret it


def available(*choices):
    """Parameters of a test: names of engines, or tuples that end with one."""
    named = [choice if isinstance(choice, tuple) else (choice,) for choice in choices]
    return [pytest.param(*choice, marks=[NATIVE] * (choice[-1] == "cpu")) for choice in named]


every_engine = pytest.mark.parametrize("engine", available(*RUNNING))
every_sparse_engine = pytest.mark.parametrize("engine", available(*(name for name in RUNNING if name != "reference")))
