"""In which order the tokens of a sequence lie on the devices that share it: one for a whole model.

Every device holds one or two runs of neighbouring tokens: "contiguous" gives device i chunk i, "zigzag" chunks i and
2·P − 1 − i of 2·P, so that causal layers have as much to do everywhere. The functions below say where a token lies.
"""

from typing import Any, Literal, TypeAlias

import numpy as np

from longspan.checks import check_choice, check_static_size

Order: TypeAlias = Literal["contiguous", "zigzag"]
ORDERS = ("contiguous", "zigzag")


def check_order(order: Any) -> None:
    """One of the orders there are."""
    check_choice("order", order, ORDERS)


def check_mesh(order: Any, mesh: Any) -> None:
    """An order, and devices for it: without a mesh it would be ignored, and tokens be taken for others."""
    check_order(order)
    if mesh is None and order != "contiguous":
        raise ValueError(f"order={order!r} says how tokens lie on the devices of a mesh: give `mesh` too.")


def check_length(length: int, shards: int, order: str) -> None:
    """A number of tokens that lie in an order, as they are."""
    unit = shards * runs_of(order)
    if order != "contiguous" and length % unit:
        raise ValueError(
            f"order={order!r} needs a multiple of {unit} tokens, got {length}. Pad and order them with "
            "`ls.parallel.shard_batch`."
        )


def runs_of(order: str) -> int:
    """How many runs of neighbouring tokens a device holds."""
    return 2 if order == "zigzag" else 1


def padded(length: int, shards: int, order: str) -> int:
    """The length that every device gets the same part of."""
    unit = shards * runs_of(order)
    return -(-length // unit) * unit


def chunk_of(order: str, shards: int, device: Any, run: int) -> Any:
    """Which chunk of the sequence is a device's run; `device` may be an array."""
    return 2 * shards - 1 - device if run else device


def owner_of(order: str, shards: int, chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(device, run) of some chunks."""
    run = chunk >= shards
    return np.where(run, 2 * shards - 1 - chunk, chunk), run.astype(np.int64)


def stored(length: int, shards: int, order: str) -> np.ndarray:
    """Which token lies in each place, as the devices hold them side by side; int32 [length]."""
    check_order(order)
    length, shards = check_static_size("length", length, 1), check_static_size("shards", shards, 1)
    size = length // (shards * runs_of(order))
    chunks = [chunk_of(order, shards, device, run) for device in range(shards) for run in range(runs_of(order))]
    return (np.array(chunks, np.int32)[:, None] * size + np.arange(size, dtype=np.int32)[None]).reshape(-1)
