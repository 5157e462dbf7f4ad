"""Caches in safetensors files, which store a digest of the plan: `restore` compares it."""

import os
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import no_type_check
from longspan.cache.checks import check_order
from longspan.cache.contents import check_contents
from longspan.cache.plan import CachePlan
from longspan.cache.store import Cache, slots_first, tables_of
from longspan.optional import needs

STORED_AS = dict(float16="F16", bfloat16="U16", float32="F32", float64="F64")  # bfloat16 as its bits: see `save`
NAMES = ("k", "v", "positions", "length", "furthest", "overflowed")
FORMAT = "longspan-cache-1"


def save(cache: Cache, path: Any) -> None:
    """Writes to a temporary file and renames it, so that an interrupted save leaves the earlier file intact."""
    needs("longspan.cache", "safetensors", "hf")
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = Path(path)
    if cache.positions.ndim != 2:
        raise ValueError(
            f"This cache stacks {cache.positions.shape[0]} layers. Save each of them in a separate file: "
            "`jax.tree.map(lambda x: x[0], cache).save(path)`."
        )
    tensors = {name: np.asarray(getattr(cache, name)) for name in NAMES}
    tensors |= {name: slots_first(tensors[name], cache.heads_first) for name in ("k", "v")}
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    metadata = dict(format=FORMAT, plan=cache.plan.digest, dtype=cache.k.dtype.name)
    if cache.k.dtype == jnp.bfloat16:  # as bits: safetensors does not support NumPy's bfloat16
        tensors |= {name: tensors[name].view(np.uint16) for name in ("k", "v")}
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        save_file(tensors, partial, metadata=metadata)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())  # some file systems report a full disk only here
        os.replace(partial, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}. An earlier file there is unchanged.") from error
    finally:
        partial.unlink(missing_ok=True)


@no_type_check
def restore(path: Any, plan: CachePlan, *, heads_first: bool = False) -> Cache:
    """Reads the cache that `Cache.save` wrote.

    Args:
        path: the file.
        plan: the plan of the saved cache. A different plan raises a ValueError.
        heads_first: the order of heads and slots in the new cache, as in `ls.cache.init`. It may differ from that of
            the saved cache.

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
        raise TypeError(f"`plan` must be a CachePlan from `ls.cache.plan(mask, length)`, got {type(plan).__name__}.")
    check_order(heads_first)
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a directory. Pass the file that `Cache.save` wrote.")
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
    if heads_first:
        tensors |= {name: tensors[name].swapaxes(1, 2) for name in ("k", "v")}
    arrays = {name: jnp.asarray(x) for name, x in tensors.items()}
    return Cache(**arrays, tables=tables_of(plan), plan=plan, heads_first=heads_first)


def _check_header(path: Any, plan: CachePlan, metadata: dict[str, str], found: dict[str, tuple[str, tuple]]) -> None:
    """Checks dtypes and shapes before any array is read. The numbers of rows and heads are those of the file."""
    if metadata.get("format") != FORMAT or set(found) != set(NAMES) or metadata.get("dtype") not in STORED_AS:
        raise ValueError(f"{path} is not a cache that `Cache.save` wrote.")
    if metadata.get("plan") != plan.digest:
        raise ValueError(
            f"{path} was saved with another plan than {plan!r}. Restore it with a plan of the mask, length and slack "
            "that it was saved with."
        )
    dtype = metadata["dtype"]
    if dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{path} holds float64, which JAX would round to float32. Set `jax_enable_x64`, as when saving."
        )
    batch, heads = 1, 1
    k_shape = found["k"][1]
    if len(k_shape) == 4 and min(k_shape[0], *k_shape[2:]) > 0:
        batch, _, heads, _ = k_shape
    for name, (stored, shape) in found.items():
        _check_tensor(path, plan, dtype, name, stored, shape, batch, heads)


def _check_tensor(
    path: Any, plan: CachePlan, dtype: str, name: str, stored: str, shape: tuple, batch: int, heads: int
) -> None:
    """Checks the stored dtype and the shape of one array; the head size of k and v may be any."""
    expected_dtype, expected, head_size = "I32", (batch,), ""
    compared = shape
    if name in ("k", "v"):
        expected_dtype, expected, head_size = STORED_AS[dtype], (batch, plan.capacity, heads), ", head size"
        if len(shape) == 4 and shape[3] > 0:
            compared = shape[:3]
    elif name == "positions":
        expected = (batch, plan.capacity)
    elif name == "overflowed":
        expected_dtype = "BOOL"
    if stored != expected_dtype or compared != expected:
        sizes = ", ".join(map(str, expected)) + head_size
        raise ValueError(
            f"{path} is damaged: `{name}` is {stored}{list(shape)}, but in a cache of {plan!r} with dtype {dtype} it "
            f"must be {expected_dtype}[{sizes}]. Save the cache again."
        )
