"""Where arrays lie on a mesh: batches by rows and tokens, parameters by the heads of tp and by fsdp."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.train.paths import names_of
from longspan.train.step import TrainState

SEQUENCE_AXIS, FSDP_AXIS = "sp", "fsdp"
# Kernels that produce heads, hidden units and logits are split by columns, those that read them by rows, as in
# Megatron. Matrices that join several of them (qkv, gate_up) are not split over the heads' axis.
QUERIES = ("query", "query_global", "key_global", "value_global")
COLUMNS = (*QUERIES, "key", "value", "gate", "up", "head")
ROWS = ("out", "down")


def place_batch(batch: Any, mesh: Any) -> Any:
    """The arrays of a batch on the devices: rows over dp and fsdp, tokens over sp.

    With several processes, every process has the whole batch and its devices receive their own rows. Arrays of JAX
    that are already on the mesh stay where they are.
    """
    if mesh is None:
        return jax.device_put(batch)
    return jax.tree.map(lambda x: _place_array(x, mesh), batch)


def check_batch(batch: Any, mesh: Any, accumulate: int) -> None:
    """Raises unless the rows of a batch can be divided into parts and over devices."""
    arrays = [x for x in jax.tree.leaves(batch) if np.ndim(x)]
    rows = sorted({x.shape[0] for x in arrays})
    if not rows:
        raise ValueError("`batches(step)` returned no array with rows. Return a dict of arrays [B, ...].")
    if len(rows) > 1:
        raise ValueError(f"The arrays of a batch have different numbers of rows: {rows}. Give all of them [B, ...].")
    devices = _size(mesh, BATCH_AXES)
    if rows[0] % (accumulate * devices):
        raise ValueError(
            f"A batch has {rows[0]} rows, which cannot be divided into {accumulate} parts (`accumulate`) on {devices} "
            f"devices (dp and fsdp). Use a multiple of {accumulate * devices} rows."
        )
    shards = _size(mesh, (SEQUENCE_AXIS,))
    lengths = [x.shape[1] for x in arrays if x.ndim > 1 and x.shape[1] % shards]
    if lengths:
        raise ValueError(
            f"A batch has {lengths[0]} tokens per row, which cannot be divided over {shards} devices (sp). Use a "
            f"multiple of {shards} tokens."
        )


def state_shardings(state: TrainState, optimizer: Any, mesh: Any, heads: Mapping[str, int]) -> TrainState:
    """The sharding of each array of a state. The state may consist of shapes."""
    replicated = NamedSharding(mesh, P())
    everywhere = lambda tree: jax.tree.map(lambda _: replicated, tree)  # noqa: E731
    parameters = jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, parameter_spec(path, x.shape, mesh, heads)), state.parameters
    )
    of_optimizer = optax.tree_map_params(
        optimizer, lambda _, sharding: sharding, state.optimizer, parameters, transform_non_params=lambda _: replicated
    )
    return TrainState(replicated, replicated, parameters, everywhere(state.others), of_optimizer)


def heads_of(model: Any) -> dict[str, int]:
    """The number of heads that each projection of a model produces or reads, as far as its config tells it."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "num_attention_heads"):
        return {}
    queries = int(config.num_attention_heads)
    keys = int(getattr(config, "num_key_value_heads", None) or queries)
    return dict.fromkeys((*QUERIES, "out"), queries) | dict(key=keys, value=keys)


def parameter_spec(path: Any, shape: tuple[int, ...], mesh: Any, heads: Mapping[str, int]) -> P:
    """The mesh axes that split a parameter: tp by its name, then fsdp along the longest axis that is left.

    Heads stay whole: a projection whose number of heads is not a multiple of tp is not split over tp.

    Example:
        >>> path = [jax.tree_util.DictKey("query"), jax.tree_util.DictKey("kernel")]
        >>> parameter_spec(path, (6, 8), jax.make_mesh((1,), ("tp",)), dict(query=4))
        P(None, 'tp')
    """
    owner, leaf = ["", *names_of(path)][-2:]
    entries: list[Any] = [None] * len(shape)
    whole = heads.get(owner, 0) % _size(mesh, (HEAD_AXIS,)) == 0
    if owner in COLUMNS and whole and leaf in ("kernel", "bias"):
        _split(entries, shape, len(shape) - 1, HEAD_AXIS, mesh)
    if owner in ROWS and whole and leaf == "kernel":
        _split(entries, shape, len(shape) - 2, HEAD_AXIS, mesh)
    # The first of three axes counts layers: a scan takes one layer after another.
    free = [axis for axis in range(len(shape)) if entries[axis] is None and (axis or len(shape) < 3)]
    for axis in sorted(free, key=lambda axis: -shape[axis]):
        if _split(entries, shape, axis, FSDP_AXIS, mesh):
            break
    return P(*entries)


def place_array(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has, on the devices of a sharding; random keys too."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raw = place_array(jax.random.key_data(x), NamedSharding(sharding.mesh, P()))
        return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _place_array(x: Any, mesh: Any) -> jax.Array:
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh:
        return x
    rows = tuple(name for name in BATCH_AXES if name in mesh.shape)
    tokens = SEQUENCE_AXIS if SEQUENCE_AXIS in mesh.shape else None
    return place_array(x, NamedSharding(mesh, P(*(rows or None, tokens)[: np.ndim(x)])))


def _split(entries: list[Any], shape: tuple[int, ...], axis: int, name: str, mesh: Any) -> bool:
    """Splits one array axis over a mesh axis in place, if its size is a multiple."""
    if axis < 0 or name not in mesh.shape or shape[axis] % mesh.shape[name]:
        return False
    entries[axis] = name
    return True


def _size(mesh: Any, names: tuple[str, ...]) -> int:
    if mesh is None:
        return 1
    return int(np.prod([mesh.shape[name] for name in names if name in mesh.shape]))
