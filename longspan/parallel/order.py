"""The order of a sequence's tokens on the P devices that share it; one order for a whole model.

Each device holds one or two runs of neighbouring tokens. In "contiguous" order device i holds chunk i of P. In "zigzag"
order it holds chunks i and 2·P − 1 − i of 2·P, which balances the work of causal layers.
"""

from typing import Any, Literal, TypeAlias

import numpy as np

from longspan.checks import check_choice, check_static_size

Order: TypeAlias = Literal["contiguous", "zigzag"]
ORDERS = ("contiguous", "zigzag")


def check_order(order: Any) -> None:
    """`order` is "contiguous" or "zigzag"."""
    check_choice("order", order, ORDERS)


def check_mesh(order: Any, mesh: Any) -> None:
    """An order other than "contiguous" needs a mesh: without one it would be ignored, and the results be wrong."""
    check_order(order)
    if mesh is None and order != "contiguous":
        raise ValueError(
            f"order={order!r} orders the tokens over the devices of a mesh, but no mesh was given. Pass `mesh`."
        )


def check_length(length: int, shards: int, order: str) -> None:
    """The tokens can be in this order without padding."""
    unit = shards * runs_of(order)
    if order != "contiguous" and length % unit:
        raise ValueError(
            f"order={order!r} needs a multiple of {unit} tokens, got {length}. Pad and order them with "
            "`ls.parallel.shard_batch`."
        )


def runs_of(order: str) -> int:
    """The number of runs of neighbouring tokens that a device holds."""
    return 2 if order == "zigzag" else 1


def padded(length: int, shards: int, order: str) -> int:
    """The length, padded so that all devices hold the same number of tokens."""
    unit = shards * runs_of(order)
    return -(-length // unit) * unit


def chunk_of(order: str, shards: int, device: Any, run: int) -> Any:
    """The chunk of the sequence that a device holds as its first or second run; `device` may be an array."""
    return 2 * shards - 1 - device if run else device


def owner_of(order: str, shards: int, chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(device, run) of chunks."""
    run = chunk >= shards
    return np.where(run, 2 * shards - 1 - chunk, chunk), run.astype(np.int64)


def stored(length: int, shards: int, order: str) -> np.ndarray:
    """The token in each slot of the array that the devices hold together, int32 [length]."""
    check_order(order)
    length, shards = check_static_size("length", length, 1), check_static_size("shards", shards, 1)
    size = length // (shards * runs_of(order))
    chunks = [chunk_of(order, shards, device, run) for device in range(shards) for run in range(runs_of(order))]
    return (np.array(chunks, np.int32)[:, None] * size + np.arange(size, dtype=np.int32)[None]).reshape(-1)
