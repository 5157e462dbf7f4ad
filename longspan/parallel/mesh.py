"""`mesh`: a device mesh with axes for the batch (dp, fsdp), the heads (tp) and the sequence (sp)."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from longspan.array_types import no_type_check
from longspan.checks import check_static_size


@no_type_check
def mesh(*, dp: int = 1, fsdp: int = 1, tp: int = 1, sp: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the first dp·fsdp·tp·sp devices, with the axes "dp", "fsdp", "tp" and "sp".

    "sp" is the innermost axis, so that devices that exchange keys in every layer are neighbours.

    Args:
        dp: the number of devices that share the batch.
        fsdp: the number of devices that share the batch and the model's parameters.
        tp: the number of devices that share the heads.
        sp: the number of devices that share the sequence.
        devices: the devices to use; by default those of `jax.devices()`, in an order that suits the hardware.

    Example:
        >>> dict(ls.parallel.mesh(dp=2, sp=4).shape)
        {'dp': 2, 'fsdp': 1, 'tp': 1, 'sp': 4}
    """
    sizes = dict(dp=dp, fsdp=fsdp, tp=tp, sp=sp)
    for name, size in sizes.items():
        check_static_size(name, size, 1)
    available = jax.devices() if devices is None else list(devices)
    wanted = math.prod(sizes.values())
    if wanted > len(available):
        product = " · ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"{product} takes {wanted} devices, but there are {len(available)}. Use smaller axes.")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=available[:wanted]
    )
