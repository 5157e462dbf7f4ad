"""`longspan info`: versions, devices, engines and installed packages."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from longspan.cli.library import library
from longspan.cli.options import AsJson, print_json

PACKAGES = (
    *("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "safetensors", "tokenizers"),
    *("typer", "rich", "matplotlib", "torch", "transformers"),
)


def info(as_json: AsJson = False) -> None:
    """Print versions, devices, engines (with the reason if one cannot run), instruction sets, installed packages."""
    facts = facts_of_machine()
    if as_json:
        print_json(facts)
        return
    print(f"longspan {facts['longspan']}, Python {facts['python']}, {facts['platform']}")
    if facts["untested_jax"]:
        print(facts["untested_jax"])
    print("devices: " + ", ".join(facts["devices"]))
    print("engines:")
    for name, status in facts["engines"].items():
        print(f"  {name:<10} {status}")
    print(f"instruction sets: {', '.join(facts['instruction_sets']) or 'none (the native library is missing)'}")
    print("installed packages:")
    for name, number in facts["installed"].items():
        print(f"  {name:<18} {number or '-'}")


def facts_of_machine() -> dict[str, Any]:
    """The values that `info` prints."""
    ls = library()
    import jax
    import jax.numpy as jnp

    from longspan.engines import ENGINES, Request
    from longspan.engines.cpu import library as native
    from longspan.tested_jax import untested

    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.float32)
    request = Request.of(q=x, k=x, v=x, mask=ls.Causal())
    missing = native.missing()
    return dict(
        longspan=ls.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        executable=sys.executable,
        untested_jax=untested(jax.__version__),
        devices=[f"{device.platform} {device.id} ({device.device_kind})" for device in jax.devices()],
        engines={name: engine.unsupported(request) or "runs" for name, engine in ENGINES.items()},
        native=missing or "built",
        instruction_sets=[] if missing else list(native.instruction_sets()),
        installed={name: _version(name) for name in PACKAGES},
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
