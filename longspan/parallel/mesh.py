"""`mesh`: the devices by what they share: the batch (dp, fsdp), the heads (tp), the sequence (sp)."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from longspan.array_types import no_type_check
from longspan.checks import check_static_size


@no_type_check
def mesh(*, dp: int = 1, fsdp: int = 1, tp: int = 1, sp: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes "dp", "fsdp", "tp" and "sp", of the first dp·fsdp·tp·sp devices.

    The sequence's axis is the innermost: devices that send each other keys in every layer are neighbours.

    Args:
        dp: over how many devices the batch is split.
        fsdp: over how many the batch, and a model's parameters, are split besides.
        tp: over how many the heads are split.
        sp: over how many the sequence is split.
        devices: which devices; by default all of `jax.devices()` that are needed, in an order that suits the hardware.

    Example:
        >>> dict(ls.parallel.mesh(dp=2, sp=4).shape)
        {'dp': 2, 'fsdp': 1, 'tp': 1, 'sp': 4}
    """
    sizes = dict(dp=dp, fsdp=fsdp, tp=tp, sp=sp)
    for name, size in sizes.items():
        check_static_size(name, size, 1)
    there = jax.devices() if devices is None else list(devices)
    wanted = math.prod(sizes.values())
    if wanted > len(there):
        asked = " · ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"{asked} are {wanted} devices, but there are {len(there)}. Ask for fewer.")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=there[:wanted]
    )
