"""Caches in files: safetensors, with a digest of the plan that is compared when they are read."""

import os
import uuid
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from longspan._checks import FLOATS
from longspan._optional import needs
from longspan._types import no_type_check
from longspan.cache.plan import Plan
from longspan.cache.store import Cache, tables_of

NAMES = ("k", "v", "positions", "length", "furthest", "overflowed")
FORMAT = "longspan-cache-1"


def save(cache: Cache, path: Any) -> None:
    """Writes beside the path and renames, so that an interrupted save leaves what was there."""
    needs("longspan.cache", "safetensors", "hf")
    from safetensors.numpy import save_file

    path = Path(path)
    tensors = {name: np.ascontiguousarray(getattr(cache, name)) for name in NAMES}
    metadata = dict(format=FORMAT, plan=cache.plan.digest, dtype=cache.k.dtype.name)
    if cache.k.dtype == jnp.bfloat16:  # as bits: NumPy's own safetensors do not have it
        tensors |= {name: tensors[name].view(np.uint16) for name in ("k", "v")}
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@no_type_check
def restore(path: Any, plan: Plan) -> Cache:
    """The cache that `Cache.save` wrote.

    Args:
        path: the file.
        plan: the plan of the saved cache; one that differs is an error.

    Example:
        >>> plan = ls.cache.plan(ls.Causal(), 8)
        >>> folder = tempfile.mkdtemp()
        >>> ls.cache.init(plan, 1, 2, 4, jnp.float32).save(f"{folder}/cache.safetensors")
        >>> ls.cache.restore(f"{folder}/cache.safetensors", plan).length.tolist()
        [0]
    """
    needs("longspan.cache", "safetensors", "hf")
    import safetensors

    if not isinstance(plan, Plan):
        raise TypeError(f"`plan` must be what `ls.cache.plan(mask, length)` gives, got {type(plan).__name__}.")
    try:
        with safetensors.safe_open(os.fspath(path), framework="numpy") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            tensors = {name: file.get_tensor(name) for name in NAMES if name in names}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}.") from error
    if metadata.get("format") != FORMAT or len(tensors) != len(NAMES):
        raise ValueError(f"{path} is not a cache that `Cache.save` wrote.")
    if metadata.get("plan") != plan.digest:
        raise ValueError(
            f"{path} was saved by a cache of another plan than {plan!r}: restore it with the plan of the same mask, "
            "length and slack."
        )
    if metadata.get("dtype") == "bfloat16":
        tensors |= {name: tensors[name].view(jnp.bfloat16) for name in ("k", "v")}
    _check_tensors(path, plan, tensors)
    return Cache(**{name: jnp.asarray(x) for name, x in tensors.items()}, tables=tables_of(plan), plan=plan)


def _check_tensors(path: Any, plan: Plan, tensors: dict[str, np.ndarray]) -> None:
    """What a cache of the plan would have; how many rows and heads, the file alone knows."""
    batch, _, heads, _ = tensors["k"].shape if tensors["k"].ndim == 4 else (0, 0, 0, 0)
    for name, x in tensors.items():
        wanted, kinds = (batch,), ("bool",) if name == "overflowed" else ("int32",)
        if name in ("k", "v"):
            wanted, kinds = (batch, plan.capacity, heads, *x.shape[3:4]), FLOATS
        elif name == "positions":
            wanted = (batch, plan.capacity)
        if x.shape != wanted or x.dtype.name not in kinds:
            raise ValueError(
                f"{path} is damaged: `{name}` is {x.dtype}{list(x.shape)}, and in a cache of {plan!r} it would have "
                f"shape {list(wanted)}."
            )
