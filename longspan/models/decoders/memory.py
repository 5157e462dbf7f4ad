"""The memory check of `generate`: raises before it allocates caches that do not fit."""

import os
from typing import Any

import jax

from longspan import cache as caches
from longspan.models.decoders.family import DecoderConfig


def check_memory(config: DecoderConfig, batch: int, length: int, dtype: Any) -> None:
    """Raises if the caches of all layers need more memory than all devices have together."""
    _, kv_heads, head_dim = config.heads
    plans = {kind: caches.plan(config.mask(kind), length) for kind in dict.fromkeys(config.kinds)}
    needed = sum(plans[kind].nbytes(batch, kv_heads, head_dim, dtype) for kind in config.kinds)
    available = device_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"Caches for {batch} rows of {length:,} tokens need {needed:,} bytes, but the devices have {available:,}. "
            "Give a smaller `max_length`, or fewer prompts at once."
        )


def device_bytes() -> int | None:
    """The memory of all devices together, in bytes; None if it is unknown."""
    devices = jax.devices()
    if devices[0].platform == "cpu":  # all CPU devices share the machine's memory
        if not hasattr(os, "sysconf") or not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
            return None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return None
    return limit * len(devices)
