"""Caches in files: safetensors, with a digest of the plan that is compared when they are read."""

import os
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import no_type_check
from longspan.cache.contents import check_contents
from longspan.cache.plan import CachePlan
from longspan.cache.store import Cache, tables_of
from longspan.optional import needs

STORED_AS = dict(float16="F16", bfloat16="U16", float32="F32", float64="F64")  # bfloat16 as bits: see `save`
NAMES = ("k", "v", "positions", "length", "furthest", "overflowed")
FORMAT = "longspan-cache-1"


def save(cache: Cache, path: Any) -> None:
    """Writes beside the path and renames, so that an interrupted save leaves what was there."""
    needs("longspan.cache", "safetensors", "hf")
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = Path(path)
    if cache.positions.ndim != 2:
        raise ValueError(
            f"This cache holds those of several layers, {cache.positions.shape[0]} of them: save each in a file of its "
            "own, `jax.tree.map(lambda x: x[0], cache).save(path)`."
        )
    tensors = {name: np.ascontiguousarray(getattr(cache, name)) for name in NAMES}
    metadata = dict(format=FORMAT, plan=cache.plan.digest, dtype=cache.k.dtype.name)
    if cache.k.dtype == jnp.bfloat16:  # as bits: NumPy's own safetensors do not have it
        tensors |= {name: tensors[name].view(np.uint16) for name in ("k", "v")}
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        save_file(tensors, partial, metadata=metadata)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())  # some disks say only now that they are full
        os.replace(partial, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}. What was there is still there.") from error
    finally:
        partial.unlink(missing_ok=True)


@no_type_check
def restore(path: Any, plan: CachePlan) -> Cache:
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

    if not isinstance(plan, CachePlan):
        raise TypeError(f"`plan` must be what `ls.cache.plan(mask, length)` gives, got {type(plan).__name__}.")
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a directory: give the file that `Cache.save` wrote.")
    try:
        with safetensors.safe_open(os.fspath(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in list(file.keys())}
            _check_header(path, plan, metadata, {n: (x.get_dtype(), tuple(x.get_shape())) for n, x in slices.items()})
            tensors = {name: file.get_tensor(name) for name in NAMES}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}.") from error
    if metadata["dtype"] == "bfloat16":
        tensors |= {name: tensors[name].view(jnp.bfloat16) for name in ("k", "v")}
    check_contents(path, plan, tensors)
    return Cache(**{name: jnp.asarray(x) for name, x in tensors.items()}, tables=tables_of(plan), plan=plan)


def _check_header(path: Any, plan: CachePlan, metadata: dict[str, str], found: dict[str, tuple[str, tuple]]) -> None:
    """What a cache of the plan would have, before anything is read; how many rows and heads, the file alone knows."""
    if metadata.get("format") != FORMAT or set(found) != set(NAMES) or metadata.get("dtype") not in STORED_AS:
        raise ValueError(f"{path} is not a cache that `Cache.save` wrote.")
    if metadata.get("plan") != plan.digest:
        raise ValueError(
            f"{path} was saved by a cache of another plan than {plan!r}: restore it with the plan of the same mask, "
            "length and slack."
        )
    dtype = metadata["dtype"]
    if dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{path} holds float64, which JAX would round to float32. Set `jax_enable_x64`, as when saving."
        )
    shape = found["k"][1]
    batch, _, heads, _ = shape if len(shape) == 4 and min(shape[0], *shape[2:]) > 0 else (1, 0, 1, 0)
    floats = (batch, plan.capacity, heads)
    wanted = dict(k=floats, v=floats, positions=(batch, plan.capacity), length=(batch,), furthest=(batch,))
    for name, (stored, shape) in found.items():
        kind = dict(k=STORED_AS[dtype], v=STORED_AS[dtype], overflowed="BOOL").get(name, "I32")
        like = wanted.get(name, (batch,))
        sizes = name in ("k", "v") and len(shape) == 4 and shape[3] > 0
        if stored != kind or (shape[:3] if sizes else shape) != like:
            raise ValueError(
                f"{path} is damaged: `{name}` is {stored}{list(shape)}, and in a cache of {plan!r} in {dtype} it would "
                f"be {kind}[{', '.join([*map(str, like), *(['head size'] if name in ('k', 'v') else [])])}]."
            )
