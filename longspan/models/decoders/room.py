"""Whether the caches of a request fit into memory at all: asked before they are allocated."""

import os
from typing import Any

import jax

from longspan import cache as caches
from longspan.models.decoders.family import DecoderConfig


def check_room(config: DecoderConfig, batch: int, length: int, dtype: Any) -> None:
    """Raises if the caches of all layers take more than all devices have together."""
    _, kv_heads, size = config.heads
    plans = {kind: caches.plan(config.mask(kind), length) for kind in dict.fromkeys(config.kinds)}
    needed = sum(plans[kind].nbytes(batch, kv_heads, size, dtype) for kind in config.kinds)
    there = device_bytes()
    if there is not None and needed > there:
        raise ValueError(
            f"Caches for {batch} rows of {length:,} tokens take {needed:,} bytes, and the devices have {there:,}. Give "
            "a smaller `max_length`, or fewer prompts at once."
        )


def device_bytes() -> int | None:
    """The memory of all devices together, in bytes; None: not known."""
    devices = jax.devices()
    if devices[0].platform == "cpu":  # however many there are, they share the machine's
        known = hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys()
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else None
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else limit * len(devices)
