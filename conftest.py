"""Settings of every test, doctest and README block: it sits at the root because doctests live in the package."""

import gc
import os
import re
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # read once, when JAX starts its backend

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiled programs are kept for the next run of this checkout; LONGSPAN_TEST_CACHE=0 compiles everything anew.
if os.environ.get("LONGSPAN_TEST_CACHE") != "0":
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent / "build" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

# Only modules imported from here on are checked, so nothing above may import longspan.
jaxtyping.install_import_hook("longspan", "beartype.beartype")

SLOWER_DOCTESTS = ("longspan/hf", "longspan/models", "longspan/nn")  # they compile whole models

# No deadline, and no complaint about slow examples: the first example of a shape compiles.
EVERYWHERE = dict(
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("default", max_examples=80, **EVERYWHERE)
hypothesis.settings.register_profile("quick", max_examples=50, **EVERYWHERE)
hypothesis.settings.register_profile("slow", max_examples=2000, **EVERYWHERE)


# What needs a mesh: whole folders, and doctests.
ON_MESHES = (
    "tests/parallel/", "tests/sharding/", "longspan/parallel/", "longspan/explanation.py",
    "longspan/maskinfo/sharding.py",
)  # fmt: skip


def pytest_configure(config):
    """Sets the number of devices before JAX starts its backend: one, as most users have, or eight for `-m mesh`."""
    jax.config.update("jax_num_cpu_devices", int(os.environ.get("LONGSPAN_DEVICES") or _devices_for(config)))
    if not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile(os.environ.get("LONGSPAN_HYPOTHESIS") or _profile_of(config))


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(config, items):
    """Marks tests that need a mesh, doctests as quick, and property tests as slow; what breaks first runs first."""
    for item in items:
        if item.nodeid.startswith(ON_MESHES):
            item.add_marker("mesh")
        if isinstance(item, pytest.DoctestItem) and not item.nodeid.startswith(SLOWER_DOCTESTS):
            item.add_marker("quick")
    if _profile_of(config) == "slow":
        for item in items:
            if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("quick") is None)


def pytest_collection_finish(session):
    """Modules and tests stay: the garbage collector need not look at them again, nor so often at what traces leave."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def _selects(config, marker: str) -> bool:
    words = config.option.markexpr.replace(f"not {marker}", "")
    return marker in re.findall(r"\w+", words)


def _devices_for(config) -> int:
    return 8 if _selects(config, "mesh") else 1


def _profile_of(config) -> str:
    return "slow" if _selects(config, "slow") else "default"


STARTED = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = time.process_time()
    if item.get_closest_marker("mesh") and jax.device_count() < 8:
        pytest.fail("This test needs 8 devices: select it with `-m mesh`, or set LONGSPAN_DEVICES=8.", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Records each test's CPU seconds with its set-up: `--junitxml` writes them, benchmarks/suite.py adds them up."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_seconds", round(time.process_time() - item.stash[STARTED], 3)))


MOST_TESTS = 40  # how many tests in a row may keep their programs: a process would grow to 5 GB over the suite
_kept = 0


def pytest_runtest_teardown(item, nextitem):
    """Compiled programs go with the file that they were compiled for, or after so many tests of it."""
    global _kept
    _kept += 1
    if nextitem is None or nextitem.path != item.path or _kept >= MOST_TESTS:
        jax.clear_caches()
        gc.collect()
        _kept = 0


@pytest.fixture(autouse=True)
def _names_in_doctests(request):
    if isinstance(request.node, pytest.DoctestItem):
        import tempfile

        import jax.numpy as jnp
        import numpy as np

        import longspan as ls

        names = dict(jax=jax, jnp=jnp, np=np, ls=ls, tempfile=tempfile)
        request.getfixturevalue("doctest_namespace").update(names)


@pytest.fixture
def unchecked(monkeypatch):
    """The package as users get it. With the shape checker on, its errors come before ours."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
