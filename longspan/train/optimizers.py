"""`adamw`: the optimizer that most runs use, with warm-up, cosine decay, clipping and selective weight decay."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from longspan.checks import check_static_size
from longspan.train.paths import names_of

# Parameters with these names, or of modules with "norm" in their names, do not decay.
NOT_DECAYED = ("bias", "scale")


def adamw(
    learning_rate: float,
    steps: int,
    *,
    warmup: int | None = None,
    final: float = 0.1,
    weight_decay: float = 0.01,
    clip: float | None = 1.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """AdamW whose learning rate rises linearly and then falls along a cosine.

    The rate is learning_rate · (s + 1) / (warmup + 1) at step s < warmup, then falls to `final` · learning_rate at the
    last step. Biases and norms have no weight decay: parameters named "bias" or "scale", and those of modules with
    "norm" in their names. The optimizer's state contains the rate, so `fit` reports it.

    Args:
        learning_rate: the peak.
        steps: the number of steps of the run.
        warmup: the number of steps until the peak; by default a tenth of the steps, at most 1,000.
        final: the share of the peak at the end.
        weight_decay: the share of a parameter that a step at learning rate 1 subtracts.
        clip: gradients with a larger norm, over all parameters, are scaled to this norm; None: no clipping.
        b1: the decay of the gradients' mean.
        b2: the decay of the squared gradients' mean.
        eps: added to the divisor.

    Example:
        >>> import optax
        >>> from longspan import train
        >>> optimizer = train.adamw(3e-4, steps=100, warmup=10)
        >>> isinstance(optimizer, optax.GradientTransformation)
        True
    """
    steps = check_static_size("steps", steps, 1)
    if warmup is None:
        warmup = min(1000, steps // 10)
    warmup = check_static_size("warmup", warmup, 0)
    if warmup >= steps:
        raise ValueError(
            f"`warmup` must be less than the {steps} steps of the run, got {warmup}. Warm up for fewer steps."
        )
    if not learning_rate > 0:
        raise ValueError(f"`learning_rate` must be positive, got {learning_rate}.")

    def build(learning_rate: Any) -> optax.GradientTransformation:
        rule = optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=decays)
        if clip is None:
            return rule
        return optax.chain(optax.clip_by_global_norm(clip), rule)

    return optax.inject_hyperparams(build)(learning_rate=partial(_scheduled_rate, learning_rate, warmup, steps, final))


def _scheduled_rate(peak: float, warmup: int, steps: int, final: float, step: Any) -> jax.Array:
    """The learning rate at a step. Not optax's schedules, which mix dtypes."""
    at = jnp.asarray(step).astype(np.float32)
    rising = (at + 1) / (warmup + 1)
    progress = jnp.clip((at - warmup) / max(1, steps - 1 - warmup), 0, 1)
    falling = final + (1 - final) * (1 + jnp.cos(np.pi * progress)) / 2
    return peak * jnp.where(at < warmup, rising, falling)


def decays(parameters: Any) -> Any:
    """A tree of bools: the parameters that decay."""

    def decays_one(path: Any, _: Any) -> bool:
        names = names_of(path)
        return names[-1] not in NOT_DECAYED and not any("norm" in name for name in names)

    return jax.tree_util.tree_map_with_path(decays_one, parameters)
